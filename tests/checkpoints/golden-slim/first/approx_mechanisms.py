# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The attention mechanisms, each in a file of its own.

Letters of the shapes, here and in `approx_kernels`: B batch, H heads, L queries, S keys, D head size,
E value size, C clusters, K kept keys, M random features, G any number of heads, n sequence length where L = S."""

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .approx_clustered import MOST_DEFAULT_CLUSTERS, causal_clustered_attention, clustered_attention
from .approx_clustering import draw_centroids, draw_planes
from .approx_errors import ApproxError, Exit
from .approx_exact import exact_attention
from .approx_tokens import as_index, heads_of

# What every attention mechanism is, and how its settings are checked.


class Mechanism(nn.Module):
    """The thing between the projections of an attention layer.

    A subclass names its settings as keyword arguments of its constructor (there is no second list), keeps
    each under its own name as an attribute, and holds all state as parameters or persistent buffers. The
    letters of the shapes are explained in the package.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position; with fewer queries than keys,
            query i stands at position S - L + i, which is decoding on top of an ordinary cache.
        scale: Factor of the scores, as the model passes it.

    Raises:
        ApproxError: if the mechanism lacks the form asked for, or a setting is wrong.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    # What the causal form keeps while tokens are decoded one by one: a `cache` of all keys and values, which grows and is
    # read by `forward`; a `ring` of the ones in reach; or a `recurrent` state. The latter two are bounded and read by `decode`.
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "cache"
    # Whether it is exact attention with any settings and on any input.
    always_exact: ClassVar[bool] = False
    # Values of settings that converted folders of earlier versions do not state, which then had no others.
    earlier: ClassVar[dict[str, Any]] = {}
    source: ClassVar[str]
    exact_when: ClassVar[str]

    # The number of keys below which exact attention takes the place of this; a plan sets it.
    exact_below: int = 0
    # Whether training computes this again in the backward pass instead of keeping what it needs; a plan sets it.
    checkpoint: bool = False

    def __init__(self, heads: int, head_dim: int, *, causal: bool, scale: float) -> None:
        super().__init__()
        self.heads = whole_number("heads", heads, 1)
        self.head_dim = whole_number("head_dim", head_dim, 1)
        self.causal = true_or_false("causal", causal)
        self.scale = positive_number("scale", scale)
        form = "causal" if causal else "bidirectional"
        if not (self.supports_causal if causal else self.supports_bidirectional):
            raise ApproxError(
                f"{type(self).__name__} has no {form} form yet, and this layer needs one. "
                f"Choose a mechanism that `approx mechanisms` lists as {form}.",
                Exit.UNSUPPORTED,
            )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The names of the settings with their defaults, read from the constructor."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward` with its hooks; where a plan says so, training keeps its inputs alone and runs it again."""
        if self.checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings this mechanism was made with; the constructor takes them back."""
        return {name: getattr(self, name) for name in self.defaults()}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries, [B, H, L, D], float.
            k: Keys, [B, G, S, D], where H is a multiple of G: query head h reads key head h // (H / G).
            v: Values, [B, G, S, E].
            key_mask: [B, S] bool, True at real keys; None when all are real. Where L <= S, query i is the token of key S - L + i and
                as real. Outputs of padding have no meaning. It may hold NaN, but not for `exact`, `flash`, `sdpa` and on GPUs.
            dropout: Probability with which an attention weight is dropped; 0 outside of training.

        Returns:
            [B, H, L, E] in the dtype of q; 0 for a query without any allowed key.

        Raises:
            ValueError: if the shapes or dtypes do not fit together.
        """
        raise NotImplementedError

    @property
    def needs_calibration(self) -> bool:
        """Whether the state must be fitted to inputs, by `calibrate`, before it means anything."""
        return False

    def penalty(self) -> Tensor | None:
        """What training adds to its loss, times a weight that the trainer chooses, as a scalar; None for nothing."""
        return None

    def after_step(self, step: int) -> None:
        """What training calls once a step is done, counted from 1, for state that changes between steps."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `forward` and `weights` need the token ids of the keys, [B, S], as the keyword `tokens`."""
        return False

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, **tokens: Tensor) -> Tensor:
        """Dense attention weights, [B, H, L, S], for plots: what the mechanism does to identity values."""
        batch, heads, keys, _ = k.shape
        identity = torch.eye(keys, dtype=k.dtype, device=k.device)
        return self(q, k, identity.expand(batch, heads, keys, keys), key_mask, **tokens)

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value, if it is an int (and not a bool) of at least `low` and at most `high`."""
    inside = type(value) is int and low <= value and (high is None or value <= high)
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return checked(name, value, inside, f"a whole number {limits}")


def positive_number(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number above 0."""
    inside = type(value) in (int, float) and math.isfinite(value) and value > 0
    return float(checked(name, value, inside, "a finite number above 0"))


def seed_number(value: Any) -> int:
    """The value, if a `torch.Generator` takes it as a seed."""
    return whole_number("seed", value, 0, 2**63 - 1)


def true_or_false(name: str, value: Any) -> bool:
    """The value, if it is a bool."""
    return checked(name, value, type(value) is bool, "true or false")


def checked(name: str, value: Any, inside: bool, allowed: str) -> Any:
    """The value, if it is `inside` of what is `allowed`, in words."""
    if not inside:
        raise ApproxError(f"Setting '{name}' is {value!r}; allowed is {allowed}. Change it or leave it out.")
    return value


class ClusteredAttention(Mechanism):
    """Attend with the mean query of each of C clusters, in O(n C D).

    Queries are hashed to sign bits and grouped by k-means in Hamming space; a cluster's members all receive
    what its mean query attends to. Cheap, and blind to differences inside a cluster: never the first choice
    for question answering. A sample with at most C tokens is exact.

    Frozen, the groups are those nearest to centroids that were fitted once, to a calibration batch, for each
    head: there is no k-means, and it is faster. The causal form is frozen always, for clusters of the queries at
    hand would know the future: exact attention inside chunks of real tokens, and what the nearest centroid
    attends to before them, in O(n (chunk + C) D). It is exact for samples of at most one chunk.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in fixed hash planes, in the draws and ties of the clustering, and in all of the frozen and
    causal forms.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        clusters: Groups of queries, C; more is closer to exact. None takes 25 for samples of up to 512 real
            tokens and 100 beyond, and 100 where frozen.
        bits: Sign bits of a hash, 1 to 63; none are taken where frozen.
        iterations: Assignments of the k-means, at most; it ends when nothing moves. Centroids that are fitted once take 10 at
            least.
        hash_bias: Whether the hash planes miss the origin; Hamming distance then follows the Euclidean distance
            rather than the angle.
        frozen: Whether the centroids are fitted once, by `calibrate`; until then they are random.
        chunk: Real tokens of a chunk of the causal form; more is closer to exact. Between 64 and 512 the
            time on a CPU hardly differs: what longer chunks cost they save on rows carried from one to the next.
        seed: Seed of the hash planes and draws, or of the centroids before and while they are fitted; all are
            buffers and saved with the checkpoint.

    Raises:
        ApproxError: if a setting is wrong.
    """

    source: ClassVar[str] = "Vyas et al. 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825"
    exact_when: ClassVar[str] = "clusters, or chunk where causal, >= the number of real tokens of the sample."

    topk: int | None = None
    # Two of them are there: planes and draws for clusters of the queries at hand, the others for frozen ones.
    planes: Tensor
    draws: Tensor
    centroids: Tensor
    selectors: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        clusters: int | None = None,
        bits: int = 63,
        iterations: int = 3,
        hash_bias: bool = True,
        frozen: bool = False,
        chunk: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.clusters = None if clusters is None else whole_number("clusters", clusters, 1)
        self.bits = whole_number("bits", bits, 1, 63)
        self.iterations = whole_number("iterations", iterations, 1)
        self.hash_bias = true_or_false("hash_bias", hash_bias)
        self.frozen = true_or_false("frozen", frozen)
        self.chunk = whole_number("chunk", chunk, 1)
        self.seed = seed_number(seed)
        for name, drawn in self._draw().items():
            self.register_buffer(name, drawn)

    @property
    def needs_calibration(self) -> bool:
        """Whether the centroids are fitted once: where frozen, and where causal."""
        return self.frozen or self.causal

    def _draw(self) -> dict[str, Tensor]:
        most = self.clusters or MOST_DEFAULT_CLUSTERS
        if self.needs_calibration:
            drawn = draw_centroids(self.heads, self.head_dim, clusters=most, seed=self.seed)
            return dict(zip(("centroids", "selectors"), drawn, strict=True))
        drawn = draw_planes(self.head_dim, bits=self.bits, bias=self.hash_bias, clusters=most, seed=self.seed)
        return dict(zip(("planes", "draws"), drawn, strict=True))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on shared weights and on a query's own. Padded queries receive 0."""
        state = dict(self.named_buffers())
        shared = {"topk": self.topk, "scale": self.scale, "dropout": dropout}
        if self.causal:
            return causal_clustered_attention(q, k, v, key_mask, chunk=self.chunk, **state, **shared)
        state.pop("centroids", None)
        count = self.clusters or (MOST_DEFAULT_CLUSTERS if self.frozen else None)
        return clustered_attention(q, k, v, key_mask, clusters=count, iterations=self.iterations, **state, **shared)


class ImprovedClusteredAttention(ClusteredAttention):
    """Attend with the mean query of each of C clusters, then mend its K largest weights, in O(n (C + K) D).

    The K keys that the mean query weighs most are weighed anew by each member of the cluster, within the mass
    that the mean query gave to them; the other keys keep the shared weights. A sample with at most C tokens is
    exact.

    Frozen, the groups are those nearest to centroids that were fitted once, to a calibration batch, for each
    head: there is no k-means, and it is faster. The causal form is frozen always, for clusters of the queries at
    hand would know the future: exact attention inside chunks of real tokens, and before them the K keys that
    the nearest centroid weighs most, weighed by the query itself, and the centroid's weights on all others, in
    O(n (chunk + C + K) D). All share one normaliser, for which the mass of those others is taken to first order
    around the centroid. It is exact for samples of at most one chunk.

    On queries, keys and values of a trained encoder under a causal mask (MiniLM, n = 2048, chunk 64, K 32, error
    relative to exact attention, mean of six layers) 100 centroids fitted to other text come to 0.12, random ones
    to 0.36, groups of keys in place of queries to 0.26, and chunks alone to 0.73; centroids fitted to the
    sequence's own earlier queries, which a cache does not hold, were no better. Chunks of 256 come to 0.10. Of queries that turn with their position (rotary embeddings) only
    the slow turns survive in a centroid.

    Source: Vyas, Katharopoulos, Fleuret, 2020, Fast Transformers with Clustered Attention, arXiv 2007.04825;
    departs from it in fixed hash planes, in the draws and ties of the clustering, in differentiating the mass,
    and in all of the frozen and causal forms.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        clusters: Groups of queries, C; more is closer to exact. None takes 25 for samples of up to 512 real
            tokens and 100 beyond, and 100 where frozen.
        topk: Keys that each query weighs itself, K; more is closer to exact.
        bits: Sign bits of a hash, 1 to 63; none are taken where frozen.
        iterations: Assignments of the k-means, at most; it ends when nothing moves. Centroids that are fitted once take 10 at
            least.
        hash_bias: Whether the hash planes miss the origin; Hamming distance then follows the Euclidean distance
            rather than the angle.
        frozen: Whether the centroids are fitted once, by `calibrate`; until then they are random.
        chunk: Real tokens of a chunk of the causal form, at least `topk` + 1 of which are taken; more is closer
            to exact.
        seed: Seed of the hash planes and draws, or of the centroids before and while they are fitted; all are
            buffers and saved with the checkpoint.

    Raises:
        ApproxError: if a setting is wrong.
    """

    exact_when: ClassVar[str] = (
        "topk >= the number of real keys; or clusters, or chunk where causal, >= the number of real tokens."
    )

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        clusters: int | None = None,
        topk: int = 32,
        bits: int = 63,
        iterations: int = 5,
        hash_bias: bool = True,
        frozen: bool = False,
        chunk: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(
            heads,
            head_dim,
            causal=causal,
            scale=scale,
            clusters=clusters,
            bits=bits,
            iterations=iterations,
            hash_bias=hash_bias,
            frozen=frozen,
            chunk=chunk,
            seed=seed,
        )
        self.topk = whole_number("topk", topk, 1)


class HeadGroups(Mechanism):
    """Split the heads of a layer, let each group's mechanism attend, and join what comes out in the order of the heads.

    It is what a plan makes of rules that name heads, and no mechanism of its own that a rule could name. A group whose
    `exact_below` the input does not reach runs exact attention, decided for each call and each group by itself. What one
    mechanism alone is asked for, such as calibration or a penalty, the groups are asked for: they are modules too.

    Args:
        groups: Pairs of the numbers of some heads and the mechanism made for so many; each head of the layer is in
            exactly one of them.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], Mechanism]]) -> None:
        first = groups[0][1]
        order = [head for heads, _ in groups for head in heads]
        super().__init__(len(order), first.head_dim, causal=first.causal, scale=first.scale)
        self.groups = nn.ModuleList(mechanism for _, mechanism in groups)
        self._parts = [as_index(heads) for heads, _ in groups]
        # Where each head of the layer lies once the groups are joined.
        self._back = None if order == sorted(order) else [order.index(head) for head in range(len(order))]
        # Below all limits the whole layer is exact.
        self.exact_below = min(mechanism.exact_below for _, mechanism in groups)

    @property
    def decode_state(self) -> str:
        """Bounded if that of every group is; otherwise all groups read the cache that one of them needs."""
        states = {mechanism.decode_state for _, mechanism in self.members()}
        return next(state for state in ("cache", "ring", "recurrent") if state in states)

    @property
    def reads_tokens(self) -> bool:
        """Whether any group does."""
        return any(mechanism.reads_tokens for _, mechanism in self.members())

    def members(self) -> Iterator[tuple[slice | list[int], Mechanism]]:
        """The heads of each group, as an index, and its mechanism."""
        yield from zip(self._parts, self.groups, strict=True)  # type: ignore[misc]  # a ModuleList says of its modules no more than that they are some

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        **tokens: Tensor,
    ) -> Tensor:
        """Attend; what dropout acts on is each mechanism's own."""
        found = []
        for heads, mechanism in self.members():
            own = heads_of(q, k, heads)
            parts = q[:, heads], k[:, own], v[:, own]
            if k.shape[-2] < mechanism.exact_below:
                out = exact_attention(*parts, key_mask, causal=self.causal, scale=self.scale, dropout=dropout)
            else:
                more = tokens if mechanism.reads_tokens else {}
                out = mechanism(*parts, key_mask, dropout=dropout, **more)
            found.append(out)
        return self._joined(found)

    def extra_repr(self) -> str:
        """The heads of each group, in their order."""
        return f"heads={[list(range(self.heads))[p] if isinstance(p, slice) else p for p in self._parts]}"

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts, 1)
        return joined if self._back is None else joined[:, self._back]


def unusable_state(mechanism: Mechanism) -> str | None:
    """Why a mechanism cannot attend with the tensors it holds, naming the first such tensor; None where it can.

    Each is compared with what the same settings make: it needs the same shape and dtype, or another floating dtype; numbers
    that are finite; and integers, which are drawn to choose places, from 0 to the largest that are ever drawn.
    """
    made = type(mechanism)(
        mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **mechanism.settings
    ).state_dict()
    for name, held in mechanism.state_dict().items():
        if name not in made:
            return f"{name} is no tensor of a mechanism with these settings"
        if why := _difference(held, made[name]):
            return f"{name} {why}"
    return None


def _difference(held: Tensor, made: Tensor) -> str | None:
    if held.shape != made.shape:
        return f"has shape {list(held.shape)}; its settings make {list(made.shape)}"
    if held.dtype != made.dtype and not (held.is_floating_point() and made.is_floating_point()):
        return f"is {held.dtype}; its settings make {made.dtype}"
    if held.is_floating_point():
        return None if held.isfinite().all() else "holds NaN or infinity"
    if held.numel() and (held.min() < 0 or held.max() >= 2**31):
        return f"holds {int(held.min())} to {int(held.max())}; draws are from 0 to 2^31 - 1"
    return None


MECHANISMS: dict[str, type[Mechanism]] = {
    "improved-clustered": ImprovedClusteredAttention,
}
