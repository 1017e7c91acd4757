"""The id of the separator token, which mechanisms find tokens by: who leaves it out of a plan has it looked up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from approx.checkpoints import checkpoint
from approx.errors import ApproxError
from approx.mechanisms.longformer import BY_CONTENT
from approx.planning.plan import Plan


def with_separator(plan: Plan, find: Callable[[], int | None]) -> Plan:
    """The plan with the setting `separator` filled in where a rule needs it and leaves it out.

    Args:
        plan: The plan as it was given.
        find: Looks the id up; asked only if a rule needs it.

    Raises:
        ApproxError: if a rule needs it and `find` knows none.
    """
    lacking = [rule for rule in plan.rules if _lacks(rule.settings)]
    if not lacking:
        return plan
    separator = find()
    if separator is None:
        raise ApproxError(
            f"Global tokens chosen by '{lacking[0].settings['global_tokens']}' are found by a separator token, and neither a "
            "tokenizer nor the config of this model names one. Give its id as the setting 'separator'."
        )
    rules = (
        replace(rule, settings={**rule.settings, "separator": separator}) if _lacks(rule.settings) else rule
        for rule in plan.rules
    )
    return Plan(tuple(rules))


def of_checkpoint(source: checkpoint.Source) -> int | None:
    """The separator of a checkpoint's tokenizer or, without a tokenizer, of its config; None if it names none."""
    try:
        return named_by(checkpoint.processor(source))
    except ApproxError:
        return named_by(source.config)


def named_by(holder: Any) -> int | None:
    """The separator that a tokenizer or a config names: its separator or else its end token; None if it names none."""
    ids = (getattr(holder, name, None) for name in ("sep_token_id", "eos_token_id"))
    return next((number for number in ids if type(number) is int), None)


def _lacks(settings: dict[str, Any]) -> bool:
    return settings.get("global_tokens") in BY_CONTENT and settings.get("separator") is None
