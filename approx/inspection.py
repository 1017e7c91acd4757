"""What a checkpoint is, and what a plan would do to it, from its config alone."""

from dataclasses import dataclass, field
from typing import Any

from approx.checkpoints import checkpoint, families
from approx.checkpoints.history import Conversion, Training, history
from approx.errors import ApproxError, Exit
from approx.evaluation.record import HARDLY
from approx.planning import anatomy, cost, positions
from approx.planning.plan import Plan, described, site_record


@dataclass(frozen=True)
class Layer:
    """A layer of a checkpoint, or a group of its heads if they differ.

    Attributes:
        heads: How many there are.
        fixed_positions: Positions of every input, where they are fixed.
        window: Tokens that a query sees where the layer has a sliding window of its own; on either side unless causal.
        kept: What keeps the layer from being converted; None where it can be.
        mechanism: None where attention is exact.
        group: The heads that have the mechanism: `all`, or numbers and ranges.
    """

    layer: int
    path: str
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    fixed_positions: int | None
    window: int | None
    kept: str | None
    mechanism: str | None
    settings: dict[str, Any]
    group: str


@dataclass(frozen=True)
class Inspected:
    """A checkpoint, as its config describes it.

    Attributes:
        positions: The longest input; None for no limit.
        fixed_positions: Positions of every input, where they are fixed.
        seconds_per_position: Seconds of sound that a position stands for.
        history: The steps applied to it, in order.
        cross_attention: Number of cross-attention modules.
        stays: A sentence for each kind of layers that cannot be converted.
    """

    name: str
    family: str
    architecture: str
    parameters: int
    positions: int | None
    fixed_positions: int | None
    seconds_per_position: float | None
    converted: bool
    history: list[Conversion | Training]
    cross_attention: int
    stays: list[str]
    layers: list[Layer]


@dataclass(frozen=True)
class PlannedLayer:
    """A layer under a plan, or a group of its heads if they differ; without a mechanism, attention stays exact."""

    path: str
    layer: int
    heads: str = "all"
    mechanism: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    exact_below: int = 0
    recompute: bool = False


@dataclass(frozen=True)
class Planned:
    """What a plan would do to a checkpoint, and what it would cost at each length; without a plan, what exact attention costs."""

    name: str
    plan: Plan | None
    layers: list[PlannedLayer]
    costs: list[cost.Cost]
    warnings: list[str]

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        costs = [{**vars(one), "ceiling": one.ceiling, "speedup": one.speedup} for one in self.costs]
        return {**vars(self), "plan": None if self.plan is None else self.plan.to_data(), "costs": costs}


def inspect(name: str, *, revision: str | None = None, offline: bool = False, merge_adapter: bool = False) -> Inspected:
    """Describe a checkpoint from its config alone.

    Args:
        name: A folder, a hub model id, or `quickstart`.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.

    Raises:
        ApproxError: if the checkpoint does not exist or is not supported.
    """
    source = checkpoint.locate(name, revision=revision, offline=offline, merge_adapter=merge_adapter)
    facts = anatomy.anatomy(families.stock_config(source.config), source.stock_class)
    record = source.raw.get("approx") or {}
    sites = record.get("sites", {})
    return Inspected(
        name=source.name,
        family=facts.family,
        architecture=facts.architecture,
        parameters=facts.parameters,
        positions=facts.positions,
        fixed_positions=facts.fixed_length,
        seconds_per_position=facts.seconds,
        converted=source.converted,
        history=history(record),
        cross_attention=facts.cross_attention,
        stays=facts.stays,
        layers=[
            Layer(
                layer=site.layer,
                path=site.path,
                heads=site.heads,
                key_heads=site.key_heads,
                head_dim=site.head_dim,
                causal=site.causal,
                fixed_positions=site.fixed_length,
                window=site.window,
                kept=site.kept,
                mechanism=part.mechanism if part else None,
                settings=part.settings if part else {},
                group=part.heads if part else "all",
            )
            for site in facts.sites
            for part in (described(sites[site.path]) if site.path in sites else [None])
        ],
    )


def plan(
    name: str,
    chosen: Plan | None,
    lengths: list[int],
    *,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
) -> Planned:
    """Show which layers a plan changes, and predict its cost and speed-up by counting operations.

    Args:
        name: A folder, a hub model id, or `quickstart`.
        chosen: The plan; None shows the cost of exact attention, and the ceiling.
        lengths: Sequence lengths to count at, in tokens.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.

    Raises:
        ApproxError: with every mistake of the plan.
    """
    source = checkpoint.locate(name, revision=revision, offline=offline, merge_adapter=merge_adapter)
    if source.converted:
        raise ApproxError(f"{name} is converted already. Plan for its base checkpoint.", Exit.REFUSED)
    facts = anatomy.anatomy(source.config, source.stock_class)
    assignment = {} if chosen is None else chosen.resolve(facts)
    # Of a model whose inputs all have one length, no other can be counted.
    counted = lengths if facts.fixed_length is None else [facts.fixed_length]
    costs = cost.predict(facts, assignment, counted)
    layers = [
        PlannedLayer(site.path, **vars(part)) if part else PlannedLayer(site.path, site.layer)
        for site in facts.sites
        for part in (described(site_record(site, assignment[site])) if site in assignment else [None])
    ]
    return Planned(source.name, chosen, layers, costs, facts.stays + _warnings(facts, costs, planned=bool(assignment)))


def _warnings(facts: anatomy.Anatomy, costs: list[cost.Cost], *, planned: bool) -> list[str]:
    warnings = []
    worse = [c.length for c in costs if planned and c.flops_planned >= c.flops_exact]
    if worse:
        warnings.append(
            f"At {_listed(worse)} tokens the plan needs at least as many operations as exact attention: no gain."
        )
    warnings += [
        f"At {c.length} tokens attention is {1 - 1 / c.ceiling:.0%} of all operations: no mechanism can gain more than "
        f"{c.ceiling:.2f}×."
        for c in costs
        if c.ceiling < HARDLY and c.length not in worse
    ]
    if facts.fixed_length is not None:
        warnings.append(f"Every input has {facts.fixed_length} positions, so other lengths are not counted.")
    long = [c.length for c in costs if facts.positions is not None and c.length > facts.positions]
    if long:
        extend = f": for {_listed(long)} tokens convert with --max-length {max(long)}"
        never = f", and cannot be extended: {_listed(long)} tokens are out of its reach"
        warnings.append(
            f"The model takes {facts.positions} positions{extend if positions.has_table(facts.family) else never}."
        )
    return warnings


def _listed(numbers: list[int]) -> str:
    return " and ".join(part for part in (", ".join(map(str, numbers[:-1])), str(numbers[-1])) if part)
