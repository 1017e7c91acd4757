"""The seed of a plan: what its mechanisms draw at random."""

from dataclasses import replace

from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from approx.planning.rule import Rule


def seeded(plan: Plan, seed: int) -> Plan:
    """The plan with this seed wherever a mechanism takes one and the plan names none.

    A plan that draws nothing at random comes back as it is, whatever the seed.
    """
    return Plan(
        tuple(replace(rule, settings={**rule.settings, "seed": seed}) if _open(rule) else rule for rule in plan.rules)
    )


def _open(rule: Rule) -> bool:
    kind = MECHANISMS.get(rule.mechanism)
    return kind is not None and "seed" in kind.defaults() and "seed" not in rule.settings
