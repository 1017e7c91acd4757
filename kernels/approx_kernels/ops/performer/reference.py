"""Performer attention in plain PyTorch: random features, how they are drawn and fitted, and sums over keys."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.linear.reference import continue_sums
from approx_kernels.runtime.pytorch import drop_keys, without_autocast
from approx_kernels.tokens import State, blank_padding, check_draw, check_form, in_order, sharing, turns

KERNELS = ("softmax", "relu")
# Numbers in a working set: half a MiB of float32, which fits into a core's own cache.
_CACHED = 2**17
# Added to the features of the relu kernel: a query whose features are all 0 would attend to nothing.
FLOOR = 1e-3
# Added to normalisers, which are at least the square of that, so it matters only without a key.
EPS = 1e-15


# Features are kept as logarithms until they are relative to a maximum. A key's are `w.x - |x|^2 / 2`; a query's are
# `w.x`, since the rest is the same for all features and cancels in the normaliser.


class Rows(NamedTuple):
    """The random rows w and the offsets added to the logarithms of queries' features.

    Attributes:
        rows: [M, D], or [G, M, D] if heads have their own.
        offsets: [G, 1, M], or None for none.
    """

    rows: Tensor
    offsets: Tensor | None


class KeySums(NamedTuple):
    """The state of the keys seen so far; its size does not depend on their number.

    Attributes:
        top: Largest logarithm of each feature, [G, 1, M]; `lowest` before the first real key. It cancels, so it is
            not differentiated.
        state: Sums of features, relative to `top`, times values and a one, [G, M, E + 1].
    """

    top: Tensor
    state: Tensor

    @classmethod
    def of_nothing(cls, k: Tensor, v: Tensor, rows: Rows) -> "KeySums":
        """The sums before the first key; v has its column of ones."""
        groups, count = k.shape[0], rows.rows.shape[-2]
        return cls(k.new_full((groups, 1, count), lowest(k.dtype)), k.new_zeros(groups, count, v.shape[2]))

    def raised(self, logs: Tensor, keep: Tensor | None) -> Tensor:
        """`top` after adding keys with these logarithms, [G, n, M], [G, 1, M]."""
        logs = logs.detach() if keep is None else logs.detach().masked_fill(~keep, lowest(logs.dtype))
        return torch.maximum(self.top, logs.amax(1, keepdim=True))

    def add(self, logs: Tensor, v: Tensor, keep: Tensor | None) -> "KeySums":
        """The sums including these keys: logs [G, n, M], v [G, n, E + 1], keep [G, n, 1]."""
        top = self.raised(logs, keep)
        state = self.state * (self.top - top).exp().transpose(1, 2)
        return KeySums(top, torch.baddbmm(state, key_features(logs, top, keep).transpose(1, 2), v))

    def read(self, heights: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of queries of these heights, [G, n, M] -> [G, n, E], and the logarithms of their normalisers, [G, n]."""
        return divided(query_features(heights, self.top) @ self.state, largest_of(heights, self.top))


def lowest(dtype: torch.dtype) -> float:
    """Below every logarithm, and finite, so that differences are numbers."""
    return torch.finfo(dtype).min / 4


def heights_of(q: Tensor, rows: Rows) -> Tensor:
    """Logarithms of the features of queries, [G, n, D] -> [G, n, M]."""
    heights = q @ rows.rows.mT
    return heights if rows.offsets is None else heights + rows.offsets


def logs_of(k: Tensor, rows: Rows) -> Tensor:
    """Logarithms of the features of keys, [G, n, D] -> [G, n, M]."""
    return (k @ rows.rows.mT).sub_(k.square().sum(-1, keepdim=True) / 2)


def largest_of(heights: Tensor, top: Tensor) -> Tensor:
    """Logarithm of what the features of each query are relative to, for keys relative to `top`, [G, n, 1]."""
    return (heights.detach() + top).amax(-1, keepdim=True)


def query_features(heights: Tensor, top: Tensor) -> Tensor:
    """Features of queries for keys relative to `top`; the largest of each query is 1."""
    return (heights + top).sub_(largest_of(heights, top)).exp_()


def key_features(logs: Tensor, top: Tensor, keep: Tensor | None) -> Tensor:
    """Features of keys relative to `top`, and 0 at padding."""
    relative = logs - top
    # Mask before the exponential, which padding may make infinite; masking afterwards would give NaN gradients.
    return (relative if keep is None else relative.masked_fill_(~keep, lowest(logs.dtype))).exp_()


def divided(sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs from sums of weighted values and, in the last column, of weights; and the logarithms of the latter.

    With a key the weights add up to at least 1, since the largest feature of the query meets the key that set `top`; so the
    bound matters only without a key, where the output is 0 and the logarithm `lowest`. `largest` is the logarithm of what
    weights are relative to, [..., 1].
    """
    norm = sums[..., -1:].clamp(min=0.5)
    logs = torch.where(sums[..., -1:] < 0.5, lowest(norm.dtype), norm.log() + largest)
    return sums[..., :-1] / norm, logs[..., 0]


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    projection: Tensor,
    offsets: Tensor | None = None,
    share: Tensor | None = None,
    kernel: str = "softmax",
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    k, v = of_own_rows(q, k, v, projection)
    v = drop_keys(v, dropout)
    how = {"projection": projection, "offsets": offsets, "kernel": kernel, "causal": causal, "scale": scale}
    out, _, _ = performer_heads(q, k, v, key_mask, **how)
    return out if share is None else mixed(out, v, key_mask, share, causal=causal)[0]


def performer_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    projection: Tensor,
    offsets: Tensor | None = None,
    share: Tensor | None = None,
    kernel: str = "softmax",
    scale: float,
) -> tuple[Tensor, State]:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    k, v = of_own_rows(q, k, v, projection)
    how = {"projection": projection, "offsets": offsets, "kernel": kernel, "causal": True, "scale": scale}

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        out, _, later = performer_heads(q, k, v, key_mask, **how, state=state)
        return out, later

    return with_share(attend, q, k, v, key_mask, state, share)


def of_own_rows(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated per query head if heads have their own rows, and so their own features of keys."""
    if projection.ndim == 2 or sharing(q, k) == 1:
        return k, v
    return k.repeat_interleave(sharing(q, k), 1), v.repeat_interleave(sharing(q, v), 1)


def with_share(
    attend: Callable[..., tuple[Tensor, State]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    share: Tensor | None,
) -> tuple[Tensor, State]:
    """Continue from a state whose sums for the share of uniform attention `attend` does not know.

    Args: attend takes q, k, v, key_mask and a state, and returns outputs and the next state; the others as for
    `performer_decode`.
    """
    uniform = None if state is None else state.get(SUMS)
    state = None if state is None else {name: x for name, x in state.items() if name != SUMS}
    out, state = attend(q, k, v, key_mask, state=state)
    if share is None:
        return out, state
    out, uniform = mixed(out, v, key_mask, share, causal=True, earlier=uniform)
    return out, state | {SUMS: uniform}


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
) -> tuple[Tensor, Tensor, State]:
    """Performer attention and the logarithms of its normalisers, [B, H, L] in at least float32, up to a number for each query.

    When causal, it continues from the state of earlier keys, and returns the state for later queries. On a CPU it computes a
    few heads at a time, whose features then stay in its cache.
    """
    if sharing(q, k) > 1:
        assert projection.ndim == 2, "heads with rows of their own share no keys"
        form = {"projection": projection, "offsets": None, "kernel": kernel, "causal": causal, "scale": scale}
        results = [performer_heads(q[:, turn], k, v, key_mask, state=state, **form) for turn in turns(q, k)]
        # Each turn added the same keys.
        return in_order([out for out, *_ in results]), in_order([logs for _, logs, _ in results]), results[-1][2]
    wide = torch.promote_types(q.dtype, torch.float32)
    numbers = q.shape[0] * min(k.shape[2], CHUNK) * projection.shape[-2]
    heads = q.shape[1]
    if q.device.type == "cpu" and not torch.compiler.is_exporting():
        heads = max(1, _CACHED // numbers)
    attend = _relu if kernel == "relu" else _softmax
    q, k, v = blank_padding(q, k, v, key_mask)
    out, norms, reached = [], [], []
    with without_autocast(q.device.type):
        for first, *parts in zip(range(0, q.shape[1], heads), *(x.split(heads, 1) for x in (q, k, v)), strict=True):
            shape = parts[0].shape[:2]
            queries, keys, values = (x.to(wide).flatten(0, 1) for x in parts)
            keep = None if key_mask is None else key_mask[:, None].expand(*shape, -1).flatten(0, 1)[..., None]
            block = slice(first, first + heads)
            rows = _rows_of(block, shape[0], projection.to(wide), None if offsets is None else offsets.to(wide))
            earlier = None if state is None else {name: x[:, block].flatten(0, 1) for name, x in state.items()}
            joined, logs, later = attend(queries * scale**0.5, keys * scale**0.5, values, keep, rows, causal, earlier)
            out.append(joined.unflatten(0, shape).to(q.dtype))
            norms.append(logs.unflatten(0, shape))
            reached.append({name: x.unflatten(0, shape) for name, x in later.items()})
    later = {name: torch.cat([each[name] for each in reached], 1) for name in reached[0]}
    return torch.cat(out, 1), torch.cat(norms, 1), later


def _rows_of(block: slice, batch: int, rows: Tensor, offsets: Tensor | None) -> Rows:
    """The rows of some heads of each sample."""
    if rows.ndim == 2:
        return Rows(rows, None)
    return Rows(rows[block].repeat(batch, 1, 1), None if offsets is None else offsets[block].repeat(batch, 1)[:, None])


def _relu(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, causal: bool, state: State | None
) -> tuple[Tensor, Tensor, State]:
    queries, keys = (F.relu(x @ rows.rows.mT) + FLOOR for x in (q, k))
    keys = keys if keep is None else keys * keep
    values = F.pad(v, (0, 1), value=1.0)
    if causal:
        out, sums = continue_sums(queries, keys, values, None if state is None else state["sums"])
    else:
        sums = keys.mT @ values
        out = queries @ sums
    norm = out[..., -1:] + EPS
    return out[..., :-1] / norm, norm[..., 0].log(), {"sums": sums} if causal else {}


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, causal: bool, state: State | None
) -> tuple[Tensor, Tensor, State]:
    v = F.pad(v, (0, 1), value=1.0)
    sums = KeySums.of_nothing(k, v, rows) if state is None else KeySums(state["top"], state["sums"])
    # Bottom-right: every query sees the first S - L keys; with L > S the first L - S queries see none.
    before = k.shape[1] - q.shape[1]
    # A single query sees every key, and has no chunk.
    seen, blind = max(before, 0) if causal and q.shape[1] > 1 else k.shape[1], max(-before, 0) if causal else 0
    early, late = (None, None) if keep is None else (keep[:, :seen], keep[:, seen:])
    sums = _sum_keys(sums, k[:, :seen], v[:, :seen], early, rows)
    if seen == k.shape[1]:
        read = [sums.read(heights_of(each, rows)) for each in q[:, blind:].split(CHUNK, 1)]
        out, logs = (torch.cat(each, 1) for each in zip(*read, strict=True))
    else:
        out, logs, sums = causal_sums(q[:, blind:], k[:, seen:], v[:, seen:], late, rows, sums)
    logs = F.pad(logs, (blind, 0), value=lowest(logs.dtype))
    return F.pad(out, (0, 0, blind, 0)), logs, {"top": sums.top, "sums": sums.state}


def _sum_keys(sums: KeySums, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows) -> KeySums:
    if torch.compiler.is_exporting():
        # A program for any number of keys has no loop over chunks.
        return sums.add(logs_of(k, rows), v, keep) if k.shape[1] else sums
    for first in range(0, k.shape[1], CHUNK):
        chunk = slice(first, first + CHUNK)
        sums = sums.add(logs_of(k[:, chunk], rows), v[:, chunk], None if keep is None else keep[:, chunk])
    return sums


# Queries per chunk: pairs are computed inside it, a state of size M x E is carried between chunks.
CHUNK = 64
# How far a feature's logarithm may exceed that of earlier keys: exp(60) times any sum here fits into float32, and
# query features below exp(-87) meet at most exp(60), a product that is negligible beside weights of 1.
RISE = 60.0


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, rows: Rows, sums: KeySums
) -> tuple[Tensor, Tensor, KeySums]:
    """Outputs of queries that are tokens of their keys, all of which follow those in `sums`, with the logarithms of their
    normalisers, and the updated sums.

    Args: q and k [G, n, D], v [G, n, E + 1] with its column of ones, keep [G, n, 1]. Returns [G, n, E] and [G, n].

    A query must not depend on how large later keys of its chunk are, not even through rounding. So features of keys are
    relative to the largest of earlier chunks. Queries that have seen a key rise far above that are recomputed pair by
    pair, and in a program for decoding, which takes few at a time, all are.
    """
    if torch.compiler.is_exporting():
        heights, logs = heights_of(q, rows), logs_of(k, rows)
        earlier = query_features(heights, sums.top) @ sums.state
        joined = divided(*_of_pairs(earlier, largest_of(heights, sums.top), heights, logs, v, keep))
        return *joined, sums.add(logs, v, keep)
    out, norms = [], []
    for first in range(0, q.shape[1], CHUNK):
        chunk = slice(first, first + CHUNK)
        heights, logs, values = heights_of(q[:, chunk], rows), logs_of(k[:, chunk], rows), v[:, chunk]
        real = None if keep is None else keep[:, chunk]
        top = torch.where(sums.top > lowest(logs.dtype), sums.top, _first_real(logs.detach(), real))
        rise = sums.raised(logs, real) - top
        risen = bool((rise > RISE).any())
        keys = key_features(logs.clamp(max=top + RISE) if risen else logs, top, real)
        queries = query_features(heights, top)
        earlier = queries @ sums.state
        joined = torch.baddbmm(earlier, (queries @ keys.transpose(1, 2)).tril(), values)
        largest = largest_of(heights, top)
        if risen:
            joined, largest = _recomputed(joined, largest, earlier, heights, logs, values, real, top)
        joined, norm = divided(joined, largest)
        out.append(joined)
        norms.append(norm)
        sums = sums.add(logs, values, real)
    return torch.cat(out, 1), torch.cat(norms, 1), sums


def _first_real(logs: Tensor, keep: Tensor | None) -> Tensor:
    """Logarithms of the first real key, [G, 1, M]: every query with a key has seen it."""
    if keep is None:
        return logs[:, :1]
    index = keep.int().argmax(1, keepdim=True)
    return logs.gather(1, index.expand(-1, -1, logs.shape[2]))


def _recomputed(
    joined: Tensor,
    largest: Tensor,
    earlier: Tensor,
    heights: Tensor,
    logs: Tensor,
    v: Tensor,
    keep: Tensor | None,
    top: Tensor,
) -> tuple[Tensor, Tensor]:
    """`joined` with the sums of queries that have seen a key rise too far recomputed from weights of single pairs, and the
    logarithms of what the sums are relative to.

    Which queries these are depends only on the keys that they see.
    """
    rise = (logs.detach() - top).amax(2)
    rise = rise if keep is None else rise.masked_fill(~keep[..., 0], lowest(logs.dtype))
    beyond = rise.cummax(1).values > RISE
    corrected, relative = list(joined), list(largest)
    # Head by head: pairs times features are n x n x M numbers.
    for group in beyond.any(1).nonzero().flatten().tolist():
        real = None if keep is None else keep[group]
        sums, highest = _of_pairs(earlier[group], largest[group], heights[group], logs[group], v[group], real)
        rows = beyond[group][:, None]
        corrected[group] = torch.where(rows, sums, joined[group])
        relative[group] = torch.where(rows, highest, largest[group])
    return torch.stack(corrected), torch.stack(relative)


def _of_pairs(
    earlier: Tensor, past: Tensor, heights: Tensor, logs: Tensor, v: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sums of queries after `earlier` ones, relative to the logarithms `past`, from weights of single pairs, and the
    logarithms of what these are relative to.
    """
    visible = torch.ones(logs.shape[-2], logs.shape[-2], dtype=torch.bool, device=logs.device).tril()
    visible = visible if keep is None else visible & keep.mT
    pairs = (heights.unsqueeze(-2) + logs.unsqueeze(-3)).logsumexp(-1).masked_fill(~visible, lowest(logs.dtype))
    highest = torch.maximum(past, pairs.amax(-1, keepdim=True).detach())
    weights = (pairs - highest).exp().masked_fill(~visible, 0.0)
    return earlier * (past - highest).exp() + weights @ v, highest


def draw_projection(size: int, *, features: int, orthogonal: bool, seed: int) -> Tensor:
    """Random rows, each N(0, 1) in every coordinate, drawn once from the seed.

    Orthogonal rows come in blocks of `size`: a uniformly drawn rotation whose rows have the lengths of independent
    Gaussian rows. They estimate the same with less variance.

    Returns:
        [features, size], float32.
    """
    check_draw(seed, features=features, size=size)
    check_form(orthogonal=orthogonal)
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(features, size, generator=generator, device="cpu", dtype=torch.float32)
    if not orthogonal:
        return rows
    blocks = -(-features // size)
    gaussian = torch.randn(blocks, size, size, generator=generator, device="cpu", dtype=torch.float64)
    rotations, triangles = torch.linalg.qr(gaussian)
    # QR leaves the signs to the library; fixing those of the diagonal makes the rotation uniform and reproducible.
    rotations = rotations * triangles.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    directions = rotations.transpose(1, 2).reshape(blocks * size, size)[:features]
    return directions.float() * rows.norm(dim=1, keepdim=True)


# Name of its entry in a decoding state: sums of values and a one over all keys, [B, G, 1, E + 1].
SUMS = "values"


def mixed(
    out: Tensor, v: Tensor, key_mask: Tensor | None, share: Tensor, *, causal: bool, earlier: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(1 - share) of the outputs and share of the mean of the values that a query may see, and sums for later queries.

    Args:
        out: Outputs of L queries, [B, H, L, E].
        v: Values of S keys, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        share: From 0 to 1, [H].
        causal: Whether query i is at position S - L + i and sees no value after it.
        earlier: Sums of values and a one over keys before these, [B, G, 1, E + 1], in at least float32.

    Returns:
        [B, H, L, E] in the dtype of out, and the sums including these keys.
    """
    with without_autocast(out.device.type):
        wide = torch.promote_types(out.dtype, torch.float32)
        sums, later = value_sums(v.to(wide), key_mask, out.shape[2], causal, earlier)
        mean = (sums[..., :-1] / sums[..., -1:].clamp(min=1)).repeat_interleave(sharing(out, v), 1)
        share = share.to(wide)[:, None, None]
        return (out + share * (mean - out)).to(out.dtype), later


def value_sums(
    v: Tensor, key_mask: Tensor | None, length: int, causal: bool, earlier: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums of the values and a one that each of `length` queries may see, [B, G, L or 1, E + 1], and those for later queries."""
    values = F.pad(v, (0, 1), value=1.0)
    values = values if key_mask is None else values.masked_fill(~key_mask[:, None, :, None], 0.0)
    if causal and length > 1:
        # Bottom-right: with L > S the first L - S queries see none of these.
        sums = F.pad(values, (0, 0, max(length - v.shape[2], 0), 0)).cumsum(2)
        sums = sums if earlier is None else sums + earlier
        # A state stores only the last sum.
        return sums[:, :, -length:], sums[:, :, -1:].clone()
    sums = values.sum(2, keepdim=True)
    sums = sums if earlier is None else sums + earlier
    return sums, sums


# With w of N(0, 1) and u = x + y, the product of features exp(a w² + (1 - 4a)^½ w x - x²/2) of x and y, times (1 - 4a)^½,
# is exp(x y) on average for every a < 1/8. Its second moment relative to exp(2 x y) is (1 + p) / 2 p^½ exp(u² / p), p = 1 - 8a;
# the mean logarithm of that over pairs with E u² = s is smallest at p² - (1 + 2 s) p - 2 s = 0. Coordinates multiply, so
# vectors may use any basis, with a separate a for each coordinate.
#
# Neither a rotation nor an invertible map T of queries, with the inverse of its transpose for keys, changes q.k. A vector
# subtracted from all keys scales the weights of a query by one number, which cancels. This freedom is used to minimise u.

ESTIMATORS = ("positive", "oprf", "sderf", "aderf")

# Added to second moments, times their mean over directions, so that directions with little data are not blown up.
_RIDGE = 1e-2
# Lower bound of that mean, for the case that all tokens are equal.
_LEAST = 1e-6


class Fitted(NamedTuple):
    """An estimator of exp(q.k) with a separate basis of features per head.

    Attributes:
        query_map: T, [H, D, D]; queries are multiplied by its transpose from the right.
        key_map: The inverse of its transpose, [H, D, D], for keys likewise.
        key_shift: Vector then subtracted from keys, [H, D].
        curvature: a of each coordinate, at most 0, [H, D].
    """

    query_map: Tensor
    key_map: Tensor
    key_shift: Tensor
    curvature: Tensor

    @classmethod
    def plain(cls, heads: int, size: int) -> "Fitted":
        """The unfitted estimator: features exp(w.x - |x|^2 / 2)."""
        identity = torch.eye(size).repeat(heads, 1, 1)
        return cls(identity, identity.clone(), torch.zeros(heads, size), torch.zeros(heads, size))

    def inputs(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Queries and keys in the features' basis, so that `scale` times their products are scores minus a number per
        query, in the dtypes of q and k: [B, H, L, D], and for shared keys, [B, G, S, D], one copy per query head,
        [B, H, S, D].
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(wide) @ self.query_map.to(wide).mT
        shared = k.to(wide)
        keys = in_order([shared @ self.key_map[turn].to(wide).mT for turn in turns(q, k)])
        keys = keys - self.key_shift.to(wide)[:, None] * scale**-0.5
        return queries.to(q.dtype), keys.to(k.dtype)

    def rows(self, projection: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and logarithms of their weights for each head, [H, M, D] and [H, M], from rows [M, D] of N(0, 1)."""
        wide = torch.promote_types(projection.dtype, torch.float32)
        drawn, curvature = projection.to(wide), self.curvature.to(wide)
        return drawn * (1 - 4 * curvature).sqrt()[:, None], 2 * curvature @ drawn.square().T


def fit_estimator(q: Tensor, k: Tensor, key_mask: Tensor | None = None, *, estimator: str, scale: float) -> Fitted:
    """Fit each head's estimator of exp(scale q.k) to the second moments of its queries and keys.

    `positive` fits nothing. `oprf` has one a for all coordinates of a head. `sderf` has one per coordinate, in the basis in
    which the coordinates of queries plus keys are uncorrelated. `aderf` first maps queries and keys to equal second moments,
    which minimises the squares of their sums, and subtracts the mean of queries plus keys from the keys.

    Source: Likhosherstov et al., 2022, Chefs' Random Tables, arXiv 2205.15317 (OPRF) and 2023, FAVOR#, arXiv 2302.00787
    (SDERF, ADERF); departs from the last in moments around the mean and in subtracting the means.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        key_mask: [B, S] bool, True at real keys, and when L == S at real queries; None when all are real.
        estimator: One of `ESTIMATORS`.
        scale: Factor of the scores.

    Returns:
        The estimator, in float32 on the device of q. `Fitted.plain` if no token is real.

    Raises:
        ValueError: if the estimator is unknown.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; expected one of {', '.join(ESTIMATORS)}.")
    heads, size = q.shape[1], q.shape[3]
    # Copies are acceptable here: fitting runs once, and shared keys count for each query head.
    k = k.repeat_interleave(sharing(q, k), 1)
    x, y = (_real(each, key_mask) * scale**0.5 for each in (q, k))
    if estimator == "positive" or not x.shape[1] or not y.shape[1]:
        return Fitted(*(each.to(q.device) for each in Fitted.plain(heads, size)))
    identity = torch.eye(size, dtype=x.dtype, device=x.device).expand(heads, size, size)
    query_map = key_map = identity
    shift = x.new_zeros(heads, 1, size)
    if estimator == "aderf":
        middle = y.mean(1, keepdim=True)
        query_map, key_map = _balanced(_moments(x - x.mean(1, keepdim=True)), _moments(y - middle))
        shift = x.mean(1, keepdim=True) @ query_map.mT + middle @ key_map.mT
    x, y = x @ query_map.mT, y @ key_map.mT - shift
    # Second moments of the sums of all queries with all keys.
    cross = x.mean(1).unsqueeze(-1) * y.mean(1).unsqueeze(-2)
    squares, base = torch.linalg.eigh(_moments(x) + _moments(y) + cross + cross.mT)
    if estimator == "oprf":
        squares, base = squares.mean(-1, keepdim=True).expand_as(squares), identity
    twice = 2 * squares.clamp(min=0)
    p = (1 + twice + ((1 + twice).square() + 4 * twice).sqrt()) / 2
    made = base.mT @ query_map, base.mT @ key_map, (shift @ base).squeeze(1), (1 - p) / 8
    return Fitted(*(each.float() for each in made))


def _real(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """All real tokens of each head, [H, n, D] in float64."""
    tokens = x.transpose(1, 2).flatten(0, 1).double()
    if key_mask is not None and key_mask.shape[1] == x.shape[2]:
        tokens = tokens[key_mask.flatten()]
    return tokens.transpose(0, 1)


def _moments(x: Tensor) -> Tensor:
    """Second moments, [H, n, D] -> [H, D, D], with a ridge."""
    moments = x.mT @ x / x.shape[1]
    mean = moments.diagonal(dim1=1, dim2=2).mean(1).clamp(min=_LEAST)[:, None, None]
    return moments + _RIDGE * mean * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def _balanced(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric T for queries, and its inverse for keys, that give both the same second moments."""
    root, inverse = _roots(queries)
    # T² is the geometric mean of the inverse of one and the other.
    return _roots(inverse @ _roots(root @ keys @ root)[0] @ inverse)


def _roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric positive matrix, and its inverse."""
    squares, base = torch.linalg.eigh(x)
    squares = squares.clamp(min=torch.finfo(x.dtype).tiny).sqrt()[:, None]
    return (base * squares) @ base.mT, (base / squares) @ base.mT
