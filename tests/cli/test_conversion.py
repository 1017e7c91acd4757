import json
import shlex

import pytest
from safetensors.torch import load_file

from zoo import tiny

from .conftest import call


def test_inspect_distinguishes_stock_and_converted(base, converted):
    assert "(bert, stock)" in call("inspect", base).out
    answer = call("inspect", converted)
    assert "(bert, converted)" in answer.out
    assert "Made by: convert from the base: local on layers 0 left=2, right=2" in answer.out
    layers = call("inspect", converted, "--json").json["layers"]
    assert [layer["mechanism"] for layer in layers] == ["local", None]
    # A summary, and with -v every layer with its module.
    assert "encoder.layer.1.attention.self" not in answer.out
    assert "encoder.layer.1.attention.self" in call("inspect", converted, "-v").out


def test_layers_with_windows_of_their_own_are_shown_and_stay(tmp_path):
    tiny("ModernBertForMaskedLM").save_pretrained(tmp_path / "base")
    stays = "Layer 1 stays as it is: a sliding window of 4 tokens on either side."
    answer = call("inspect", "base")
    assert stays in answer.out
    assert [line.split()[-1] for line in answer.out.splitlines() if "bidirectional" in line][1] == "±4"
    assert [layer["window"] for layer in call("inspect", "base", "--json").json["layers"]] == [None, 4, None]
    assert stays in call("plan", "base", "-m", "local").out
    refused = call("convert", "base", "-o", "other", "-m", "local", "--layers", "0,1")
    assert (refused.code, (tmp_path / "other").exists()) == (3, False)
    assert "layer 1 of ModernBertForMaskedLM cannot be converted: it has a sliding window" in refused.err


def test_a_plan_is_shown_written_and_read_again(base, tmp_path):
    plan = ("plan", base, "--lengths", "16,64")
    answer = call(
        *plan, "-m", "improved-clustered", "--set", "clusters=4", "--set", "hash-bias=false", "-o", "a b/p.yaml"
    )
    assert answer.code == 0, answer.err
    assert "clusters=4," in answer.out
    assert "hash_bias=False" in answer.out
    assert "takes 32 positions: for 64 tokens convert with --max-length 64" in answer.out
    again = call(*plan, "--plan", tmp_path / "a b" / "p.yaml", "--json").json
    assert again["layers"][0]["settings"]["clusters"] == 4
    assert again["layers"][0]["settings"]["hash_bias"] is False
    assert [cost["length"] for cost in again["costs"]] == [16, 64]
    assert call(*plan, "-m", "linear", "-o", "p.json").code == 0
    assert json.loads((tmp_path / "p.json").read_text("utf-8"))["rules"][0]["mechanism"] == "linear"
    assert call(*plan, "-m", "linear", "-o", "p.json").code == 8
    assert call(*plan, "-m", "linear", "-o", "p.json", "--force").code == 0


def test_equal_layers_share_a_line(base):
    lines = call("plan", base, "-m", "linear").out.splitlines()
    assert any(line.split()[:2] == ["0-1", "linear"] for line in lines)


def test_prints_no_trailing_spaces(base):
    for line in call("plan", base, "-m", "linear").out.splitlines():
        assert line == line.rstrip()


def test_convert_lists_its_checks_and_revert_restores_the_base(base, converted, tmp_path):
    answer = call("revert", converted, "-o", "the base again", "--json")
    assert (answer.code, answer.json) == (0, {"output": "the base again"})
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "the base again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_convert_prints_its_receipt_as_json(base, tmp_path):
    answer = call("convert", base, "-o", "out", "-m", "linear", "--json", "--max-length", "64")
    assert answer.code == 0, answer.err
    assert answer.json["output"] == "out"
    assert all(check["passed"] is not False for check in answer.json["checks"])
    assert "convert: loading the weights" in answer.err
    assert call("inspect", "out", "--json").json["positions"] == 64
    # Existing output is kept without --force, and the error comes before any work.
    again = call("convert", base, "-o", "out", "-m", "linear", "--quiet")
    assert (again.code, again.out) == (8, "")
    assert again.err == "error: out exists already. Choose another output folder, or replace it with --force.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_each_step_names_the_next(base, converted, tmp_path):
    assert f"Next: approx plan {shlex.quote(str(base))} -m NAME" in call("inspect", base).err
    evaluated = f"Next: approx evaluate {shlex.quote(str(converted))} --task NAME"
    assert evaluated in call("inspect", converted).err
    plan = ("plan", base, "--lengths", "16")
    answer = call(*plan, "-m", "local", "--set", "left=3", "--layers", "0", "--recompute")
    words = shlex.split(answer.err.partition("Next: approx ")[2])
    assert words == [
        "convert",
        str(base),
        "-m",
        "local",
        "--layers",
        "0",
        "--set",
        "left=3",
        "--recompute",
        "-o",
        "converted",
    ]
    # What is named works.
    answer = call(*words)
    assert (answer.code, "Next: approx evaluate converted --task NAME" in answer.err) == (0, True), answer
    answer = call(*plan, "-m", "local", "-o", "plan.yaml")
    assert answer.err.endswith("--plan plan.yaml -o converted\n")
    assert "Next" not in call(*plan, "-m", "local", "--quiet").err


@pytest.mark.parametrize(
    "command",
    ["mechanisms", "tasks", "inspect", "plan", "convert", "revert", "evaluate", "bench", "report", "run", "doctor"],
)
def test_help_shows_examples_and_defaults(command):
    answer = call(command, "--help")
    assert answer.code == 0
    assert f"Usage: approx {command}" in answer.out
    assert f"approx {command}" in answer.out.partition("Examples:")[2]
    assert "--json" in answer.out
    assert "Exit codes: 0 done; 1 internal error; 2 wrong usage, plan or recipe; " in " ".join(answer.out.split())
    if command == "evaluate":
        for group in ("Task", "Checkpoint", "Machine", "Every command"):
            assert f"─ {group} ─" in answer.out
        assert "[default: 32]" in answer.out


def test_other_layers_have_a_separate_line(tmp_path):
    tiny("WhisperForConditionalGeneration").save_pretrained(tmp_path / "whisper")
    tiny("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    rows = [line.split() for line in call("inspect", "whisper").out.splitlines()]
    assert ["0-1", "exact", "4", "8", "bidirectional", "always", "24"] in rows
    assert ["2-3", "exact", "4", "8", "causal"] in rows
    assert "positions: always 37" in call("inspect", "vit").out
