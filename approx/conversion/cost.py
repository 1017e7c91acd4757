"""Predicted cost of a plan, counted in floating-point operations; `bench` measures what the machine makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from approx.conversion.anatomy import Anatomy, Site
from approx.conversion.plan import Rule
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism


@dataclass(frozen=True)
class Cost:
    """What one forward pass of one sequence costs, before and after a plan.

    Attributes:
        length: Positions of the sequence; layers of fixed length are counted at theirs.
        flops_outside: Floating-point operations outside self-attention.
        flops_exact: Operations of exact attention in all self-attention layers.
        flops_planned: The same under the plan.
        memory_exact: Bytes of the largest temporaries of an exact layer, in float32.
        memory_planned: The same under the plan.
    """

    length: int
    flops_outside: float
    flops_exact: float
    flops_planned: float
    memory_exact: int
    memory_planned: int

    @property
    def ceiling(self) -> float:
        """Best end-to-end speed-up that attention alone can give: attention at no cost at all."""
        return (self.flops_outside + self.flops_exact) / self.flops_outside

    @property
    def speedup(self) -> float:
        """Predicted end-to-end speed-up, if every operation took the same time."""
        return (self.flops_outside + self.flops_exact) / (self.flops_outside + self.flops_planned)


def predict(anatomy: Anatomy, assignment: Mapping[Site, Rule], lengths: Sequence[int]) -> list[Cost]:
    """Cost before and after, for each length.

    Args:
        anatomy: The model.
        assignment: What `Plan.resolve` gave.
        lengths: Positions of the sequences.
    """
    exact = {site: _build("sdpa", site, {}) for site in anatomy.sites}
    planned = {**exact, **{site: _build(rule.mechanism, site, rule.settings) for site, rule in assignment.items()}}

    def cost(length: int) -> Cost:
        before, after = [], []
        for site in anatomy.sites:
            seen = site.fixed_length or length
            below = site in assignment and seen < assignment[site].exact_below
            for costs, mechanism in ((before, exact[site]), (after, exact[site] if below else planned[site])):
                costs.append((mechanism.flops(seen), mechanism.memory(seen)))
        return Cost(
            length=length,
            flops_outside=anatomy.flops_outside(length),
            flops_exact=sum(flops for flops, _ in before),
            flops_planned=sum(flops for flops, _ in after),
            memory_exact=max(memory for _, memory in before),
            memory_planned=max(memory for _, memory in after),
        )

    return [cost(length) for length in lengths]


def _build(name: str, site: Site, settings: dict) -> Mechanism:
    mechanism = MECHANISMS[name]
    causal = site.causal and mechanism.supports_causal
    return mechanism(site.heads, site.head_dim, causal=causal, scale=site.scale, **settings)
