"""What commands print: no name in a model or a recipe controls the terminal."""

import io
import json
import threading

import pytest
from rich.console import Console
from rich.table import Table

from approx.cli.tables import table
from approx.cli.terminal import Terminal, _Lines

HOSTILE = "a\x1b[31mred\x9b2J\x07 [bold]b[/bold]"


def test_names_cannot_move_the_cursor_or_set_colours(capsys):
    terminal = Terminal()
    terminal.result({}, table(["name", ""], [[HOSTILE, HOSTILE]]), HOSTILE)
    terminal.note(HOSTILE)
    terminal.error(HOSTILE)
    for text in capsys.readouterr():
        assert not {character for character in text if character != "\n" and not character.isprintable()}
        # The rest of the name is there, and brackets are text.
        assert text.count("red\\x9b2J") == text.count("[bold]b[/bold]") > 0


def test_json_stays_json_and_holds_no_control_character(capsys):
    Terminal(json_output=True).result({"name": HOSTILE + "\x7f"})
    text = capsys.readouterr().out
    assert "\x9b" not in text
    assert "\x7f" not in text
    assert json.loads(text) == {"name": HOSTILE + "\x7f"}


def test_a_log_shows_signs_of_life_and_the_time_left():
    notes, enough = [], threading.Event()

    def note(text):
        notes.append(text.partition("] ")[2])
        if sum("left" in one for one in notes):
            enough.set()

    with _Lines(note, silence=0.05) as lines:
        lines("evaluate needle", 0, 400)
        lines("evaluate needle", 100, 400)
        assert enough.wait(5)
    # The first line comes at once, the others after silence.
    assert notes[0] == "evaluate needle"
    assert any(one.startswith("evaluate needle: 100 of 400, about ") and one.endswith(" s left") for one in notes)


def test_the_time_left_only_falls_while_a_step_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("approx.cli.terminal.time.monotonic", lambda: now[0])
    lines = _Lines(lambda text: None, silence=30)
    lines("bench 8,000 tokens", 0, 10)
    now[0] = 50.0
    lines("bench 8,000 tokens", 1, 10)
    said = []
    for now[0] in (60.0, 90.0, 140.0, 200.0):
        said.append(lines._state().partition("of 10, ")[2])
    lines("check the plans", 0, 1)
    now[0] += 40
    assert lines._state() == "check the plans, for 40 s"
    assert said == ["about 7 min left", "about 7 min left", "about 6 min left", "this step for 2 min"]


def test_a_stage_without_progress_has_no_estimate():
    notes, twice = [], threading.Event()

    def note(text):
        notes.append(text.partition("] ")[2])
        if len(notes) == 2:
            twice.set()

    with _Lines(note, silence=0.05):
        assert twice.wait(5)
    assert set(notes) == {"still working"}


def test_a_stage_is_shown_as_done_when_the_next_one_begins():
    terminal, shown = Terminal(), io.StringIO()
    terminal.err = Console(file=shown, force_terminal=True, width=100)
    with terminal.progress() as advance:
        advance("read the data", 0, 1)
        advance("train", 1, 4)
    last = shown.getvalue().rpartition("read the data")[2]
    assert "1/1" in last
    assert "1/4" in last


def printed(made: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), soft_wrap=True)
    console.print(made)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the StringIO above


NAMES = ["improved-clustered", "adaptive-span", "librispeech/train-clean-100"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_words_stay_whole_and_lines_within_the_width(width):
    rows = [[name, "clusters=25, topk=32, iterations=5", "through weights, not choices", "1.83×"] for name in NAMES]
    lines = printed(table(["mechanism", "settings", "gradient", "speed-up"], rows), width)
    assert all(len(line) <= width for line in lines)
    words = {word for line in lines for word in line.split()}
    assert {*NAMES, "clusters=25,", "iterations=5", "choices", "1.83×"} <= words


def test_prints_a_list_if_a_table_is_too_wide():
    row = ["librispeech/train-clean-100", "openslr/librispeech_asr", "longest_answer"]
    lines = printed(table(["task", "hub dataset", "settings"], [row], title="Tasks"), 40)
    assert lines == ["Tasks", "", row[0], f"  hub dataset: {row[1]}", f"  settings: {row[2]}"]


def test_prints_a_plain_table_where_there_is_space():
    lines = [line.rstrip() for line in printed(table(["a", "b"], [["one two", "three"]]), 80)]
    assert lines == ["", " a        b", " ───────────────", " one two  three", ""]
