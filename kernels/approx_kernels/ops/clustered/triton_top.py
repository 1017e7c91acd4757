"""The keys of the largest scores at the mean query of each cluster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from approx_kernels.gpu.language import jit, tl
from approx_kernels.gpu.launch import cut, launch, power
from approx_kernels.runtime.custom_op import custom_op

# In a wider tile half of the registers hold addresses, which spill under Triton 3.6.
SCORES = (cut(8, 1, BM=64, BN=64),)
FLOAT32 = (cut(8, 1, BM=32, BN=32),)
MIXED = (cut(4, 1, BM=16, BN=64),)


@jit(do_not_specialize=("H", "S", "most"))
def score_kernel(
    Means,
    K,
    KeyMask,
    Scores,
    k_b,
    k_h,
    k_n,
    H,
    S,
    most,
    scale,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Scores of BN keys at BM mean queries; -inf at keys that are not real."""
    columns, rows = tl.cdiv(S, BN), tl.cdiv(most, BM)
    item = tl.cast(tl.program_id(0) // columns // rows, tl.int64)
    c = tl.program_id(0) // columns % rows * BM + tl.arange(0, BM)
    key, size = tl.program_id(0) % columns * BN + tl.arange(0, BN), tl.arange(0, WIDE_D)
    at = Means + (item * most + c)[:, None] * D + size[None, :]
    means = tl.load(at, mask=(c < most)[:, None] & (size < D)[None, :], other=0.0)
    at = K + item // H * k_b + item % H * k_h + key.to(tl.int64)[:, None] * k_n + size[None, :]
    k = tl.load(at, mask=(key < S)[:, None] & (size < D)[None, :], other=0.0)
    s = tl.dot(means, tl.trans(k.to(means.dtype)), input_precision=PRECISION) * scale
    if KeyMask is not None:
        real = tl.load(KeyMask + item // H * S + key, mask=key < S, other=0)
        s = tl.where((real != 0)[None, :], s, float("-inf"))
    inside = (c < most)[:, None] & (key < S)[None, :]
    tl.store(Scores + (item * most + c)[:, None] * S + key[None, :], s.to(Scores.dtype.element_ty), mask=inside)


def _no_keys(means: Tensor, k: Tensor, key_mask: Tensor | None, kept: int, scale: float) -> Tensor:
    return means.new_empty(*means.shape[:3], kept, dtype=torch.int32)


def _flops_top(means: Any, k: Any, *others: Any, out_shape: Any = None) -> int:
    return 2 * means[0] * means[1] * means[2] * means[3] * k[2]


@custom_op(_no_keys, flops=_flops_top)
def largest_keys(means: Tensor, k: Tensor, key_mask: Tensor | None, kept: int, scale: float) -> Tensor:
    """The keys with the largest scores at each mean query; scores that are equal in 16 bits are ties.

    Args:
        means: [B, H, C, D], contiguous.
        k: Keys, [B, H, S, D], the last dimension contiguous.
        key_mask: [B, S] uint8, 1 at real keys; None when all are real.
        kept: How many, K, at most S.
        scale: Factor of the scores.

    Returns:
        [B, H, C, K] int32, in no order; -1 where a sample has fewer real keys.
    """
    scores = scores_of(means, k, key_mask, scale)
    found, top = scores.topk(kept, sorted=False)
    return torch.where(found > float("-inf"), top, -1).int()


def scores_of(means: Tensor, k: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """Scores of all keys at each mean query, [B, H, C, S], as for `largest_keys`; means may be wider than keys."""
    batch, heads, most, size = means.shape
    scores = means.new_empty(batch, heads, most, k.shape[2])
    if k.dtype == means.dtype:
        precise, cuts = ("ieee", FLOAT32) if k.dtype == torch.float32 else ("tf32", SCORES)
    else:
        # Products in three parts on tensor cores are as exact as float32; keys of 16 bits need only the first part.
        precise, cuts = "tf32x3", MIXED
    launch(
        score_kernel,
        lambda tiles: (-(-k.shape[2] // tiles["BN"]) * -(-most // tiles["BM"]) * batch * heads,),
        cuts,
        means,
        k,
        key_mask,
        scores,
        *k.stride()[:3],
        H=heads,
        S=k.shape[2],
        most=most,
        scale=scale,
        D=size,
        WIDE_D=power(size),
        PRECISION=precise,
    )
    return scores
