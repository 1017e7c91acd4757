"""Sums over keys in parallel form (all keys at once) and in chunked form (causal)."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries of a causal chunk: inside it pairs are computed, between chunks a state of size D x E is carried.
_CHUNK = 64


def attend_features(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool, eps: float) -> Tensor:
    """`sum_j (f_i.g_j) v_j / (sum_j f_i.g_j + eps)` for features f [B, H, L, F] and g [B, H, S, F] of any map."""
    return (_chunked if causal else _parallel)(queries, keys, values, eps)


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
