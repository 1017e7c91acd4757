"""Which implementation runs: the best that can, or exactly the one asked for."""

import pytest

from approx_kernels.implementation import choose, chosen, implementation

WAYS = {"triton": "the tensor is on the cpu.", "cpu": None, "reference": None}


def test_auto_takes_the_first_that_can_run_and_says_which():
    assert choose("sample", "auto", WAYS) == "cpu"
    assert chosen()["sample"] == "cpu"
    assert choose("sample", "reference", WAYS) == "reference"
    assert chosen()["sample"] == "reference"


def test_what_was_asked_for_never_falls_back():
    with pytest.raises(ValueError, match="'triton' of sample cannot run: the tensor is on the cpu"):
        choose("sample", "triton", WAYS)
    with pytest.raises(ValueError, match="no implementation 'cpu'; it has reference"):
        choose("sample", "cpu", {"reference": None})
    with pytest.raises(ValueError, match="expected one of auto, reference, cpu, triton"):
        choose("sample", "cuda", WAYS)
    with pytest.raises(ValueError, match="No implementation of sample can run: too old"):
        choose("sample", "auto", {"triton": "too old"})


def test_a_wish_holds_inside_its_block_and_not_against_an_explicit_choice():
    with implementation("reference"):
        assert choose("sample", "auto", WAYS) == "reference"
        assert choose("sample", "cpu", WAYS) == "cpu"
        with implementation("auto"):
            assert choose("sample", "auto", WAYS) == "cpu"
    assert choose("sample", "auto", WAYS) == "cpu"
    with pytest.raises(ValueError, match="expected one of"), implementation("fast"):
        pass
