"""Linear attention of one token that follows others, on a CPU, in a single call of C."""

from typing import Any

import torch
from torch import Tensor

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.structs import LinearStep, address, rows_of
from approx_kernels.ops.linear.reference import FEATURE_MAPS
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.tokens import empty_rows


def attend_newest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    *,
    feature_map: str,
    maps: tuple[Tensor, Tensor] | None,
    window: int,
    mix: Tensor | None,
    scale: float,
    input_scale: float,
    eps: float,
) -> Tensor:
    """Attend from one query, q [B, H, 1, D], to the sums of earlier keys, [B, G, F, E + 1] in float32, and newer keys.

    These are its own key, or with a window all keys in it, at most `window`. The key that no later query needs is added
    to the sums, in place. With learned maps each query head has its own sums, [B, H, F, E + 1].
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    mask = None if key_mask is None else key_mask.contiguous()
    learned = [None if x is None else x.detach().float().contiguous() for x in (*(maps or (None, None)), mix)]
    return _step(q, k, v, mask, sums, *learned, feature_map, window, scale, input_scale, eps)


def _no_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return empty_rows(q, v.shape[3])


@custom_op(_no_output, mutates=("sums",))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sums: Tensor,
    query_map: Tensor | None,
    key_map: Tensor | None,
    mix: Tensor | None,
    feature_map: str,
    window: int,
    scale: float,
    input_scale: float,
    eps: float,
) -> Tensor:
    out = _no_output(q, k, v)
    batch, heads, _, size = q.shape
    features = 2 * size if feature_map == "hedgehog" else size
    if heads % sums.shape[1]:
        raise ValueError(f"sums are of {sums.shape[1]} heads; expected as many as q has, {heads}, or a divisor.")
    places = (
        address(mask, torch.bool, batch, k.shape[2]),
        *(address(each, torch.float32, heads, size + (feature_map == "t2r"), size) for each in (query_map, key_map)),
        address(mix, torch.float32, heads),
        address(sums, torch.float32, batch, sums.shape[1], features, v.shape[3] + 1),
    )
    sizes = batch, heads, heads // sums.shape[1], k.shape[2], size, features, v.shape[3]
    how = FEATURE_MAPS.index(feature_map), k.shape[2] == max(window, 1), q.dtype == torch.bfloat16
    rows = rows_of(q, k, v, out)
    problem = LinearStep(*sizes, *how, torch.get_num_threads(), *rows, *places, scale, input_scale, eps)
    call("linear/step.c", "attend_newest", problem)
    return out
