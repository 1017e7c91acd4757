"""Exact keys joined with estimates by features, linear or random, for all others, in plain PyTorch; see `near_keys`.

There is an estimate for the keys before the window of a query and, in both directions, one for those after it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.ops.linear.reference import (
    FORGETFUL,
    continue_delta,
    continue_fading,
    continue_sums,
    features,
    scaled,
)
from approx_kernels.ops.near_keys.reference import (
    Exactly,
    Near,
    Part,
    far_mask,
    first_keys,
    joined,
    lowest,
    near_keys,
    per_query_head,
    reach,
)
from approx_kernels.ops.performer.reference import SUMS as UNIFORM
from approx_kernels.ops.performer.reference import mixed, performer_heads, value_sums
from approx_kernels.runtime.pytorch import drop_keys, without_autocast
from approx_kernels.tokens import PARTS, State, blank_padding, content, extended, first_and_newest

# From queries [B, H, L, F], keys [B, G, n, F], values [B, G, n, E], a mask [B, n] and whether it is causal, bottom-right.
Estimate = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Part]


def far_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    estimate: Estimate,
    *,
    window: int,
    causal: bool,
    more: bool = False,
) -> list[Part]:
    """The estimates for keys outside the window: those before it and, with a causal pass from the end, those after it.

    Args:
        q: Queries as the estimate reads them, [B, H, L, F].
        k: Keys likewise, [B, G, S, F].
        v: Values, [B, G, S, E].
        mask: [B, S] bool, False at padding and chosen keys; None for all keys.
        estimate: The estimate.
        window: Width of the window, see `reach`; 0 for none, so that all keys are far.
        causal: Whether a query sees only keys at or before its own position.
        more: Whether the estimate knows keys before these.
    """
    if not window:
        if mask is not None:
            # One masked key more, so that the queries are not taken for the tokens of the masked keys.
            k, v, mask = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), F.pad(mask, (1, 0))
        return [estimate(q, k, v, mask, causal)]
    left, right = reach(window, causal)
    parts = []
    if more or torch.compiler.is_exporting() or k.shape[2] > left + 1:
        parts.append(_before(q, k, v, mask, left, k.shape[2], estimate))
    if not causal and (torch.compiler.is_exporting() or q.shape[2] > right + 1):
        q, k, v = (x.flip(2) for x in (q, k, v))
        after = _before(q, k, v, None if mask is None else mask.flip(1), right, q.shape[2], estimate)
        parts.append(Part(after.out.flip(2), after.log.flip(2)))
    return parts


def _before(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, distance: int, keys: int, estimate: Estimate) -> Part:
    """The estimate for keys more than `distance` before each query, of which the last is the token of key number `keys`.

    Keys are moved back by that many places, after masked ones, so that this is causal for any length. One more masked key
    keeps the queries from being taken for the tokens of the masked keys.
    """
    mask = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
    more = 1 + (q.shape[2] == keys + 1)
    front, end = distance + 1 + more, max(keys - k.shape[2], 0)
    k, v = (F.pad(x, (0, 0, front, end))[:, :, : keys + more] for x in (k, v))
    return estimate(q, k, v, F.pad(mask, (front, end))[:, : keys + more], True)


# A smaller normaliser counts as none, since gradients divide by its square.
LEAST_NORM = 1e-15


def logs_of(norm: Tensor, add: Tensor | None = None) -> Tensor:
    """Logarithms of normalisers, plus others; `lowest` below `LEAST_NORM`, with a gradient of 0."""
    positive = norm >= LEAST_NORM
    log = norm.masked_fill(~positive, 1.0).log()
    return (log if add is None else log + add).masked_fill(~positive, lowest(norm.dtype))


class LinearFar(NamedTuple):
    """Estimates by feature maps with gates: `exp(q.a + c) f(q).f(k) exp(k.b)`, relative to the largest near score.

    The sums of `gated` fade: each feature by the factor sigmoid(k)^(1/16) at each key. Those of `unit` follow the gated delta
    rule, whose read `f(q)^T S` is no mean; it counts with the weight `exp(q.a + c) w`, of what the state has written.

    Attributes:
        feature_map: One of `FEATURE_MAPS` or `FORGETFUL`.
        maps: W of queries and of keys, [H, D, F], see `features`; None if nothing is learned.
        query_gate: a and, last, c, [H, D + 1].
        key_gate: b, [H, D]; None for `unit`.
        input_scale: Factor of q and of k before the feature map and the gates.
        decay: d and, last, e of a key's decay of the state, `exp(-softplus(k.d + e))`, [H, D + 1]; for `unit` only.
        rate: r and, last, s of a key's rate, `sigmoid(k.r + s)`, [H, D + 1]; for `unit` only.
    """

    feature_map: str
    maps: tuple[Tensor, Tensor] | None
    query_gate: Tensor
    key_gate: Tensor | None
    input_scale: float
    decay: Tensor | None = None
    rate: Tensor | None = None

    def gates(self, q: Tensor) -> Tensor:
        """Logarithms of the gates of queries [B, H, L, D], [B, H, L] in at least float32."""
        q = scaled(q.to(torch.promote_types(q.dtype, torch.float32)), self.input_scale)
        gate = self.query_gate.to(q.dtype)
        return (q @ gate[:, :-1, None])[..., 0] + gate[:, -1:]

    def queries(self, q: Tensor) -> Tensor:
        """Features of queries, [B, H, L, F], in at least float32."""
        q = scaled(q.to(torch.promote_types(q.dtype, torch.float32)), self.input_scale)
        return features(q, self.feature_map, None if self.maps is None else self.maps[0])

    def keys(self, k: Tensor) -> Tensor:
        """Features times gates of keys [B, H, S, D], in at least float32."""
        keys, gates = self.gated(k)
        return keys if gates is None else keys * gates

    def gated(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features of keys [B, H, S, D] and their gates, [B, H, S, 1], in at least float32."""
        k = scaled(k.to(torch.promote_types(k.dtype, torch.float32)), self.input_scale)
        keys = features(k, self.feature_map, None if self.maps is None else self.maps[1])
        if self.key_gate is None:
            return keys, None
        return keys, (k @ self.key_gate.to(k.dtype)[..., None]).clamp(max=_MOST_GATE).exp()

    def fading(self, k: Tensor) -> list[Tensor]:
        """Logarithms of the decays at keys [B, H, S, D], [B, H, S, D]; for `unit` [B, H, S, 1], and the rates, likewise."""
        k = scaled(k.to(torch.promote_types(k.dtype, torch.float32)), self.input_scale)
        if self.decay is None or self.rate is None:
            return [F.logsigmoid(k) / _FADING]
        learned = self.decay.to(k.dtype), self.rate.to(k.dtype)
        decay, rate = (k @ own[:, :-1, None] + own[:, None, -1:] for own in learned)
        return [-F.softplus(decay), rate.sigmoid()]


class PerformerFar(NamedTuple):
    """Estimates by random features of queries and keys that `Fitted.inputs` has mapped.

    Attributes:
        projection: [M, D] or [H, M, D].
        offsets: [H, M], or None.
        share: Share of uniform attention among the far keys, [H]; None for none.
        kernel: One of `KERNELS`.
        scale: Factor of the scores.
        weight: Logarithm of each head's factor of the estimates, [H].
        logs: Logarithms that make the estimates those of `exp(scale q.k)`, [B, H, L].
    """

    projection: Tensor
    offsets: Tensor | None
    share: Tensor | None
    kernel: str
    scale: float
    weight: Tensor
    logs: Tensor

    def factors(self) -> Tensor:
        """Logarithms of all factors of the estimates, [B, H, L]."""
        return self.logs + self.weight.to(self.logs.dtype)[:, None]


# Bound of the logarithm of a key's gate, so that no sum overflows.
_MOST_GATE = 30.0
# Root of the sigmoids that are decays of `gated`, as in gated linear attention: a state then lasts dozens of keys.
_FADING = 16
# The arguments and results of `continue_delta`.
DeltaOp = Callable[..., tuple[Tensor, Tensor, tuple[Tensor, Tensor]]]


def linear_and_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    exactly: Exactly,
    far: LinearFar,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    return attend_linear(q, k, v, key_mask, exactly, far, near_keys, plain_sums, dropout)[0]


def attend_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    exactly: Exactly,
    far: LinearFar,
    near_op: Callable[..., Near],
    sums_op: Estimate,
    dropout: float = 0.0,
    state: State | None = None,
    keep: bool = False,
    delta_op: DeltaOp = continue_delta,
) -> tuple[Tensor, State]:
    """Linear estimates joined with the near keys, by implementations of both; causal after those of a state, and a new state.

    With `keep`, it has the sums of the keys that no later window reaches and that are not chosen, `sums` [B, H, F, E + 1], or
    of the delta rule [B, H, F, E] with `written`, [B, H, 1].
    """
    q, k, v = blank_padding(q, k, v, key_mask)
    v = drop_keys(v, dropout)
    with without_autocast(q.device.type):
        near = near_op(q, k, v, key_mask, exactly)
        mask = far_mask(key_mask, exactly.chosen)
        if far.feature_map in FORGETFUL:
            parts, later = _forgetful(q, k, v, mask, exactly, far, state, delta_op, keep)
            norm = near.total.to(torch.promote_types(q.dtype, torch.float32))
            return joined([Part(near.out, logs_of(norm)), *parts]).to(q.dtype), later
        earlier = None if state is None else state["sums"]
        keys, values, parts = _linear_far(q, k, v, mask, exactly, far, sums_op, earlier)
        out = joined([Part(near.out, logs_of(near.total.to(values.dtype))), *parts])
        if not keep:
            return out.to(q.dtype), {}
        later = left_sums(keys, values, mask, exactly.window)
        return out.to(q.dtype), {"sums": later if earlier is None else earlier + later}


def _forgetful(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    exactly: Exactly,
    far: LinearFar,
    state: State | None,
    delta_op: DeltaOp,
    keep: bool = False,
) -> tuple[list[Part], State]:
    """The estimates of a recurrence over the keys before each window, and its state; with `keep`, that of the next token."""
    queries, gates = far.queries(q), far.gates(q)
    k, length, shift = per_query_head(q, k), k.shape[2], 0
    keys, values, *steps = far.keys(k), per_query_head(q, v).to(gates.dtype), *far.fading(k)
    if mask is not None:
        keys, *steps = (x * mask[:, None, :, None] for x in (keys, *steps))
    keys = [keys, values, *steps]
    if exactly.window:
        # One more query asks for the state of the next token, whose window has moved on by a key.
        queries, shift = F.pad(queries, (0, 0, 0, int(keep))), exactly.window - keep
    if torch.compiler.is_exporting():
        keys = [F.pad(x, (0, 0, shift, 0))[:, :, :length] for x in keys]
    else:
        keys = [x[:, :, : max(length - shift, 0)] for x in keys]
    if not (keep or keys[0].shape[2] or state):
        return [], {}
    count = q.shape[2]
    if far.rate is None:
        values, before = F.pad(keys[1], (0, 1), value=1.0), None if state is None else state["sums"]
        sums, later = continue_fading(queries, keys[0], values, keys[2], before)
        part = _normalised(sums[:, :, :count])
        return [Part(part.out, part.log + gates)], {"sums": later}
    before = None if state is None else (state["sums"], state["written"])
    out, written, (sums, total) = delta_op(queries, *keys, before)
    return [Part(out[:, :, :count], logs_of(written[:, :, :count]) + gates)], {"sums": sums, "written": total}


def left_sums(keys: Tensor, values: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """Sums of features [B, H, S, F] times values and a one over the keys that no later causal window reaches, [B, H, F, E + 1]."""
    beyond = slice(max(keys.shape[2] - reach(window, True)[0], 0) if window else keys.shape[2])
    gone = keys if mask is None else keys * mask[:, None, :, None]
    return gone[:, :, beyond].mT @ F.pad(values, (0, 1), value=1.0)[:, :, beyond]


def _linear_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    exactly: Exactly,
    far: LinearFar,
    sums_op: Estimate,
    earlier: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Part]]:
    """Features of keys and values, for each query head, and the parts outside the window."""
    queries, gates = far.queries(q), far.gates(q)
    keys, values = far.keys(per_query_head(q, k)), per_query_head(q, v).to(gates.dtype)
    sums_op = sums_op if earlier is None else partial(plain_sums, earlier=earlier)
    ways = {"window": exactly.window, "causal": exactly.causal, "more": earlier is not None}
    parts = far_parts(queries, keys, values, mask, sums_op, **ways)
    return keys, values, [Part(part.out, part.log + gates) for part in parts]


def linear_parts(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, exactly: Exactly, far: LinearFar
) -> list[Part]:
    """The estimates that `linear_and_exact` joins with the near keys."""
    q, k, v = blank_padding(q, k, v, key_mask)
    mask = far_mask(key_mask, exactly.chosen)
    if far.feature_map in FORGETFUL:
        return _forgetful(q, k, v, mask, exactly, far, None, continue_delta)[0]
    return _linear_far(q, k, v, mask, exactly, far, plain_sums)[-1]


def near_and_mass(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, exactly: Exactly) -> tuple[Part, Tensor]:
    """The near keys, and the true weight of the others relative to the largest near score, [B, H, L]; 0 without a near key."""
    q, k, v = blank_padding(q, k, v, key_mask)
    near = near_keys(q, k, v, key_mask, exactly)
    every = near_keys(q, k, v, key_mask, exactly._replace(window=max(q.shape[2], k.shape[2]), chosen=None))
    mass = (every.log - near.log).exp() * near.total - near.total
    return Part(near.out, logs_of(near.total)), mass.clamp(min=0.0).masked_fill(near.total <= 0, 0.0)


def plain_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, earlier: Tensor | None = None
) -> Part:
    """Attention by features of queries and keys, after the sums of `earlier` keys."""
    k = k if mask is None else k * mask[:, None, :, None]
    values = F.pad(v, (0, 1), value=1.0)
    return _normalised(continue_sums(q, k, values, earlier)[0] if causal else q @ (k.mT @ values))


def _normalised(sums: Tensor) -> Part:
    """Sums of weighted values and, last, of weights."""
    norm = sums[..., -1]
    return Part(sums[..., :-1] / norm.masked_fill(norm < LEAST_NORM, 1.0)[..., None], logs_of(norm))


def linear_and_exact_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    sinks: int,
    window: int,
    scale: float,
    far: LinearFar,
) -> tuple[Tensor, State]:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    attend = partial(attend_linear, near_op=near_keys, sums_op=plain_sums)
    return continue_linear(q, k, v, key_mask, state, sinks, window, scale, far, attend)


def continue_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    sinks: int,
    window: int,
    scale: float,
    far: LinearFar,
    attend: Callable[..., tuple[Tensor, State]],
) -> tuple[Tensor, State]:
    """`linear_and_exact` of tokens that follow others, from sums and a ring of the exact keys; `attend` is like `attend_linear`."""
    ring = extended(_ring_of(state), k, v, key_mask)
    k, v, key_mask = content(ring)
    exactly = Exactly(True, window, first_keys(k, key_mask, sinks), scale)
    out, later = attend(q, k, v, key_mask, exactly, far, state=state, keep=True)
    return out, {**later, **exact_keys(ring, exactly.chosen, sinks, reach(window, True)[0])}


def _ring_of(state: State | None) -> State | None:
    return None if state is None else {name: x for name, x in state.items() if name in (*PARTS, "span")}


def exact_keys(ring: State, chosen: Tensor | None, sinks: int, count: int) -> State:
    """The ring of the chosen keys and the last `count`, at their places before the next token."""
    k, v, key_mask = content(ring)
    keys = k.shape[2]
    if key_mask is None or keys <= sinks + count:
        return first_and_newest(ring, sinks, count)
    last = keys - count
    parts = {"k": k[:, :, last:], "v": v[:, :, last:], "real": key_mask[:, None, last:, None]}
    if chosen is not None:
        # A chosen key that is one of the last is there once; samples with fewer are filled up with masked ones.
        before = chosen[:, :last]
        place = before.to(torch.uint8).argsort(dim=1, stable=True)[:, -sinks:]
        place = F.pad(place, (sinks - place.shape[1], 0))
        real = before.gather(1, place) & (torch.arange(sinks, device=k.device) >= sinks - last)
        rows = {
            name: x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            for name, x in (("k", k), ("v", v))
        }
        rows["real"] = real[:, None, :, None]
        parts = {name: torch.cat([rows[name], x], 2) for name, x in parts.items()}
    return first_and_newest(parts, sinks, count)


def plain_features(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *, far: PerformerFar, state: State | None = None
) -> Part:
    """Attention by random features, mixed with uniform attention, after a state."""
    out, logs, _ = _by_features(q, k, v, mask, causal, far, state)
    return Part(_with_share(out, v, mask, far, causal, None if state is None else state.get(UNIFORM)), logs)


def _by_features(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, far: PerformerFar, state: State | None
) -> tuple[Tensor, Tensor, State]:
    how = {"projection": far.projection, "offsets": far.offsets, "kernel": far.kernel, "scale": far.scale}
    own = None if state is None else {name: x for name, x in state.items() if name != UNIFORM}
    return performer_heads(q, k, v, mask, **how, causal=causal, state=own)


def _with_share(
    out: Tensor, v: Tensor, mask: Tensor | None, far: PerformerFar, causal: bool, earlier: Tensor | None = None
) -> Tensor:
    return out if far.share is None else mixed(out, v, mask, far.share, causal=causal, earlier=earlier)[0]


def performer_and_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    dropout: float = 0.0,
) -> Tensor:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    return attend_performer(q, k, v, key_mask, mapped, exactly, far, near_keys, plain_features, dropout)


def attend_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    near_op: Callable[..., Near],
    features_op: Callable[..., Part],
    dropout: float = 0.0,
    more: bool = False,
) -> Tensor:
    """Performer estimates joined with the near keys, by implementations of both; that of features is one such as `plain_features`."""
    with without_autocast(q.device.type):
        form = {"mapped": mapped, "exactly": exactly, "far": far, "more": more}
        values = drop_keys(v, dropout)
        near, estimates = performer_parts(q, k, values, key_mask, **form, near_op=near_op, features_op=features_op)
        return joined([near._replace(log=near.log.to(far.logs.dtype)), *estimates]).to(q.dtype)


def performer_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    mapped: tuple[Tensor, Tensor],
    exactly: Exactly,
    far: PerformerFar,
    near_op: Callable[..., Near] = near_keys,
    features_op: Callable[..., Part] = plain_features,
    more: bool = False,
) -> tuple[Part, list[Part]]:
    """What `performer_and_exact` joins: the near keys, and the others as estimates of `exp(scale q.k)` times each head's factor."""
    q, k, v = blank_padding(q, k, v, key_mask)
    near = near_op(q, k, v, key_mask, exactly)
    inputs = *mapped, per_query_head(q, v), far_mask(key_mask, exactly.chosen)
    ways: dict[str, Any] = {"window": exactly.window, "causal": exactly.causal, "more": more}
    share = None if exactly.causal else far.share
    parts = far_parts(*inputs, partial(features_op, far=far if share is None else far._replace(share=None)), **ways)
    if share is not None and parts:
        # The mean is of all far keys, before the window and after it.
        out, mean = joined(parts), joined(far_parts(*inputs, _mean, **ways))
        log = torch.stack([part.log for part in parts]).logsumexp(0)
        parts = [Part(out + share.to(out.dtype)[:, None, None] * (mean - out), log)]
    logs, bound = far.factors(), lowest(far.logs.dtype)
    parts = [Part(part.out, torch.where(part.log > bound / 2, part.log + logs, bound)) for part in parts]
    return Part(near.out, near.log), parts


def _mean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Part:
    """The mean of the values that each query may see, with the logarithm of their number."""
    sums, _ = value_sums(v.to(torch.promote_types(v.dtype, torch.float32)), mask, q.shape[2], causal)
    sums = sums.expand(-1, -1, q.shape[2], -1)
    return Part(sums[..., :-1] / sums[..., -1:].clamp(min=1), logs_of(sums[..., -1]))


def performer_and_exact_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: State | None = None,
    *,
    mapped: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    sinks: int,
    window: int,
    scale: float,
    far: PerformerFar,
) -> tuple[Tensor, State]:
    """The op of this name in `api.py`, which explains the arguments and checks them."""
    known = None if state is None else {name: state[name] for name in ("top", "sums", UNIFORM) if name in state}
    ring = extended(_ring_of(state), k, v, key_mask)
    k, v, key_mask = content(ring)
    exactly = Exactly(True, window, first_keys(k, key_mask, sinks), scale)
    queries, keys = mapped(q, k)
    features_op = partial(plain_features, state=known)
    out = attend_performer(
        q, k, v, key_mask, (queries, keys), exactly, far, near_keys, features_op, more=known is not None
    )
    left = reach(window, True)[0]
    beyond = max(k.shape[2] - left, 0) if window else k.shape[2]
    mask = far_mask(key_mask, exactly.chosen)
    # After a masked key, so that there is one.
    mask = F.pad(torch.ones_like(k[:, 0, :beyond, 0], dtype=torch.bool) if mask is None else mask[:, :beyond], (1, 0))
    gone = F.pad(keys[:, :, :beyond], (0, 0, 1, 0))
    values = F.pad(per_query_head(q, v[:, :, :beyond]), (0, 0, 1, 0))
    _, _, later = _by_features(queries[:, :, :1], gone, values, mask, True, far, known)
    if far.share is not None:
        uniform = None if known is None else known.get(UNIFORM)
        one = values.new_zeros(*q.shape[:2], 1, v.shape[3])
        later[UNIFORM] = mixed(one, values, mask, far.share, causal=True, earlier=uniform)[1]
    return out, {**later, **exact_keys(ring, exactly.chosen, sinks, left)}
