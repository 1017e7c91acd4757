"""The command: what it shows, what it asks, and that the token is nowhere."""

import json

import pytest
from typer.testing import CliRunner

from approx.cli import app
from hub_state import Fault

from .conftest import TOKEN


def call(*words, **more):
    return CliRunner().invoke(app, ["push", *map(str, words)], **more)


@pytest.mark.sample(1)
def test_shows_files_and_card_and_uploads_after_a_yes(converted, hub):
    answer = call(converted, "ada/m", input="n\n")
    assert answer.exit_code == 8
    for words in (
        "model.safetensors",
        "license: mit",
        "## When not to use this",
        "a new private repository",
        "Upload? [y/N]",
    ):
        assert words in answer.stderr
    assert "Nothing was uploaded" in answer.stderr
    assert hub.uploads() == []
    answer = call(converted, "ada/m", input="y\n")
    assert answer.exit_code == 0
    assert "(private), commit " in answer.stdout
    assert "Downloaded again and compared: largest difference 0.0e+00" in answer.stdout
    answer = call(converted, "ada/m", "--yes", "--json")
    assert json.loads(answer.stdout)["identical"]
    assert "is identical already; nothing was uploaded" in call(converted, "ada/m").stdout


def test_without_an_answer_nothing_is_uploaded(converted, hub):
    answer = call(converted, "ada/m", input="")
    assert answer.exit_code == 2
    assert "there was no answer. Pass --yes" in answer.stderr
    assert hub.uploads() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(("-o", "x"), "--output has an effect only with --dry-run"), (("--offline",), "a push needs the hub")],
)
def test_refuses_options_without_effect(converted, words, said):
    answer = call(converted, "ada/m", *words)
    assert answer.exit_code == 2
    assert said in answer.stderr


def test_never_prints_a_token_that_the_hub_echoes(converted, hub, tmp_path):
    hub.faults = [Fault("/commit/", 400, message=f"Bearer {TOKEN} is not liked")]
    answer = call(converted, "ada/m", "--yes", "--message", f"with {TOKEN}")
    assert answer.exit_code == 2
    assert "The message holds a secret" in answer.stderr
    assert hub.calls == []
    answer = call(converted, "ada/m", "--yes")
    assert answer.exit_code == 5
    assert "is not liked" in answer.stderr
    assert TOKEN not in answer.output
    hub.faults = []
    answer = call(converted, "ada/m", "--yes")
    assert answer.exit_code == 0
    assert TOKEN not in answer.output
    for files in hub.repos["ada/m"].commits.values():
        assert not any(TOKEN.encode() in content for content in files.values())
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
