"""Softmax attention on a CPU in C: causal, it computes no more than the half that is seen."""

from torch import Tensor

from approx_kernels.key_lists.cpu import FAR, MOST_ROWS, attend_lists, cut, obstacle

__all__ = ["compiled_attention", "obstacle"]


def compiled_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention among tokens that are all real, under a running softmax; see `attend_lists`.

    Args:
        q: Queries, [B, H, L, D], float32 or bfloat16.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        causal: Whether query i, which stands at position S - L + i, sees only keys up to there.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    length, keys = q.shape[2], k.shape[2]
    starts = cut(0, length, MOST_ROWS)
    entries = [[(0, keys, -FAR, 0 if causal else FAR)]] * len(starts)
    return attend_lists(q, k, v, None, before=keys - length, starts=[*starts, length], entries=entries, scale=scale)
