"""Linear attention of one token that follows others, on a CPU: all of it in one call of C."""

import ctypes

import torch
from torch import Tensor

from approx_kernels.c_language import check, library
from approx_kernels.c_structs import LinearStep, address, rows_of
from approx_kernels.linear.features import FEATURE_MAPS
from approx_kernels.linear.step_c import STEP


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
    """One query, q [B, H, 1, D], and what the sums of earlier keys, [B, G, F, E + 1] in float32, do not have yet.

    That is its own key, or with a window all keys in it, at most `window`. The key that no later query needs is added to
    the sums, in place. With learned maps each query head has sums of its own, [B, H, F, E + 1].
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    # As models want it next: tokens before heads.
    out = q.new_empty(q.shape[0], 1, q.shape[1], v.shape[3]).transpose(1, 2)
    mask = None if key_mask is None else key_mask.contiguous()
    parts = [None if x is None else x.detach().float().contiguous() for x in (*(maps or (None, None)), mix)]
    sizes = *q.shape[:2], q.shape[1] // sums.shape[1], k.shape[2], q.shape[3], sums.shape[2], v.shape[3]
    how = FEATURE_MAPS.index(feature_map), k.shape[2] == max(window, 1), q.dtype == torch.bfloat16
    batch, heads, _, size = q.shape
    features = 2 * size if feature_map == "hedgehog" else size
    if heads % sums.shape[1]:
        raise ValueError(f"sums are of {sums.shape[1]} heads; expected as many as q has, {heads}, or a divisor.")
    learned = heads, size + (feature_map == "t2r"), size
    places = (
        address(mask, torch.bool, batch, k.shape[2]),
        *(address(each, torch.float32, *learned) for each in parts[:2]),
        address(parts[2], torch.float32, heads),
        address(sums, torch.float32, batch, sums.shape[1], features, v.shape[3] + 1),
    )
    rows = rows_of(q, k, v, out)
    problem = LinearStep(*sizes, *how, torch.get_num_threads(), *rows, *places, scale, input_scale, eps)
    found = library(STEP)
    assert not isinstance(found, str), f"checked by the op: {found}"
    check(found.attend_newest(ctypes.byref(problem)))
    return out
