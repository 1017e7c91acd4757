"""Look up the id of the separator token for mechanisms that need it, if the plan does not name it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from approx.checkpoints import checkpoint
from approx.errors import ApproxError
from approx.mechanisms.longformer import BY_CONTENT
from approx.planning.plan import Plan


def with_separator(plan: Plan, find: Callable[[], int | None]) -> Plan:
    """The plan with the setting `separator` filled in for rules that need it and leave it out.

    Args:
        plan: The original plan.
        find: Looks up the id; called only if a rule needs it.

    Raises:
        ApproxError: if a rule needs it and `find` returns None.
    """
    lacking = [rule for rule in plan.rules if _lacks(rule.settings)]
    if not lacking:
        return plan
    separator = find()
    if separator is None:
        raise ApproxError(
            f"global_tokens '{lacking[0].settings['global_tokens']}' needs a separator token, but neither the tokenizer nor "
            "the config of this model names one. Give its id as the setting 'separator'."
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
    """The separator token of a tokenizer or a config, or else its end token; None if it names neither."""
    ids = (getattr(holder, name, None) for name in ("sep_token_id", "eos_token_id"))
    return next((number for number in ids if type(number) is int), None)


def _lacks(settings: dict[str, Any]) -> bool:
    return settings.get("global_tokens") in BY_CONTENT and settings.get("separator") is None
