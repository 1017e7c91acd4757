"""Calibrate mechanisms on their inputs during one forward pass over a calibration batch."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError
from approx.mechanisms.mechanism import Mechanism
from approx.seam.observe import Call, observe


def mechanisms(model: Any) -> list[Mechanism]:
    """The mechanisms of a converted model in layer order, including those of groups of heads."""
    return [
        mechanism
        for path in model.config.approx["sites"]
        for mechanism in model.base_model.get_submodule(path).mechanism.modules()
        if isinstance(mechanism, Mechanism)
    ]


def calibrate(model: Any, inputs: dict[str, Tensor] | None, only: Collection[Mechanism] | None = None) -> None:
    """Fit each mechanism that takes calibration, just before it runs, so that it sees the outputs of fitted layers.

    Args:
        model: A converted model.
        inputs: A calibration batch; may be None if no mechanism needs one.
        only: Fit only these mechanisms.

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
            f"{names} must be fitted to inputs, but none were given. Pass a batch of the model's inputs as 'calibration', or "
            "choose settings that do not need one."
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
            f"The calibration batch did not reach {len(waiting)} layers. Pass inputs that use the whole model."
        )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore the mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def all_open(model: Any) -> AbstractContextManager[None]:
    """Ignore `exact_below` inside the context, to fit or check mechanisms on shorter inputs than they will run on."""
    return exact_below(model, 0)


@contextmanager
def exact_below(model: Any, tokens: int) -> Iterator[None]:
    """Set `exact_below` of every mechanism inside the context."""
    limits = {mechanism: mechanism.exact_below for mechanism in mechanisms(model)}
    for mechanism in limits:
        mechanism.exact_below = tokens
    try:
        yield
    finally:
        for mechanism, limit in limits.items():
            mechanism.exact_below = limit
