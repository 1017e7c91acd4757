"""The error of each converted layer by itself on a calibration batch, and the attention mass it captures."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx.conversion.calibration import evaluating
from approx.conversion.widened import in_float32
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism
from approx.planning import positions
from approx.seam.observe import Call, observe


class Damage(NamedTuple):
    """The error of one layer.

    Attributes:
        error: ‖o − o_exact‖ / ‖o_exact‖ of the layer's attention output over the real tokens of the batch; o_exact is the
            output of exact attention on the same q, k and v.
        captured_mass: Exact attention weight on the keys that the layer still sees, from 0 to 1, averaged over the real
            queries and the heads that skip keys; None if no head does. A query with mass m whose weights on these keys are
            proportional to the exact ones has an error of at most 2 (1 − m) max ‖v‖.
        tokens: Number of tokens the layer attended over.
    """

    error: float
    captured_mass: float | None
    tokens: int


def layer_damage(model: Any, inputs: dict[str, Tensor]) -> dict[int, Damage]:
    """Compare each layer of a converted model with exact attention.

    Args:
        model: A converted model.
        inputs: A calibration batch. Layers whose `exact_below` exceeds its length are exact.

    Returns:
        Layer -> its error.
    """
    damage = {}
    for path, site in model.config.approx["sites"].items():
        sparse = model.base_model.get_submodule(path).mechanism.sparse
        damage[site["layer"]] = Damage(0.0, 1.0 if sparse else None, 0)

    def measure(call: Call) -> None:
        if call.mechanism is None:
            return
        lost = damage[call.layer]._replace(tokens=call.q.shape[2])
        if not call.exact:
            target = _exact(call.mechanism)(call.q, call.k, call.v, call.mask)
            mass = [
                _captured(part, part.mechanism) for part in call.members() if part.mechanism and part.mechanism.sparse
            ]
            lost = lost._replace(
                error=_error(call.output, target, call.mask),
                captured_mass=float(torch.cat(mass).mean()) if mass else None,
            )
        damage[call.layer] = lost

    with observe(model, measure), evaluating(model), in_float32(model), torch.inference_mode():
        model.base_model(**inputs)
    return damage


def unseen(model: Any, measured_at: Mapping[int, int]) -> list[str]:
    """Warnings about layers that are still exact at the length of the measurement, one sentence per length.

    Args:
        model: The converted model.
        measured_at: Layer -> tokens.
    """
    limit, exact = positions.limit(model.config), {}
    for path, site in model.config.approx["sites"].items():
        mechanism = model.base_model.get_submodule(path).mechanism
        start, tokens = mechanism.differs_from(), measured_at[site["layer"]]
        if start is not None and tokens < (start := max(start, mechanism.exact_below)):
            exact.setdefault((start, tokens), []).append(str(site["layer"]))
    return [
        f"With these settings layers {', '.join(layers)} are exact on fewer than {start:,} tokens, "
        + (
            f"and the model takes no more than {limit:,}: they never approximate."
            if limit is not None and limit < start
            else f"but errors were measured on {tokens:,}, so they are 0. Pass longer inputs with --calibrate to measure them."
        )
        for (start, tokens), layers in exact.items()
    ]


def _error(out: Tensor, target: Tensor, key_mask: Tensor | None) -> float:
    if key_mask is not None and out.shape[-2] == key_mask.shape[-1]:
        keep = key_mask[:, None, :, None]
        out, target = out * keep, target * keep
    return float((out - target).float().norm() / target.float().norm().clamp_min(1e-20))


def _captured(call: Call, mechanism: Mechanism) -> Tensor:
    """Exact attention weight on the keys that each head of a mechanism sees, averaged over the real queries, [H]."""
    if call.exact:
        return torch.ones(mechanism.heads, device=call.q.device)
    q, k, key_mask = call.q.float(), call.k.float(), call.mask
    more = {} if call.tokens is None else {"tokens": call.tokens}
    seen = mechanism.weights(q, k, key_mask, **more) > 0
    mass = (_exact(mechanism).weights(q, k, key_mask) * seen).sum(-1)
    if key_mask is None or q.shape[-2] != key_mask.shape[-1]:
        return mass.mean((0, 2))
    real = key_mask[:, None, :]
    return (mass * real).sum((0, 2)) / real.sum()


def _exact(mechanism: Mechanism) -> Mechanism:
    return MECHANISMS["full"](mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale)
