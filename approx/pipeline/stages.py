"""The stages one by one, as the commands of the same names run them."""

from pathlib import Path
from typing import Any

from approx.conversion import anatomy, checkpoint, cost, families
from approx.conversion.plan import Plan, Rule
from approx.errors import ApproxError, Exit
from approx.pipeline.measure import (
    BASE,
    Progress,
    make_record,
    measure_quality,
    measure_speed,
    open_all,
    silent,
)
from approx.recipe import BenchStage, EvaluateStage


def inspect(name: str, *, revision: str | None = None, offline: bool = False) -> dict[str, Any]:
    """What a checkpoint is, from its config alone.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.

    Raises:
        ApproxError: if it is not there or not supported.
    """
    source = checkpoint.locate(name, revision=revision, offline=offline)
    facts = anatomy.anatomy(families.stock_config(source.config), source.stock_class)
    converted = source.raw.get("approx") or {}
    sites = converted.get("sites", {})
    return {
        "name": source.name,
        "family": facts.family,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "positions": facts.positions,
        "converted": source.converted,
        "recipe_chain": converted.get("recipe", []),
        "cross_attention": facts.cross_attention,
        "layers": [
            {
                "layer": site.layer,
                "path": site.path,
                "heads": site.heads,
                "key_heads": site.key_heads,
                "head_dim": site.head_dim,
                "causal": site.causal,
                "mechanism": sites.get(site.path, {}).get("mechanism"),
                "settings": sites.get(site.path, {}).get("settings", {}),
            }
            for site in facts.sites
        ],
    }


def plan(
    name: str, chosen: Plan, lengths: list[int], *, revision: str | None = None, offline: bool = False
) -> dict[str, Any]:
    """What a plan would do to a checkpoint, and what it would cost and gain by the count of operations.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        chosen: The plan.
        lengths: Positions to count at.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.

    Raises:
        ApproxError: with every mistake of the plan.
    """
    source = checkpoint.locate(name, revision=revision, offline=offline)
    if source.converted:
        raise ApproxError(f"{name} is converted already. Plan for its base checkpoint.", Exit.REFUSED)
    facts = anatomy.anatomy(source.config, source.stock_class)
    assignment = chosen.resolve(facts)
    costs = cost.predict(facts, assignment, lengths)
    rules = {site.layer: rule for site, rule in assignment.items()}
    return {
        "name": source.name,
        "plan": chosen.to_data(),
        "layers": [{"layer": site.layer, "path": site.path, **_rule(rules.get(site.layer))} for site in facts.sites],
        "costs": [{**vars(c), "ceiling": c.ceiling, "speedup": c.speedup} for c in costs],
        "warnings": _warnings(facts, costs),
    }


def evaluate(
    name: str,
    stage: EvaluateStage,
    *,
    against: str | None = None,
    outputs: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Score a checkpoint on a task, against another one on the same examples if given.

    Args:
        name: The checkpoint; a folder, a model id of the hub, or `quickstart`.
        stage: Task, data and how to judge.
        against: The base to compare with.
        outputs: Where the outputs of each example go, as parquet.
        seed: Of the bootstrap.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or a torch dtype's name.
        offline: Whether only local files and the hub's cache may be used.
        command: As typed, for the record.
        progress: Called with stage, done and total.

    Returns:
        A record.

    Raises:
        ApproxError: if checkpoint, task and data do not go together.
    """
    opened = open_all(_labelled(name, against), device, dtype, offline=offline)
    quality = measure_quality(opened, stage, seed=seed, outputs=outputs, progress=progress)
    return make_record(opened, title=f"{name} on {stage.task}", seed=seed, command=command, quality=[quality])


def bench(
    name: str,
    stage: BenchStage,
    *,
    against: str | None = None,
    texts: EvaluateStage | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time a checkpoint side by side with exact attention and with no attention at all.

    Args:
        name: The checkpoint; a folder, a model id of the hub, or `quickstart`.
        stage: Lengths, batches and how long to measure.
        against: The exact base, if `name` is converted.
        texts: Task whose texts are the inputs; random tokens without it.
        seed: Of the inputs and the bootstrap.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or a torch dtype's name.
        offline: Whether only local files and the hub's cache may be used.
        command: As typed, for the record.
        progress: Called with stage, done and total.

    Returns:
        A record.

    Raises:
        ApproxError: if the lengths do not fit the positions, or the base is not exact.
    """
    opened = open_all(_labelled(name, against), device, dtype, offline=offline)
    if opened[BASE].source.converted:
        raise ApproxError(
            f"{opened[BASE].source.name} is converted, and a speed is told against exact attention. "
            "Name its base checkpoint with --against."
        )
    speed = measure_speed(opened, stage, texts, seed=seed, progress=progress)
    return make_record(opened, title=f"Speed of {name}", seed=seed, command=command, **speed)


def _labelled(name: str, against: str | None) -> dict[str, str]:
    if against is None:
        return {BASE: name}
    label = Path(name).resolve().name
    return {BASE: against, label if label != BASE else "converted": name}


def _rule(rule: Rule | None) -> dict[str, Any]:
    if rule is None:
        return {"mechanism": None, "settings": {}, "exact_below": 0}
    return {"mechanism": rule.mechanism, "settings": rule.settings, "exact_below": rule.exact_below}


def _warnings(facts: anatomy.Anatomy, costs: list[cost.Cost]) -> list[str]:
    said = []
    for c in costs:
        if c.flops_planned >= c.flops_exact:
            said.append(f"At {c.length} tokens the plan needs more operations than exact attention: nothing to gain.")
        elif c.ceiling < 1.1:
            said.append(
                f"At {c.length} tokens attention is {1 - 1 / c.ceiling:.0%} of all operations: no mechanism can gain more than "
                f"{c.ceiling:.2f}×."
            )
        if facts.positions is not None and c.length > facts.positions:
            said.append(
                f"{c.length} tokens are more than the {facts.positions} positions: convert with --max-length {c.length}."
            )
    return said
