"""One forward pass over a calibration batch, in which mechanisms are fitted to what reaches them and their damage is seen."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError
from approx.mechanisms.mechanism import Mechanism
from approx.seam.observe import Call, observe


def mechanisms(model: Any) -> list[Mechanism]:
    """The mechanisms of a converted model in the order of its layers, those of groups of heads each by itself."""
    return [
        mechanism
        for path in model.config.approx["sites"]
        for mechanism in model.base_model.get_submodule(path).mechanism.modules()
        if isinstance(mechanism, Mechanism)
    ]


def calibrate(model: Any, inputs: dict[str, Tensor] | None, only: Collection[Mechanism] | None = None) -> None:
    """Fit each mechanism that takes a batch, just before it runs, so that it sees what the fitted layers below it give.

    Args:
        model: A converted model.
        inputs: A calibration batch; None will do if no mechanism needs one.
        only: Leave all but these as they are.

    Raises:
        ApproxError: if a mechanism needs a batch and there is none, or the batch does not reach it.
    """
    chosen = mechanisms(model) if only is None else only
    waiting = {mechanism for mechanism in chosen if mechanism.takes_calibration}
    if not waiting:
        return
    if inputs is None:
        names = ", ".join(sorted({type(each).__name__ for each in waiting if each.needs_calibration}))
        if not names:
            return
        raise ApproxError(
            f"{names} must be fitted to inputs, and none were given. Pass a batch of the model's inputs as 'calibration', or "
            "choose settings that need none."
        )

    def fit(call: Call) -> None:
        for part in call.members():
            if part.mechanism in waiting:
                waiting.remove(part.mechanism)
                part.mechanism.calibrate(part.q, part.k, part.v, part.mask)

    with observe(model, before=fit), all_open(model), torch.no_grad(), evaluating(model):
        model(**inputs)
    if waiting:
        raise ApproxError(
            f"The calibration batch did not reach {len(waiting)} layers. Pass inputs that use all of the model."
        )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, and afterwards in the one it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def all_open(model: Any) -> Iterator[None]:
    """No layer exact because an input is short: what is fitted, or checked, serves the longer inputs to come."""
    limits = {mechanism: mechanism.exact_below for mechanism in mechanisms(model)}
    for mechanism in limits:
        mechanism.exact_below = 0
    try:
        yield
    finally:
        for mechanism, limit in limits.items():
            mechanism.exact_below = limit
