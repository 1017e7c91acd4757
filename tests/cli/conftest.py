"""A converted checkpoint and a way to call the command line inside this process."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from approx.cli import app
from tiny_study import tiny_checkpoint, tiny_data


@dataclass
class Answer:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*words: str | Path) -> Answer:
    """Run a command and return its exit code and both outputs."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return Answer(result.exit_code, result.stdout, result.stderr)


def check_parses(line: str) -> None:
    """Raise unless every command of a line, joined by `&&`, has the options that the command line takes."""
    commands: list[list[str]] = [[]]
    for word in shlex.split(line):
        commands.append([]) if word == "&&" else commands[-1].append(word)
    for program, name, *words in commands:
        assert program == "approx"
        group: Any = get_command(app)
        found = group.get_command(None, name)
        assert found is not None, f"there is no command {name}"
        found.make_context(name, words)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("with spaces") / "the base")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def converted(base, tmp_path_factory) -> Path:
    """The base with local attention in its first layer, converted by the command."""
    folder = tmp_path_factory.mktemp("out put") / "con verted"
    answer = call("convert", base, "-o", folder, "-m", "local", "--set", "left=2", "--set", "right=2", "--layers", "0")
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run commands in an empty folder."""
    monkeypatch.chdir(tmp_path)
