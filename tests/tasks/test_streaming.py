"""Streamed hub datasets: the same examples, and nothing read beyond the limit."""

import json

import pytest
from datasets import config as settings
from hypothesis import given
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.tasks import TASKS, documents, glue, open_task, squad, text
from approx.tasks.language import LanguageModelling

WORDS = [f"word {row} of the film" for row in range(40)]
ROWS = {
    "glue/sst2": [{"sentence": words, "label": row % 2} for row, words in enumerate(WORDS)],
    "documents": [{"text": words, "label": row % 4 // 2} for row, words in enumerate(WORDS)],
    "squad": [
        {
            "id": str(row),
            "title": f"Film_{row // 5}",
            "context": words,
            "question": "what",
            "answers": {"text": ["film"], "answer_start": [4]},
        }
        for row, words in enumerate(WORDS)
    ],
    "lm": [{"text": f" {words} \n"} for words in WORDS],
}
ROWS["mlm"] = ROWS["lm"]
SETTINGS = {"squad": {"articles": "Film_1,Film_2"}, "lm": {"stretch": 30}, "mlm": {"stretch": 30}}
PLACES = {
    "glue/sst2": (glue, "HUB_DATASET", "sst2", "validation"),
    "documents": (documents, "_HUB_DATASET", "plain_text", "test"),
    "lm": (text, "_HUB_DATASET", "wikitext-2-raw-v1", "test"),
    "mlm": (text, "_HUB_DATASET", "wikitext-2-raw-v1", "test"),
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Write a task's dataset as two files, the second optionally damaged, and return the task."""
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path / "cache")

    def store(name, damaged):
        folder = tmp_path / ("damaged" if damaged else "whole")
        folder.mkdir()
        lines = [json.dumps(row) + "\n" for row in ROWS[name]]
        (folder / "1.jsonl").write_text("".join(lines[:20]))
        (folder / "2.jsonl").write_text("no JSON\n" * 20 if damaged else "".join(lines[20:]))
        task = open_task(name, **SETTINGS.get(name, {}))
        if name == "squad":
            config, split = "plain_text", "validation"
            read = squad.read_rows
            monkeypatch.setattr(squad, "read_rows", lambda dataset, *asked: read(str(folder), *asked))
        else:
            module, constant, config, split = PLACES[name]
            monkeypatch.setattr(module, constant, str(folder))
        files = f"  - split: {split}\n    path: '*.jsonl'\n"
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
        return task

    return store


@pytest.mark.parametrize("name", ROWS)
def test_streamed_examples_are_the_same(name, stored):
    task = stored(name, damaged=False)
    for limit in (None, 6, 1000):
        assert task.load(limit=limit, streaming=True) == task.load(limit=limit)


@pytest.mark.parametrize("name", ROWS)
def test_reads_nothing_beyond_the_limit(name, stored):
    task = stored(name, damaged=True)
    split = task.load(limit=6, streaming=True)
    assert (len(split.examples), split.subset) == (6, True)
    with pytest.raises(ApproxError, match=r"The download of .*damaged failed: .* Try again") as caught:
        task.load(streaming=True)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_waits_for_a_late_class(stored, monkeypatch):
    monkeypatch.setitem(ROWS, "documents", [{"text": words, "label": row // 30} for row, words in enumerate(WORDS)])
    task = stored("documents", damaged=False)
    split = task.load(limit=6, streaming=True)
    assert [example.label for example in split.examples] == [0, 1] * 3
    assert split == task.load(limit=6)


def test_a_stretch_at_the_limit_is_whole(stored):
    task = stored("lm", damaged=False)
    whole = task.load()
    for limit in (1, 3, 7):
        cut = task.load(limit=limit, streaming=True)
        for some, every in zip(cut.examples, whole.examples, strict=False):
            assert (some.id, some.label, some.inputs["start"], some.inputs["end"]) == (
                every.id,
                every.label,
                every.inputs["start"],
                every.inputs["end"],
            )


@given(
    rows=st.lists(st.text("ab \n", max_size=30), max_size=30),
    limit=st.integers(1, 12),
    stretch=st.integers(1, 12),
)
def test_the_beginning_of_a_text_holds_the_stretches_of_the_limit_and_shows_whether_there_are_more(
    rows, limit, stretch
):
    def bounds(text):
        return [(one.inputs["start"], one.inputs["end"]) for one in task._stretches(text, "test")]

    task = LanguageModelling(stretch=stretch)
    read, whole = (bounds(task._beginning(({"text": row} for row in rows), some)) for some in (limit, None))
    assert read[:limit] == whole[:limit]
    assert (len(read) > limit) == (len(whole) > limit)


def test_a_text_is_read_no_further_than_the_row_that_shows_more_than_the_limit():
    # Stretches of two characters: the first row reaches the limit, the second shows that there are more.
    rows = iter([{"text": "a " * 50}, {"text": "a " * 10}, {"text": "not read"}])
    assert len(LanguageModelling(stretch=2)._beginning(rows, 50)) == 120
    assert next(rows) == {"text": "not read"}


def test_texts_without_a_label_are_refused(stored, monkeypatch):
    monkeypatch.setitem(ROWS, "documents", [{"text": words, "label": -1} for words in WORDS])
    with pytest.raises(ApproxError, match=r"split 'test' of .* has no labels; use test or train"):
        stored("documents", damaged=False).load(limit=2)


def test_every_task_says_where_its_examples_come_from():
    names = {f"{kind}-classification" for kind in ("text", "token", "image")}
    assert {name for name in TASKS if open_task(name).dataset is None} == {
        "lm-eval/NAME",
        "listops",
        "needle",
        "passkey",
        "copy",
    } | names


def test_without_a_network_streaming_is_refused(monkeypatch):
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    with pytest.raises(ApproxError, match=r"offline mode is on\. .*--data DIR, or connect to the network") as caught:
        open_task("squad").load(limit=1, streaming=True)
    assert caught.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.network
@pytest.mark.parametrize("name", ["glue/mrpc", "documents", "squad_v2", "lm"])
def test_the_hub_streams_what_it_stores(name):
    assert open_task(name).load(limit=5, streaming=True) == open_task(name).load(limit=5)
