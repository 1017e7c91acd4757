"""Performer attention in plain PyTorch: random features of queries and keys, then sums over keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.linear.sums import attend_features
from approx_kernels.performer.causal import causal_sums
from approx_kernels.performer.sums import KeySums, divided, heights_of, logs_of

# Numbers in a working set: half a MiB of float32, which a core's own cache holds.
_CACHED = 2**17
# Queries or keys whose features exist at a time.
_CHUNK = 64
# Added to the features of the relu kernel: a query whose features all are 0 would attend to nothing.
_FLOOR = 1e-3
# Added to a normaliser of at least the square of that, so it only decides what is without a key.
_EPS = 1e-15


def performer_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projection: Tensor,
    kernel: str,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Performer attention; on a CPU a few heads at a time, whose features then stay in its cache."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = max(1, _CACHED // (q.shape[0] * _CHUNK * projection.shape[0])) if q.device.type == "cpu" else q.shape[1]
    attend = _relu if kernel == "relu" else _softmax
    out = []
    with torch.autocast(q.device.type, enabled=False):
        rows = projection.to(wide)
        for parts in zip(q.split(heads, 1), k.split(heads, 1), v.split(heads, 1), strict=True):
            shape = parts[0].shape[:2]
            queries, keys, values = (x.to(wide).flatten(0, 1) for x in parts)
            keep = None if key_mask is None else key_mask[:, None].expand(*shape, -1).flatten(0, 1)[..., None]
            if dropout:
                values = values * F.dropout(values.new_ones(values.shape[:-1]), dropout)[..., None]
            joined = attend(queries * scale**0.5, keys * scale**0.5, values, keep, rows, causal)
            out.append(joined.unflatten(0, shape).to(q.dtype))
    return torch.cat(out, 1)


def _relu(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Tensor, causal: bool) -> Tensor:
    queries, keys = (F.relu(x @ rows.T) + _FLOOR for x in (q, k))
    keys = keys if keep is None else keys * keep
    return attend_features(queries, keys, v, causal=causal, eps=_EPS)


def _softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Tensor, causal: bool) -> Tensor:
    v = F.pad(v, (0, 1), value=1.0)
    if not causal:
        sums = _sum_keys(KeySums.of_nothing(k, v, rows), k, v, keep, rows)
        return torch.cat([divided(sums.read(heights_of(each, rows))) for each in q.split(_CHUNK, 1)], 1)
    # Bottom-right: the first S - L keys are seen by every query; with L > S the first L - S queries see none.
    before = k.shape[1] - q.shape[1]
    seen, blind = max(before, 0), max(-before, 0)
    early, late = (None, None) if keep is None else (keep[:, :seen], keep[:, seen:])
    sums = _sum_keys(KeySums.of_nothing(k, v, rows), k[:, :seen], v[:, :seen], early, rows)
    out = causal_sums(q[:, blind:], k[:, seen:], v[:, seen:], late, rows, sums)
    return F.pad(out, (0, 0, blind, 0))


def _sum_keys(sums: KeySums, k: Tensor, v: Tensor, keep: Tensor | None, rows: Tensor) -> KeySums:
    for first in range(0, k.shape[1], _CHUNK):
        chunk = slice(first, first + _CHUNK)
        sums = sums.add(logs_of(k[:, chunk], rows), v[:, chunk], None if keep is None else keep[:, chunk])
    return sums
