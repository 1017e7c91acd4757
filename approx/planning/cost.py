"""Predicted cost of a plan in floating-point operations and memory; `bench` measures the real speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx.planning.anatomy import Anatomy, Site
from approx.planning.plan import parse_heads
from approx.planning.rule import Rule
from approx.seam.windows import WINDOW_FROM
from approx_kernels.ops.near_keys.reference import reach


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of one sequence, before and after a plan.

    Attributes:
        length: Positions of the sequence; layers of fixed length count at their own.
        flops_outside: Floating-point operations outside the self-attention that can be converted.
        flops_exact: Operations of exact attention in all self-attention layers that can be converted.
        flops_planned: The same under the plan.
        memory_exact: Peak memory of the whole pass in bytes, on top of weights and inputs, with exact attention, in
            float32: what `bench` measures.
        memory_planned: The same under the plan.
        seconds: Seconds of sound in the sequence; None for text and images.
    """

    length: int
    flops_outside: float
    flops_exact: float
    flops_planned: float
    memory_exact: int
    memory_planned: int
    seconds: float | None = None

    @property
    def ceiling(self) -> float:
        """Upper bound on the end-to-end speed-up: attention at no cost."""
        return (self.flops_outside + self.flops_exact) / self.flops_outside

    @property
    def speedup(self) -> float:
        """Predicted end-to-end speed-up if every operation took the same time."""
        return (self.flops_outside + self.flops_exact) / (self.flops_outside + self.flops_planned)


def predict(anatomy: Anatomy, assignment: Mapping[Site, Sequence[Rule]], lengths: Sequence[int]) -> list[Cost]:
    """Cost before and after, for each length.

    Args:
        anatomy: The model.
        assignment: The result of `Plan.resolve`.
        lengths: Positions of the sequences.
    """
    exact = {site: _build(Rule("sdpa"), site, site.heads) for site in anatomy.sites}
    windows = {site: _build(_own_window(site), site, site.heads) for site in anatomy.sites if site.window is not None}
    planned = {site: [_Part.of(rule, site) for rule in rules] for site, rules in assignment.items()}

    def cost(length: int) -> Cost:
        before, after, kept = [], [], 0
        for site in anatomy.sites:
            seen = site.fixed_length or length
            whole = windows[site] if site in windows and seen >= WINDOW_FROM else exact[site]
            swapped = _running(planned[site], seen) if site in planned else whole
            for costs, mechanism in ((before, whole), (after, swapped)):
                costs.append((mechanism.flops(seen), mechanism.memory(seen)))
            kept += whole.flops(seen) if site.kept else 0
        return Cost(
            length=length,
            flops_outside=anatomy.flops_outside(length) + kept,
            flops_exact=sum(flops for flops, _ in before) - kept,
            flops_planned=sum(flops for flops, _ in after) - kept,
            memory_exact=anatomy.footprint.peak(length, [memory for _, memory in before]),
            memory_planned=anatomy.footprint.peak(length, [memory for _, memory in after]),
            seconds=anatomy.seconds and anatomy.seconds * length,
        )

    return [cost(length) for length in lengths]


@dataclass(frozen=True)
class _Part:
    """Heads that share a mechanism, and the attention they run below and from `exact_below` tokens."""

    heads: list[int]
    exact_below: int
    exact: Mechanism
    planned: Mechanism

    @classmethod
    def of(cls, rule: Rule, site: Site) -> "_Part":
        heads = parse_heads(rule.heads, site.heads, "it has")
        return cls(heads, rule.exact_below, _build(Rule("sdpa"), site, len(heads)), _build(rule, site, len(heads)))


def _running(parts: list[_Part], length: int) -> Mechanism:
    chosen = [(part.heads, part.exact if length < part.exact_below else part.planned) for part in parts]
    return chosen[0][1] if len(chosen) == 1 else HeadGroups(chosen)


def _own_window(site: Site) -> Rule:
    left, right = reach(site.window or 0, site.causal)
    return Rule("local", settings={"left": left, "right": right})


def _build(rule: Rule, site: Site, heads: int) -> Mechanism:
    return MECHANISMS[rule.mechanism](heads, site.head_dim, causal=site.causal, scale=site.scale, **rule.settings)
