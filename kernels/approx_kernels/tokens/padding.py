"""Blank padding before products: it may hold NaN or infinity, and 0 times these is NaN."""

import torch
from torch import Tensor


def blank_padding(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Set the keys and values of padding to 0 and, if L == S, the queries at the same positions.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.

    Returns:
        q, k and v; their padding gets a gradient of 0.
    """
    if key_mask is None:
        return q, k, v
    blank = ~key_mask[:, None, :, None]
    q = q.masked_fill(blank, 0.0) if q.shape[2] == k.shape[2] else q
    return q, k.masked_fill(blank, 0.0), v.masked_fill(blank, 0.0)


def blank_for_gradients(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`blank_padding` if gradients are needed: C skips padded keys in its forward pass, but not in its backward pass."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return blank_padding(q, k, v, key_mask) if wanted else (q, k, v)


def attend_to_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The outputs of queries without keys: zeros [B, H, L, E], with gradients of 0 in q, k and v."""
    nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return nothing.expand(*q.shape[:3], v.shape[3])
