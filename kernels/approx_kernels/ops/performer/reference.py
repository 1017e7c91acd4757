"""Performer attention in plain PyTorch: random features of queries and keys, then sums over keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.linear.sums import attend_features, continue_features
from approx_kernels.ops.performer.causal import CHUNK, causal_sums
from approx_kernels.ops.performer.sums import KeySums, Rows, divided, heights_of, logs_of
from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import in_order, sharing, turns
from approx_kernels.tokens.padding import blank_padding
from approx_kernels.tokens.ring import State

# Numbers in a working set: half a MiB of float32, which fits into a core's own cache.
_CACHED = 2**17
# Added to the features of the relu kernel: a query whose features are all 0 would attend to nothing.
FLOOR = 1e-3
# Added to normalisers, which are at least the square of that, so it matters only without a key.
EPS = 1e-15


def performer_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    projection: Tensor,
    offsets: Tensor | None,
    kernel: str,
    causal: bool,
    scale: float,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """Performer attention; on a CPU a few heads at a time, whose features then stay in its cache.

    When causal, it continues from the state of earlier keys, and returns the state for later queries.
    """
    if sharing(q, k) > 1:
        assert projection.ndim == 2, "heads with rows of their own share no keys"
        form = {"projection": projection, "offsets": None, "kernel": kernel, "causal": causal, "scale": scale}
        results = [performer_heads(q[:, turn], k, v, key_mask, state=state, **form) for turn in turns(q, k)]
        # Each turn added the same keys.
        return in_order([out for out, _ in results]), results[-1][1]
    wide = torch.promote_types(q.dtype, torch.float32)
    numbers = q.shape[0] * min(k.shape[2], CHUNK) * projection.shape[-2]
    heads = max(1, _CACHED // numbers) if q.device.type == "cpu" else q.shape[1]
    attend = _relu if kernel == "relu" else _softmax
    q, k, v = blank_padding(q, k, v, key_mask)
    out, reached = [], []
    with without_autocast(q.device.type):
        for first, *parts in zip(range(0, q.shape[1], heads), *(x.split(heads, 1) for x in (q, k, v)), strict=True):
            shape = parts[0].shape[:2]
            queries, keys, values = (x.to(wide).flatten(0, 1) for x in parts)
            keep = None if key_mask is None else key_mask[:, None].expand(*shape, -1).flatten(0, 1)[..., None]
            block = slice(first, first + heads)
            rows = _rows_of(block, shape[0], projection.to(wide), None if offsets is None else offsets.to(wide))
            earlier = None if state is None else {name: x[:, block].flatten(0, 1) for name, x in state.items()}
            joined, later = attend(queries * scale**0.5, keys * scale**0.5, values, keep, rows, causal, earlier)
            out.append(joined.unflatten(0, shape).to(q.dtype))
            reached.append({name: x.unflatten(0, shape) for name, x in later.items()})
    return torch.cat(out, 1), {name: torch.cat([each[name] for each in reached], 1) for name in reached[0]}


def _rows_of(block: slice, batch: int, rows: Tensor, offsets: Tensor | None) -> Rows:
    """The rows of some heads of each sample."""
    if rows.ndim == 2:
        return Rows(rows, None)
    return Rows(rows[block].repeat(batch, 1, 1), None if offsets is None else offsets[block].repeat(batch, 1)[:, None])


def _relu(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, causal: bool, state: State | None
) -> tuple[Tensor, State]:
    queries, keys = (F.relu(x @ rows.rows.mT) + FLOOR for x in (q, k))
    keys = keys if keep is None else keys * keep
    if not causal:
        return attend_features(queries, keys, v, EPS), {}
    out, sums = continue_features(queries, keys, v, None if state is None else state["sums"], EPS)
    return out, {"sums": sums}


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, causal: bool, state: State | None
) -> tuple[Tensor, State]:
    v = F.pad(v, (0, 1), value=1.0)
    sums = KeySums.of_nothing(k, v, rows) if state is None else KeySums(state["top"], state["sums"])
    # Bottom-right: every query sees the first S - L keys; with L > S the first L - S queries see none.
    before = k.shape[1] - q.shape[1]
    # A single query sees every key, and has no chunk.
    seen, blind = max(before, 0) if causal and q.shape[1] > 1 else k.shape[1], max(-before, 0) if causal else 0
    early, late = (None, None) if keep is None else (keep[:, :seen], keep[:, seen:])
    sums = _sum_keys(sums, k[:, :seen], v[:, :seen], early, rows)
    if seen == k.shape[1]:
        out = torch.cat([divided(sums.read(heights_of(each, rows))) for each in q[:, blind:].split(CHUNK, 1)], 1)
    else:
        out, sums = causal_sums(q[:, blind:], k[:, seen:], v[:, seen:], late, rows, sums)
    return F.pad(out, (0, 0, blind, 0)), {"top": sums.top, "sums": sums.state}


def _sum_keys(sums: KeySums, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows) -> KeySums:
    for first in range(0, k.shape[1], CHUNK):
        chunk = slice(first, first + CHUNK)
        sums = sums.add(logs_of(k[:, chunk], rows), v[:, chunk], None if keep is None else keep[:, chunk])
    return sums
