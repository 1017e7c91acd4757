"""Which implementation runs: the best that can, or exactly the one asked for."""

import ast
import logging
from pathlib import Path

import pytest
import torch
import torch.utils.flop_counter

import approx_kernels
from approx_kernels.dispatch.implementation import (
    choose,
    chosen,
    chosen_in,
    forget,
    implementation,
    took,
    without_warnings,
)

WAYS = {"triton": "the tensor is on the cpu.", "cpu": None, "reference": None}


def test_auto_takes_the_first_that_can_run_and_says_which():
    assert choose("sample", "auto", WAYS) == "cpu"
    assert chosen()["sample"] == "cpu"
    assert choose("sample", "reference", WAYS) == "reference"
    assert chosen()["sample"] == "reference"


def test_records_the_implementation_that_ran_and_can_forget_it():
    choose("sample", "auto", WAYS)
    took("sample", "compiled C")
    assert chosen()["sample"] == "compiled C"
    forget()
    assert chosen() == {}


def test_separates_records_of_one_call_from_earlier_ones():
    forget()
    choose("before", "auto", WAYS)
    choose("both", "auto", WAYS)
    assert chosen_in(lambda: choose("both", "reference", WAYS)) == {"both": "reference"}
    assert chosen() == {"before": "cpu", "both": "reference"}
    with pytest.raises(ValueError, match="cannot run"):
        chosen_in(lambda: choose("both", "triton", WAYS))
    assert chosen() == {"before": "cpu", "both": "reference"}


def test_an_op_may_have_implementations_of_its_own():
    assert choose("sample", "tiles", {"cpu": "too old", "tiles": None}) == "tiles"
    with pytest.raises(ValueError, match="expected one of auto, plain, reference, cpu, triton, tiles"):
        choose("sample", "cuda", {"cpu": "too old", "tiles": None})


def test_an_explicit_choice_never_falls_back():
    with pytest.raises(ValueError, match="'triton' of sample cannot run: the tensor is on the cpu"):
        choose("sample", "triton", WAYS)
    with pytest.raises(ValueError, match="no implementation 'cpu'; it has reference"):
        choose("sample", "cpu", {"reference": None})
    with pytest.raises(ValueError, match="expected one of auto, plain, reference, cpu, triton"):
        choose("sample", "cuda", WAYS)
    with pytest.raises(ValueError, match="No implementation of sample can run: too old"):
        choose("sample", "auto", {"triton": "too old"})


def test_warns_once_why_plain_pytorch_runs(caplog):
    # The default logging of Python.
    caplog.set_level(logging.WARNING)
    with without_warnings():
        choose("plain", "auto", {"cpu": "it has no dropout. Ask for 'auto'.", "reference": None})
    for _ in range(2):
        choose("plain", "auto", {"cpu": "it has no dropout. Ask for 'auto'.", "reference": None})
        # No message for an explicit choice, or for the fastest implementation.
        choose("plain", "reference", {"cpu": "it has no dropout.", "reference": None})
        choose("plain", "auto", {"cpu": None, "reference": None})
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        choose("counted", "auto", {"cpu": "a counter follows.", "reference": None})
    choose("tiled", "auto", {"cpu": "too old. Convert it, or ask for 'auto'.", "tiles": None, "reference": None})
    message = "{} runs in plain PyTorch, which is slower, because 'cpu' cannot run: {}."
    assert caplog.messages == [
        message.format("plain", "it has no dropout"),
        message.format("tiled", "too old. Convert it"),
    ]


def test_a_preference_holds_inside_its_block_unless_a_call_chooses_explicitly():
    with implementation("reference"):
        assert choose("sample", "auto", WAYS) == "reference"
        assert choose("sample", "cpu", WAYS) == "cpu"
        with implementation("auto"):
            assert choose("sample", "auto", WAYS) == "cpu"
    assert choose("sample", "auto", WAYS) == "cpu"
    with pytest.raises(ValueError, match="expected one of"), implementation("fast"):
        pass


def named(source):
    """From public functions to the names under which they choose."""
    return {
        function.name: node.args[0].value
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "choose"
        if isinstance(node.args[0], ast.Constant)
    }


def test_an_op_is_called_as_its_function():
    assert named('def attend(q):\n    choose("attention", "auto", {})') == {"attend": "attention"}
    ops: dict[str, object] = {}
    for path in Path(approx_kernels.__path__[0]).glob("ops/*/api.py"):
        ops |= named(path.read_text("utf-8"))
    assert len(ops) > 10
    assert {function: op for function, op in ops.items() if function != op} == {}
