"""What each converted layer loses by itself, seen on a calibration batch: its output's error, and the attention it kept."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx.conversion.calibration import evaluating
from approx.mechanisms import MECHANISMS
from approx.mechanisms.head_groups import HeadGroups
from approx.mechanisms.mechanism import Mechanism
from approx.planning import positions
from approx_kernels.tokens.grouped import heads_of


class Damage(NamedTuple):
    """What one layer loses.

    Attributes:
        error: ‖o − o_exact‖ / ‖o_exact‖ of the layer's attention output over the real tokens of the batch, o_exact being
            that of exact attention on the same q, k and v.
        captured_mass: Exact attention weight on the keys that the layer still sees, from 0 to 1, as the mean over the real
            queries and the heads that leave keys out; None where no head does. A query of mass m whose weights on these
            keys are the exact ones but for a factor has an error of at most 2 (1 − m) max ‖v‖.
        tokens: How many the layer attended over.
    """

    error: float
    captured_mass: float | None
    tokens: int


def layer_damage(model: Any, inputs: dict[str, Tensor]) -> dict[int, Damage]:
    """Compare each layer of a converted model with exact attention.

    Args:
        model: A converted model.
        inputs: A calibration batch. Where it is shorter than `exact_below`, attention is exact and nothing is lost.

    Returns:
        Layer -> its damage.
    """
    found, handles = {}, {}

    def watch(layer: int, module: Any) -> None:
        mechanism = module.mechanism
        parts = mechanism.members() if isinstance(mechanism, HeadGroups) else [(slice(None), mechanism)]
        sparse = [(heads, part) for heads, part in parts if part.sparse]
        found[layer] = Damage(0.0, 1.0 if sparse else None, 0)

        def count(module: Any, args: tuple[Any, ...], out: Any) -> None:
            # A mechanism is not asked where the input is shorter than `exact_below`, its module always is.
            tokens = (out[0] if isinstance(out, tuple) else out).shape[1]
            found[layer] = found[layer]._replace(tokens=tokens)

        def hook(module: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            # Most mechanisms find their weights by running once more, which is not to be watched.
            handles[layer][0].remove()
            q, k, v, key_mask = args
            error = _error(out, _exact(module, module.heads)(q, k, v, key_mask), key_mask)
            mass = [
                _captured(part, q[:, heads], k[:, heads_of(q, k, heads)], key_mask, kwargs.get("tokens"))
                for heads, part in sparse
            ]
            found[layer] = found[layer]._replace(
                error=error, captured_mass=float(torch.cat(mass).mean()) if mass else None
            )

        handles[layer] = (
            mechanism.register_forward_hook(hook, with_kwargs=True),
            module.register_forward_hook(count),
        )

    for path, site in model.config.approx["sites"].items():
        watch(site["layer"], model.base_model.get_submodule(path))
    try:
        with evaluating(model), torch.inference_mode():
            model(**inputs)
    finally:
        for handle in chain.from_iterable(handles.values()):
            handle.remove()
    return found


def unseen(model: Any, measured_at: Mapping[int, int]) -> list[str]:
    """Say which layers are still exact at the length that their damage was measured at, a sentence for each length.

    Args:
        model: The converted model.
        measured_at: Layer -> tokens.
    """
    limit, found = positions.limit(model.config), {}
    for path, site in model.config.approx["sites"].items():
        mechanism = model.base_model.get_submodule(path).mechanism
        start, tokens = mechanism.differs_from(), measured_at[site["layer"]]
        if start is not None and tokens < (start := max(start, mechanism.exact_below)):
            found.setdefault((start, tokens), []).append(str(site["layer"]))
    return [
        f"With these settings layers {', '.join(layers)} are exact on fewer than {start:,} tokens, "
        + (
            f"and the model takes no more than {limit:,}: they never approximate."
            if limit is not None and limit < start
            else f"but damage was measured on {tokens:,}: it does not show. Longer inputs, with --calibrate, may show it."
        )
        for (start, tokens), layers in found.items()
    ]


def _error(out: Tensor, target: Tensor, key_mask: Tensor | None) -> float:
    if key_mask is not None and out.shape[-2] == key_mask.shape[-1]:
        keep = key_mask[:, None, :, None]
        out, target = out * keep, target * keep
    return float((out - target).float().norm() / target.float().norm().clamp_min(1e-20))


def _captured(mechanism: Mechanism, q: Tensor, k: Tensor, key_mask: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Exact weight on the keys that a mechanism sees, of each head: the mean over the real queries, [H]."""
    if k.shape[-2] < mechanism.exact_below:
        return torch.ones(mechanism.heads, device=q.device)
    q, k = q.float(), k.float()
    more = {"tokens": tokens} if tokens is not None and mechanism.reads_tokens else {}
    seen = mechanism.weights(q, k, key_mask, **more) > 0
    mass = (_exact(mechanism, mechanism.heads).weights(q, k, key_mask) * seen).sum(-1)
    if key_mask is None or q.shape[-2] != key_mask.shape[-1]:
        return mass.mean((0, 2))
    real = key_mask[:, None, :]
    return (mass * real).sum((0, 2)) / real.sum()


def _exact(mechanism: Mechanism, heads: int) -> Mechanism:
    return MECHANISMS["full"](heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale)
