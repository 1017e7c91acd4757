"""The options of commands are those that their stages declare."""

import re
import subprocess
import sys

import pytest

from approx.cli import finetuning, measurement, search
from approx.cli.docstrings import arguments
from conftest import ROOT

from .conftest import call

STAGES = {
    "finetune": finetuning._STAGE,
    "search": search._STAGE,
    "evaluate": measurement._EVALUATE,
    "bench": measurement._BENCH,
}
LOADED = """
import sys
sys.path[:0] = [{root!r}, {kernels!r}]
from typer.testing import CliRunner
from approx.cli import app
for words in {lines}:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    print(*sorted(sys.modules))
"""


def help_of(command: str, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    return call(command, "--help").out


@pytest.mark.parametrize("command", STAGES)
def test_help_shows_every_field_of_a_stage_with_its_meaning_in_its_panel(command, monkeypatch):
    stage, shown = STAGES[command], help_of(command, monkeypatch)
    panels = dict(re.findall(r"╭─ ([\w ]+?) ─+╮\n(.*?)╰─", shown, re.DOTALL))
    assert [name for name in panels if name in stage.panels] == list(stage.panels)
    placed = {name: panel for panel, names in stage.panels.items() for name in names.split()}
    meanings = arguments(stage.kind, "Attributes")
    assert placed.keys() <= stage.kind.model_fields.keys()
    for name in stage.kind.model_fields:
        if name not in stage.omitted:
            text = " ".join(re.sub("[│ \n]+", " ", panels[placed.get(name, "Options")]).split())
            assert re.search(rf"{stage.option(name)} ", text), name
            assert name == "settings" or meanings[name] in text, name


@pytest.mark.parametrize("command", STAGES)
def test_defaults_of_options_are_those_of_the_stage(command):
    """Reading what Typer fills in gives the stage that the required fields alone give."""
    stage = STAGES[command]
    required = {
        "finetune": {},
        "search": {"length": 8},
        "evaluate": {"task": "needle"},
        "bench": {"lengths": [128, 512]},
    }
    typed = {one.name: one.default for one in stage.parameters()}
    typed |= {name: str(value) for name, value in required[command].items() if name not in stage.defaults}
    assert stage.read(typed) == stage.kind(**required[command])
    assert typed == {}


def test_values_are_read_as_the_fields_types():
    typed = {one.name: one.default for one in finetuning._STAGE.parameters()} | {
        "recover": "lora, task",
        "text": ["a,b.txt", "c.txt"],
        "limit": "7",
        "epochs": "2",
        "distill": ["hidden=0"],
        "lora": ["targets=query, value"],
        "settings": ["length=8"],
        "labels": "1,0",
        "max_steps": "9",
        "joint": True,
    }
    made = finetuning._STAGE.read(typed)
    assert (made.recover, made.text, made.limit, made.epochs) == (["lora", "task"], ["a,b.txt", "c.txt"], 7, 2.0)
    assert (made.distill.hidden, made.distill.logits, made.lora.targets) == (0.0, 1.0, ["query", "value"])
    assert (made.settings, made.steps, made.joint) == ({"length": 8, "labels": "1,0"}, 9, True)


def test_an_earlier_name_is_accepted_but_not_shown(monkeypatch):
    assert "--max-steps" not in help_of("finetune", monkeypatch)
    assert "--steps" in help_of("finetune", monkeypatch)


def test_a_command_imports_no_room_of_another(tmp_path):
    lines = [
        ["convert", "--help"],
        ["evaluate", "--help"],
        ["evaluate", "quickstart", "--task", "needle", "--limit", "1"],
    ]
    code = LOADED.format(root=str(ROOT), kernels=str(ROOT / "kernels"), lines=lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    of_convert, of_help, of_evaluate = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"torch", "transformers", "approx.evaluation.options"} & of_convert
    assert "approx.evaluation.options" in of_help
    assert not {"torch", "transformers"} & of_help
    assert {"torch", "approx.measuring.measure"} <= of_evaluate
    others = ("searching", "pushing", "finetuning", "pipeline", "recipe", "patterns")
    assert sorted(name for name in of_evaluate if name.startswith(tuple(f"approx.{room}" for room in others))) == []
