"""Sums over keys in parallel form (all keys at once) and in chunked form (causal)."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries per causal chunk: pairs are computed inside it, a state of size D x E is carried between chunks.
_CHUNK = 64


def attend_features(queries: Tensor, keys: Tensor, values: Tensor, eps: float) -> Tensor:
    """`sum_j (f_i.g_j) v_j / (sum_j f_i.g_j + eps)` for features f [..., L, F] and g [..., S, F] of any map."""
    state = keys.transpose(-2, -1) @ values
    norm = queries @ keys.sum(-2).unsqueeze(-1)
    return (queries @ state) / (norm + eps)


def continue_features(
    queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The causal form after keys given by their sums alone, and the sums with the new keys.

    The sums are of features times values and a one, [..., F, E + 1]; None before the first key. Inside a chunk
    the products are exact; a state holds the sum of all earlier chunks.
    """
    length, size = queries.shape[-2], values.shape[-1]
    # Bottom-right: every query sees the first S - L keys; with L > S the first L - S queries see none.
    before = keys.shape[-2] - length
    if before < 0:
        keys, values = F.pad(keys, (0, 0, -before, 0)), F.pad(values, (0, 0, -before, 0))
        before = 0
    # A single query sees every key.
    seen = before if length > 1 else keys.shape[-2]
    # A last column of ones turns the normaliser into one more value.
    values = F.pad(values, (0, 1), value=1.0)
    first = keys[..., :seen, :].transpose(-2, -1) @ values[..., :seen, :]
    first = first if sums is None else sums + first
    if length == 1:
        out = queries @ first
        return out[..., :size] / (out[..., size:] + eps), first
    # ONNX rounds negative quotients up, and an exported program for several chunks does not take a single one.
    chunks = (length + _CHUNK - 1) // _CHUNK
    if torch.compiler.is_exporting():
        chunks += 1
    end = (0, 0, 0, chunks * _CHUNK - length)
    queries, keys, values = (
        F.pad(x, end).unflatten(-2, (chunks, _CHUNK)) for x in (queries, keys[..., before:, :], values[..., before:, :])
    )
    added = keys.transpose(-2, -1) @ values
    # Shifted rather than subtracted: a difference would lose digits, above all in the gradient.
    states = torch.cat([first.unsqueeze(-3), added], -3).cumsum(-3)
    out = (queries @ keys.transpose(-2, -1)).tril() @ values + queries @ states[..., :-1, :, :]
    out = out.flatten(-3, -2)[..., :length, :]
    return out[..., :size] / (out[..., size:] + eps), states[..., -1, :, :]
