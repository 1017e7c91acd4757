"""The seed of a plan, for mechanisms that draw at random."""

from dataclasses import replace

from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from approx.planning.rule import Rule


def seeded(plan: Plan, seed: int) -> Plan:
    """The plan with this seed for every mechanism that takes one and has none in the plan.

    A plan without randomness is returned unchanged.
    """
    return Plan(
        tuple(replace(rule, settings={**rule.settings, "seed": seed}) if _open(rule) else rule for rule in plan.rules)
    )


def _open(rule: Rule) -> bool:
    kind = MECHANISMS.get(rule.mechanism)
    return kind is not None and "seed" in kind.defaults() and "seed" not in rule.settings
