"""Attention of padded batches on CUDA through PyTorch's variable-length attention, with all real tokens in one row."""

import inspect
from typing import Any

import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn: Any = None

DTYPES = (torch.float16, torch.bfloat16)


def obstacle(q: Tensor) -> str | None:
    """Why this cannot run on [B, H, L, D] queries; None if it can."""
    if varlen_attn is None:
        return "this torch has no torch.nn.attention.varlen; 2.10 and later have it."
    if q.device.type != "cuda":
        return f"the tensors are on the {q.device.type}; variable-length attention needs CUDA."
    if q.dtype not in DTYPES:
        return f"the tensors are {q.dtype}; variable-length attention takes float16 and bfloat16."
    return None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention among the real tokens of each sample, for all samples in one launch.

    Args:
        q: Queries, [B, H, L, D], float16 or bfloat16.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.

    Returns:
        [B, H, L, E] in the dtype of q; 0 for padded queries (queries are tokens of the keys if L == S or `causal`) and
        for samples without real keys.
    """
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    if causal or length == keys:
        asking = key_mask[:, keys - length :] if length <= keys else _padded(key_mask, length - keys)
    else:
        asking = key_mask.any(1, keepdim=True).expand(batch, length)
    # Rows of [B L, H, D]; this synchronises with the device once to read the selected sizes.
    rows, columns = asking.reshape(-1).nonzero().squeeze(1), key_mask.reshape(-1).nonzero().squeeze(1)
    out = q.new_zeros(batch * length, heads, v.shape[3])
    if rows.numel():
        packed = _rows(q, rows), _rows(k, columns), _rows(v, columns)
        packed_out = _attend(packed, _starts(asking), _starts(key_mask), length, keys, causal=causal, scale=scale)
        out = out.index_copy(0, rows, packed_out)
    return out.view(batch, length, heads, -1).transpose(1, 2)


def _attend(
    packed: tuple[Tensor, Tensor, Tensor],
    q_starts: Tensor,
    k_starts: Tensor,
    length: int,
    keys: int,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Call it with the argument names of its version: 2.10 has `is_causal` and no scale, 2.11 and later a window."""
    q, k, v = packed
    known = inspect.signature(varlen_attn).parameters
    more: dict[str, Any] = {}
    if "scale" in known:
        more["scale"] = scale
    else:
        q = q * (scale * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            more["enable_gqa"] = True
        else:
            # Older versions do not support shared heads.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if causal:
        more |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return varlen_attn(q, k, v, q_starts, k_starts, length, keys, **more)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Some tokens of all samples in one row, [tokens, H, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).index_select(0, index)


def _starts(real: Tensor) -> Tensor:
    """Offsets of the samples in the row, with the end of the last one, [B + 1]."""
    ends = real.sum(1).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).int()


def _padded(key_mask: Tensor, more: int) -> Tensor:
    return torch.cat([key_mask.new_zeros(key_mask.shape[0], more), key_mask], 1)
