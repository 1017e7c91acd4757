"""What a checkpoint is, and what a plan would do to it, from its config alone."""

from typing import Any

from approx.checkpoints import checkpoint, families
from approx.checkpoints.history import history
from approx.errors import ApproxError, Exit
from approx.planning import anatomy, cost, positions
from approx.planning.plan import Plan, described, site_record

# A ceiling below this causes a warning.
_HARDLY = 1.1
# The entry of a layer that keeps exact attention.
_EXACT = {"heads": "all", "mechanism": None, "settings": {}, "exact_below": 0, "recompute": False}


def inspect(
    name: str, *, revision: str | None = None, offline: bool = False, merge_adapter: bool = False
) -> dict[str, Any]:
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
    converted = source.raw.get("approx") or {}
    sites = converted.get("sites", {})
    return {
        "name": source.name,
        "family": facts.family,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "positions": facts.positions,
        "fixed_positions": facts.fixed_length,
        "seconds_per_position": facts.seconds,
        "converted": source.converted,
        "history": [step.model_dump() for step in history(converted)],
        "cross_attention": facts.cross_attention,
        "layers": [
            {
                "layer": site.layer,
                "path": site.path,
                "heads": site.heads,
                "key_heads": site.key_heads,
                "head_dim": site.head_dim,
                "causal": site.causal,
                "fixed_positions": site.fixed_length,
                **{key: part[key] for key in ("mechanism", "settings")},
                "group": part["heads"],
            }
            for site in facts.sites
            for part in (described(sites[site.path]) if site.path in sites else [_EXACT])
        ],
    }


def plan(
    name: str,
    chosen: Plan,
    lengths: list[int],
    *,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
) -> dict[str, Any]:
    """Show which layers a plan changes, and predict its cost and speed-up by counting operations.

    Args:
        name: A folder, a hub model id, or `quickstart`.
        chosen: The plan.
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
    assignment = chosen.resolve(facts)
    # Of a model whose inputs all have one length, no other can be counted.
    counted = lengths if facts.fixed_length is None else [facts.fixed_length]
    costs = cost.predict(facts, assignment, counted)
    return {
        "name": source.name,
        "plan": chosen.to_data(),
        "layers": [
            {"layer": site.layer, "path": site.path, **{key: part[key] for key in _EXACT}}
            for site in facts.sites
            for part in (described(site_record(site, assignment[site])) if site in assignment else [_EXACT])
        ],
        "costs": [
            {
                **vars(c),
                "seconds": facts.seconds and facts.seconds * c.length,
                "ceiling": c.ceiling,
                "speedup": c.speedup,
            }
            for c in costs
        ],
        "warnings": _warnings(facts, costs),
    }


def _warnings(facts: anatomy.Anatomy, costs: list[cost.Cost]) -> list[str]:
    warnings = []
    worse = [c.length for c in costs if c.flops_planned >= c.flops_exact]
    if worse:
        warnings.append(
            f"At {_listed(worse)} tokens the plan needs at least as many operations as exact attention: no gain."
        )
    warnings += [
        f"At {c.length} tokens attention is {1 - 1 / c.ceiling:.0%} of all operations: no mechanism can gain more than "
        f"{c.ceiling:.2f}×."
        for c in costs
        if c.ceiling < _HARDLY and c.length not in worse
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
