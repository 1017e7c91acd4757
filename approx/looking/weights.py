"""The attention weights of a layer, exact and approximate, in blocks of tokens, and what is lost between them.

Outputs are linear in the values, so the output for a value that is 1 at one key and 0 at all others is the weight of that key, and
for one that is 1 at the keys of a block it is the weight of the block. Weights of any mechanism are had in this way, by its own
forward, without a matrix of all pairs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from approx.mechanisms.exact_part import ExactPart
from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx.publishing.attention import Estimates
from approx.seam.dispatch import dense_mask
from approx.seam.observe import Call
from approx_kernels.ops.near_keys.reference import reach

# Up to this many keys every pair is measured; of more, these keys: as many that get the most weight, and as many of the others.
MEASURED_WHOLE, SAMPLED = 1024, 256
# Columns of unit values in one call of a mechanism, and numbers of the exact weights that are held at a time: few enough for caches.
_COLUMNS, _NUMBERS = 512, 2**21
# Exact weights for which the estimates are compared, and the quantiles that are shown.
_BINS = torch.logspace(-6, 0, 25, dtype=torch.float64)
_QUANTILES = (0.1, 0.5, 0.9)
# Fewer pairs of a bin say nothing.
_FEWEST = 20


@dataclass(frozen=True)
class Weights:
    """The attention of one call.

    Attributes:
        exact: Exact weights, [H, n, m]: the mean over the queries of a block of what they give to a block of keys.
        approximate: The same of the mechanism; None where attention is exact.
        error: ‖o − o_exact‖ / ‖o_exact‖ of each head, [H].
        kept: Share of the exact weight that the mechanism gives to the same keys, Σ min(exact, approximate), [H].
        captured: Exact weight on the keys that the mechanism sees, [H]; NaN for heads that skip no keys.
        entropy: Mean entropy of the exact weights of a query in bits, [H]; NaN where a mechanism runs, which is chosen by its loss.
        far: Weight beyond a mechanism's window and chosen keys, [2, H, n], exact and approximate; NaN for heads without them.
        reproduced: Largest relative difference of the layer's outputs from these weights times the values; None if not every
            weight was made.
        measured: Keys whose pairs were measured.
        estimates: Head -> how its weights follow the exact ones, of the heads that were asked for.
    """

    exact: Tensor
    approximate: Tensor | None
    error: Tensor
    kept: Tensor
    captured: Tensor
    entropy: Tensor
    far: Tensor
    reproduced: float | None
    measured: int
    estimates: dict[int, Estimates]


def unit_outputs(call: Call, values: Tensor) -> Tensor:
    """The outputs of a call's mechanism for other values: weights, where these are unit vectors or sums of them.

    Args:
        call: A call with a mechanism.
        values: [S, E].

    Returns:
        [H, L, E].
    """
    assert call.mechanism is not None, "exact weights have a formula"
    tokens = {} if call.tokens is None else {"tokens": call.tokens}
    shape = call.k.shape[0], call.k.shape[1], *values.shape
    made = [
        call.mechanism(call.q, call.k, part.to(call.q.dtype).expand(*shape[:3], -1), call.mask, **tokens)
        for part in values.split(_COLUMNS, 1)
    ]
    return torch.cat(made, -1)[0]


def weights(call: Call, query_block: int, key_block: int, of_heads: tuple[int, ...] = ()) -> Weights:
    """The weights of a call with one sample, exact and approximate.

    Args:
        call: A call whose layer has attended.
        query_block: Queries in a block.
        key_block: Keys in a block.
        of_heads: Heads whose estimates are compared weight by weight.
    """
    softmax = _Softmax(call)
    keys = call.k.shape[2]
    blocks = membership(keys, key_block, call.q)
    exactly = call.mechanism is None or call.exact
    rows, out, entropy, mass = [], [], [], torch.zeros(keys, device=call.q.device)
    for part in softmax.rows(query_block):
        seen = part.shape[2]
        rows.append(mean_rows(part @ blocks[:seen], query_block))
        out.append(part @ softmax.v[:, :seen])
        if exactly:
            entropy.append(torch.special.entr(part).sum(-1) / math.log(2))
        mass[:seen] += part.sum((0, 1))
    exact, out = torch.cat(rows, 1), torch.cat(out, 1)
    output = call.output[0].float()
    nothing = torch.full((call.q.shape[1],), math.nan)
    far = torch.full((2, *exact.shape[:2]), math.nan)
    entropy = torch.cat(entropy, 1).mean(-1) if exactly else nothing
    if call.mechanism is None or call.exact:
        same = _apart(output, out)
        return Weights(
            exact, None, torch.zeros_like(nothing), torch.ones_like(nothing), nothing, entropy, far, same, keys, {}
        )
    chosen, factor = _chosen(mass)
    values = torch.zeros(keys, len(chosen), device=call.q.device)
    values[chosen, torch.arange(len(chosen), device=chosen.device)] = 1.0
    whole = len(chosen) == keys
    made = unit_outputs(call, values if whole else torch.cat([values, blocks], 1)).float()
    single, approximate = made[..., : len(chosen)], made[..., len(chosen) :]
    if whole:
        approximate = single @ blocks
    true = softmax.at(chosen)
    total = (true * factor).sum((1, 2)).clamp_min(1e-30)
    kept = (torch.minimum(true, single.clamp_min(0)) * factor).sum((1, 2)) / total
    captured, estimates = nothing, {}
    for heads, mechanism in _members(call.mechanism):
        if mechanism.sparse:
            captured[heads] = ((true[heads] * (single[heads] > 0)) * factor).sum((1, 2)) / total[heads]
        if isinstance(mechanism, ExactPart) and mechanism.has_exact_part:
            beyond = (~_near(call, mechanism)[:, chosen] * factor).float()
            for side, of in enumerate((true, single)):
                far[side, heads] = mean_rows((of[heads] * beyond).sum(-1, keepdim=True), query_block)[..., 0]
    for head in of_heads:
        estimates[head] = _estimates(true[head], single[head])
    return Weights(
        exact=exact,
        approximate=mean_rows(approximate, query_block),
        error=(output - out).flatten(1).norm(dim=1) / out.flatten(1).norm(dim=1).clamp_min(1e-20),
        kept=kept,
        captured=captured,
        entropy=entropy,
        far=far,
        reproduced=_apart(output, single @ softmax.v) if whole else None,
        measured=len(chosen),
        estimates=estimates,
    )


class _Softmax:
    """Exact attention of a call with one sample, a few queries at a time."""

    def __init__(self, call: Call) -> None:
        sharing = call.q.shape[1] // call.k.shape[1]
        self.q = call.q[0].float() * call.scale
        self.k, self.v = (x[0].float().repeat_interleave(sharing, 0) for x in (call.k, call.v))
        mask = dense_mask(call.mask, call.causal, call.q, call.k, always=True)
        self.mask = None if mask is None else mask[0]
        # Of causal attention, queries before the last see fewer keys than there are.
        self._later = call.k.shape[2] - call.q.shape[2] if call.causal else None
        self._sums: list[Tensor] = []

    def _scores(self, rows: slice, columns: slice | Tensor) -> Tensor:
        scores = self.q[:, rows] @ self.k[:, columns].mT
        if self.mask is None:
            return scores
        mask = self.mask[:, rows if self.mask.shape[1] > 1 else slice(None), :][..., columns]
        return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)

    def rows(self, block: int) -> Iterator[Tensor]:
        """Weights of some queries after the other, whole blocks of them, over the keys up to the last that they may see, [H, r, s]."""
        count = max(1, _NUMBERS // (self.q.shape[0] * self.k.shape[1] * block)) * block
        self._sums = []
        for start in range(0, self.q.shape[1], count):
            end = None if self._later is None else max(start + count + self._later, 1)
            scores = self._scores(slice(start, start + count), slice(end))
            # A query without any key gives 0.
            largest = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
            part = scores.sub_(largest).exp_()
            total = part.sum(-1, keepdim=True).clamp_min_(1e-30)
            self._sums.append(largest + total.log())
            yield part.div_(total)

    def at(self, keys: Tensor) -> Tensor:
        """Weights of all queries at some keys, [H, L, c], after `rows`."""
        return (self._scores(slice(None), keys) - torch.cat(self._sums, 1)).exp()


def _chosen(mass: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that are measured, and how many keys each stands for; `mass` is the weight that each gets, [S]."""
    keys = len(mass)
    if keys <= MEASURED_WHOLE:
        return torch.arange(keys, device=mass.device), torch.ones(keys, device=mass.device)
    heaviest = mass.topk(SAMPLED).indices
    others = torch.ones_like(mass, dtype=torch.bool)
    others[heaviest] = False
    rest = others.nonzero().squeeze(1)
    # At random distances, since patterns repeat at regular ones.
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = rest[torch.randperm(len(rest), generator=generator)[:SAMPLED].to(rest.device)]
    factor = torch.ones(2 * SAMPLED, device=mass.device)
    factor[SAMPLED:] = len(rest) / SAMPLED
    return torch.cat([heaviest, drawn]), factor


def membership(count: int, block: int, like: Tensor) -> Tensor:
    """Which block each of `count` positions is in, [count, blocks], as 1 and 0."""
    place = torch.arange(count, device=like.device)
    return torch.nn.functional.one_hot(place // block, -(-count // block)).float()


def mean_rows(x: Tensor, block: int) -> Tensor:
    """Means over blocks of rows, [H, L, m] -> [H, n, m]."""
    if block == 1:
        return x
    blocks = membership(x.shape[1], block, x)
    return (blocks / blocks.sum(0)).mT @ x


def _members(mechanism: Mechanism) -> Iterator[tuple[slice | list[int], Mechanism]]:
    """Heads and their mechanism."""
    if isinstance(mechanism, HeadGroups):
        yield from mechanism.members()
    else:
        yield slice(None), mechanism


def _near(call: Call, mechanism: ExactPart) -> Tensor:
    """Which keys are exact for which query, [L, S] bool."""
    exactly = mechanism.exactly(call.k, call.mask, call.tokens)
    queries, keys = call.q.shape[2], call.k.shape[2]
    places = torch.arange(keys, device=call.k.device)
    away = places - torch.arange(keys - queries, keys, device=call.k.device)[:, None]
    near = torch.zeros_like(away, dtype=torch.bool)
    if exactly.window:
        before, after = reach(exactly.window, exactly.causal)
        near = (away >= -before) & (away <= after)
    return near if exactly.chosen is None else near | exactly.chosen[0]


def _estimates(exact: Tensor, approximate: Tensor) -> Estimates:
    """Quantiles of the approximate weight in bins of the exact one; both [L, S]."""
    exact, approximate = exact.flatten().double().cpu(), approximate.flatten().double().cpu()
    bins = torch.bucketize(exact, _BINS.to(exact))
    rows: list[tuple[float, ...]] = []
    levels = torch.tensor(_QUANTILES, dtype=torch.float64)
    for number in range(1, len(_BINS)):
        inside = approximate[bins == number].sort().values
        if len(inside) >= _FEWEST:
            places = (levels * (len(inside) - 1)).round().long()
            rows.append((math.sqrt(_BINS[number - 1] * _BINS[number]), *inside[places].tolist()))
    relative = float((approximate - exact).norm() / exact.norm().clamp_min(1e-30))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return Estimates(*columns, relative=relative)


def _apart(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-20))
