"""What a mechanism did with an input: clusters, buckets, spans, steps of a pattern, and its estimates."""

from typing import Any

import torch
from torch import Tensor

from approx.looking.weights import Weights
from approx.mechanisms.adaptive_span import AdaptiveSpanAttention
from approx.mechanisms.clustered import ClusteredAttention
from approx.mechanisms.lsh import LshAttention
from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx.mechanisms.performer import PerformerAttention
from approx.publishing.attention import Estimated, FarShare, Groups, Part, Spans, Steps
from approx.seam.observe import Call
from approx_kernels.ops.clustered.api import default_clusters
from approx_kernels.ops.clustering.api import cluster_queries, nearest_centroids
from approx_kernels.ops.lsh.reference import bucket_stretches, cluster_stretches, is_exact


def member(call: Call, head: int) -> tuple[Call, int]:
    """The part of a call that computes a head, with its mechanism, and the number of the head in it."""
    if not isinstance(call.mechanism, HeadGroups):
        return call, head
    for part, (heads, _) in zip(call.members(), call.mechanism.members(), strict=True):
        numbers = list(range(call.mechanism.heads))[heads] if isinstance(heads, slice) else heads
        if head in numbers:
            return part, numbers.index(head)
    raise AssertionError("every head is in a group")


def inside(call: Call, head: int, found: Weights) -> list[Part]:
    """What the mechanism of a head did, in the order to show it.

    Args:
        call: The call of its layer.
        head: Number of the head.
        found: The weights of the layer, with the estimates of this head.
    """
    part, own = member(call, head)
    mechanism = part.mechanism
    if mechanism is None or part.exact:
        return []
    parts: list[Part] = []
    if isinstance(mechanism, ClusteredAttention) and (clusters := _clusters(mechanism, part.q)) is not None:
        parts.append(Groups("cluster", [clusters[own].tolist()], None))
    if isinstance(mechanism, LshAttention) and (buckets := _buckets(mechanism, part, own)) is not None:
        parts.append(buckets)
    if isinstance(mechanism, AdaptiveSpanAttention):
        parts.append(Spans(mechanism.spans.tolist(), own, mechanism.ramp))
    length = part.k.shape[2]
    if not mechanism.reads_tokens and part.q.shape[2] == length and (steps := mechanism.pattern(length)) is not None:
        parts.append(Steps(steps.cpu().numpy(), part.causal, _step(mechanism, own)))
    if not found.far[:, head].isnan().any():
        exact, approximate = found.far[:, head].tolist()
        kept: dict[str, Any] = {name: getattr(mechanism, name) for name in ("window", "sinks")}
        parts.append(FarShare(exact, approximate, kept["window"], kept["sinks"]))
    if head in found.estimates:
        features = mechanism.features if isinstance(mechanism, PerformerAttention) else None
        parts.append(Estimated(found.estimates[head], features))
    return parts


def estimates(mechanism: Mechanism | None) -> bool:
    """Whether any head of a mechanism estimates weights instead of skipping keys."""
    if isinstance(mechanism, HeadGroups):
        return any(estimates(each) for _, each in mechanism.members())
    return mechanism is not None and not mechanism.sparse and not mechanism.always_exact


def _clusters(mechanism: ClusteredAttention, q: Tensor) -> Tensor | None:
    """The cluster of each query, [H, L]; None if each query is its own. `q` is [1, H, L, D]."""
    if mechanism.needs_calibration:
        return nearest_centroids(q[0], mechanism.selectors)
    queries, clusters = q.shape[2], mechanism.clusters
    count = clusters if isinstance(clusters, int) else default_clusters(queries, clusters)
    if queries <= count:
        return None
    how: dict[str, Any] = {"clusters": count, "iterations": mechanism.iterations}
    return cluster_queries(q[0].contiguous(), mechanism.planes, mechanism.draws, **how)


def _buckets(mechanism: LshAttention, call: Call, head: int) -> Groups | None:
    """The bucket of each query and key in each round of hashing; of causal forms, which stretch of keys a query sees."""
    q = call.q[:, head : head + 1]
    own = head // (call.q.shape[1] // call.k.shape[1])
    k = q if mechanism.variant == "shared" else call.k[:, own : own + 1]
    form: dict[str, Any] = {"variant": mechanism.variant, "cluster": mechanism.cluster}
    if is_exact(q.shape[2], k.shape[2], causal=mechanism.causal, **form):
        return None
    form["projections"] = mechanism.projections
    if mechanism.causal:
        # The buckets of a query double with its position, so only the stretch that it sees has a number for all.
        rounds = bucket_stretches(q, k, None, **form).rounds
        return Groups("bucket", [_numbered(low[0, 0]) for _, low, _ in rounds], None)
    clusters = cluster_stretches(q, k, None, buckets=mechanism.buckets, **form).rounds
    queries, keys = [], []
    for order, low, _, _ in clusters:
        starts = low[0, 0].unique()
        queries.append(torch.bucketize(low[0, 0], starts).tolist())
        rank = torch.empty_like(order[0, 0]).scatter(0, order[0, 0], torch.arange(k.shape[2], device=k.device))
        keys.append((torch.bucketize(rank, starts, right=True) - 1).tolist())
    return Groups("bucket", queries, None if mechanism.variant == "shared" else keys)


def _numbered(low: Tensor) -> list[int]:
    return low.unique(return_inverse=True)[1].tolist()


def _step(mechanism: Mechanism, head: int) -> int | None:
    """The step of a pattern that a head takes, from 1; None if it takes all of them merged."""
    settings = mechanism.settings
    if settings.get("step") is not None:
        return settings["step"]
    if settings.get("mode") == "interleave":
        return 1
    steps = mechanism.pattern(2)
    return head % len(steps) + 1 if settings.get("mode") == "heads" and steps is not None else None
