"""Receipts and histories round-trip, and damaged ones are rejected."""

import json

import pytest

from approx.checkpoints.history import RECEIPT, Base, Check, Conversion, Receipt, Swapped, history, read_receipt
from approx.errors import ApproxError, Exit

CHECKS = [Check("padding", True, "0.0", [8]), Check("causality", None, "no layer is causal")]
WHOLE = Receipt(
    swapped=[Swapped(path="layer.0", layer=0, mechanism="local", settings={"left": 2})],
    left=[1],
    cross_attention=0,
    added=["layer.0.mechanism.x"],
    positions=(32, 64),
    errors={0: 0.25},
    checks=CHECKS,
)


def test_a_receipt_comes_back_as_it_was(tmp_path):
    assert read_receipt(tmp_path) is None
    (tmp_path / RECEIPT).write_text(json.dumps(WHOLE.model_dump()))
    assert read_receipt(tmp_path) == WHOLE


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "is damaged"),
        ("{}", "is damaged: swapped"),
        (json.dumps({**WHOLE.model_dump(), "errors": {"0": "high"}}), r"is damaged: errors\.0: "),
    ],
)
def test_a_damaged_receipt_is_refused(tmp_path, text, place):
    (tmp_path / RECEIPT).write_text(text)
    with pytest.raises(ApproxError, match=place) as caught:
        read_receipt(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.parametrize(
    ("checks", "verified"), [([], False), (CHECKS, True), ([*CHECKS, Check("weights", False, "")], False)]
)
def test_is_verified_if_checked_and_nothing_failed(checks, verified):
    assert WHOLE.model_copy(update={"checks": checks}).verified is verified


def test_a_history_is_a_list_of_steps():
    step = Conversion(
        action="convert",
        approx="0.1.0",
        base=Base(name="base", revision=None, weights_sha256="ab"),
        plan=[{"layers": "all", "mechanism": "local"}],
        calibration_length=256,
    )
    assert history({"history": [json.loads(json.dumps(step.model_dump()))]}) == [step]
    assert history({}) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"recipe": [{"action": "convert"}]}, "an earlier version"),
        ({"history": [{"action": "convert"}]}, r"is damaged: 0\.approx: "),
        ({"history": 3}, "is damaged"),
    ],
)
def test_rejects_corrupt_history(record, message):
    with pytest.raises(ApproxError, match=message) as caught:
        history(record)
    assert caught.value.exit_code == Exit.UNAVAILABLE
