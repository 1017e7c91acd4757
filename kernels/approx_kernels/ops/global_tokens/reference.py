"""A window and global tokens, in plain PyTorch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.exact.reference import places, tokens_at, window_blocks
from approx_kernels.runtime.pytorch import sdpa
from approx_kernels.tokens import in_turns, sharing, without_padding


def global_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    tokens: Sequence[int] | Tensor,
    see_all: bool,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    right = 0 if causal else right

    def attend(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[int] | Tensor) -> Tensor:
        how: dict[str, Any] = {"causal": causal, "scale": scale, "dropout": dropout}
        chosen = places(tokens, k.shape[2], k.device)
        out = in_turns(partial(window_blocks, left=left, right=right, chosen=chosen, **how), q, k, v)
        return seeing_rows(out, q, k, v, tokens, **how) if see_all else out

    if not isinstance(tokens, Tensor) or key_mask is None:
        return without_padding(partial(attend, tokens=tokens), q, k, v, key_mask)
    out = []
    for *qkv, real, own in zip(q.split(1), k.split(1), v.split(1), key_mask, tokens, strict=True):
        out.append(without_padding(partial(attend, tokens=own[real][None]), *qkv, key_mask=real[None]))
    return torch.cat(out)


def seeing_rows(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Sequence[int] | Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The outputs, with those of the chosen tokens replaced by exact attention over all keys."""
    length, keys = q.shape[2], k.shape[2]
    before = keys - length
    if not isinstance(tokens, Tensor):
        # A decoded token is never one of the first, whose rows are not computed.
        tokens = [token for token in tokens if token >= before]
    index, counts = places(tokens, keys, k.device)
    if not index.shape[-1]:
        return out
    past = torch.arange(keys, device=q.device) <= index[..., None] if causal else None
    past = past[:, None] if past is not None and past.dim() == 3 else past
    queries = tokens_at(q, (index - before).clamp(min=0))
    how = {"dropout_p": dropout, "scale": scale, "enable_gqa": sharing(q, k) > 1}
    exact = sdpa(queries, k, v, attn_mask=past, **how)
    # Non-queries, and fillers for samples with fewer chosen tokens, go to an extra last row that is cut off.
    rows = torch.where(counts & (index >= before), index - before, length)
    rows = rows[..., None, :, None].expand_as(exact)
    return F.pad(out, (0, 0, 0, 1)).scatter(2, rows, exact)[:, :, :length]
