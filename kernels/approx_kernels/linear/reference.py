"""Linear attention in parallel form (all keys at once) and in chunked form (causal)."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries of a causal chunk: inside it pairs are computed, between chunks a state of size D x E is carried.
_CHUNK = 64
# Numbers in a working set: half a MiB of float32, which a core's own cache holds.
_CACHED = 2**17


def linear_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    eps: float,
    input_scale: float,
    dropout: float,
) -> Tensor:
    """Linear attention; on a CPU a few heads at a time, whose features then stay in its cache."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keep = None if key_mask is None else key_mask[:, None, :, None]
    heads = max(1, _CACHED // (q.shape[0] * k.shape[2] * k.shape[3])) if q.device.type == "cpu" else q.shape[1]
    out = []
    with torch.autocast(q.device.type, enabled=False):
        for q_block, k_block, v_block in zip(q.split(heads, 1), k.split(heads, 1), v.split(heads, 1), strict=True):
            queries = elu_features(q_block.to(wide), input_scale)
            keys = elu_features(k_block.to(wide), input_scale)
            # Features of padding are not 0: it would enter the normaliser.
            keys = keys if keep is None else keys.mul_(keep)
            values = v_block.to(wide)
            if dropout:
                values = values * F.dropout(values.new_ones(values.shape[:-1]), dropout)[..., None]
            attend = _chunked if causal else _parallel
            out.append(attend(queries, keys, values, eps).to(q.dtype))
    return torch.cat(out, 1)


def elu_features(x: Tensor, input_scale: float) -> Tensor:
    """elu(x) + 1, a fresh tensor."""
    return F.elu(x if input_scale == 1.0 else x * input_scale).add_(1.0)


def _parallel(queries: Tensor, keys: Tensor, values: Tensor, eps: float) -> Tensor:
    state = keys.transpose(-2, -1) @ values
    norm = queries @ keys.sum(-2).unsqueeze(-1)
    return (queries @ state) / (norm + eps)


def _chunked(queries: Tensor, keys: Tensor, values: Tensor, eps: float) -> Tensor:
    """Causal form: exact products inside a chunk, the sum of all earlier chunks as a state before it."""
    length, size = queries.shape[-2], values.shape[-1]
    # Bottom-right: the first S - L keys are seen by every query; with L > S the first L - S queries see none.
    before = keys.shape[-2] - length
    if before < 0:
        keys, values = F.pad(keys, (0, 0, -before, 0)), F.pad(values, (0, 0, -before, 0))
        before = 0
    # A last column of ones makes the normaliser one more value.
    values = F.pad(values, (0, 1), value=1.0)
    first = keys[..., :before, :].transpose(-2, -1) @ values[..., :before, :]
    chunks = -(-length // _CHUNK)
    end = (0, 0, 0, chunks * _CHUNK - length)
    queries, keys, values = (
        F.pad(x, end).unflatten(-2, (chunks, _CHUNK)) for x in (queries, keys[..., before:, :], values[..., before:, :])
    )
    added = keys.transpose(-2, -1) @ values
    # Shifted, not summed and taken back: the difference would lose digits, above all in the gradient.
    state = torch.cat([first.unsqueeze(-3), added[..., :-1, :, :]], -3).cumsum(-3)
    out = (queries @ keys.transpose(-2, -1)).tril() @ values + queries @ state
    out = out.flatten(-3, -2)[..., :length, :]
    return out[..., :size] / (out[..., size:] + eps)
