"""What commands print: no name in a model or a recipe controls the terminal."""

import json

from approx.cli.terminal import Terminal, table

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
