"""Mechanisms and tasks are explained from their own docstrings and checks, and shells complete their names."""

import re

import pytest
from typer.testing import CliRunner

from approx.checkpoints.families import FAMILIES
from approx.cli import app, names
from approx.mechanisms import MECHANISMS
from approx.tasks import TASKS

from .conftest import call


def test_mechanisms_are_all_listed_with_their_papers():
    answer = call("mechanisms")
    assert answer.code == 0
    assert all(name in answer.out for name in MECHANISMS)
    assert "arXiv 2007.04825" in answer.out
    rows = {row["name"]: row for row in call("mechanisms", "--family", "gpt2", "--json").json["mechanisms"]}
    assert rows["linear"]["fits"]
    keys = ["bidirectional", "causal", "decode", "padding", "gradient", "trainable", "exact_when", "source"]
    assert all(row.keys() >= set(keys) for row in rows.values())
    assert rows["clustered"]["gradient"] == "through weights, not choices"
    assert rows["full"]["gradient"] == "exact"
    assert "through weights, not choices" in answer.out
    assert not rows["ltr"]["fits"]


def test_the_table_says_why_a_compiler_cannot_follow_a_mechanism():
    lines = " ".join(call("mechanisms").out.split())
    for name, kind in MECHANISMS.items():
        if kind.compiles != "whole":
            sentence = re.search(
                rf"Compiled as one operator: [^.:]*\b{name}\b[^.:]*\. {re.escape(kind.compiles)}", lines
            )
            assert sentence, f"nothing is said of {name}"


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_setting_of_a_mechanism_has_meaning_range_and_default(name):
    about = call("mechanisms", name, "--json").json
    assert about["description"]
    assert about["settings"].keys() == MECHANISMS[name].defaults().keys()
    for setting, one in about["settings"].items():
        assert one["meaning"].endswith("."), f"{setting} of {name} is not explained"
        assert one["allowed"], f"what {setting} of {name} may be is not said"
        assert one["default"] == MECHANISMS[name].defaults()[setting]


def test_a_mechanism_is_explained():
    answer = call("mechanisms", "sinks")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert "sinks 4 a whole number of at least 0 First tokens that every query sees, s, 0 or more." in lines
    assert "Exact when: sinks + window >= the length of the sequence." in lines or "Exact when:" in answer.out
    # An inherited docstring explains inherited settings.
    assert "Columns of a summary" in call("mechanisms", "rtl").out


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_of_a_task_is_explained(name):
    about = call("tasks", name, "--json").json
    assert about["description"]
    assert about["explained"].keys() == set(about["metrics"])
    assert all(metric["meaning"] and metric["unit"] for metric in about["explained"].values())
    assert all(one["meaning"].endswith(".") for one in about["settings"].values()), about["settings"]


def test_a_task_is_explained():
    listed = call("tasks", "--json").json["tasks"]
    assert [task["name"] for task in listed] == list(TASKS)
    assert all(name in call("tasks").out for name in ("glue/wnli", "librispeech/dev-other", "needle"))
    about = call("tasks", "librispeech/dev-clean", "--json").json
    # The constructor of its base class takes and checks these.
    assert about["settings"]["beams"] == {
        "default": 1,
        "allowed": "a whole number at least 1",
        "meaning": "Number of beams; 1 is greedy.",
    }
    assert about["explained"]["wer"]["better"] == "lower"
    assert "*.trans.txt" not in about["split"]
    assert "LibriSpeech" in about["data"]
    assert call("tasks", "needle", "--json").json["data"] == "none: its examples are generated"
    assert "such as cp1252" in call("tasks", "glue/sst2").out.replace("\n", " ")


def test_names_read_from_source_equal_the_registries():
    assert names.mechanisms() == tuple(MECHANISMS)
    assert names.families() == FAMILIES
    with pytest.raises(ImportError, match="defines no NAMES"):
        names.written("approx.mechanisms", "NAMES")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("approx plan x -m loc", ["local"]),
        ("approx mechanisms improved", ["improved-clustered"]),
        ("approx evaluate x --task squad", ["squad", "squad_v2"]),
        ("approx tasks need", ["needle"]),
        ("approx mechanisms --family whi", ["whisper"]),
        ("approx run quick", ["quickstart"]),
        ("approx sweep needle", ["needle-grid"]),
    ],
)
def test_a_shell_completes_names(line, offered):
    environment = {"_APPROX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    assert CliRunner().invoke(app, [], env=environment).stdout.split() == offered
