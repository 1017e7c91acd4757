"""Validation of task settings."""

from __future__ import annotations

import math
import re
from typing import Any

from approx.errors import ApproxError, shown

# A comma inside a name is followed by an underscore: SQuAD has an article "Fresno,_California".
_BETWEEN_NAMES = re.compile(r"\s*,(?!_)\s*")


def wrong_setting(setting: str, value: Any, allowed: str, task: str) -> ApproxError:
    """The error about a setting of a task that has another value than what is allowed."""
    message = (
        f"Setting '{setting}' of the task '{task}' is {shown(value)}; allowed is {allowed}. Change it or leave it out."
    )
    return ApproxError(message, allowed=allowed)


def whole_setting(task: str, setting: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the value of a setting if it is a whole number within its bounds.

    Raises:
        ApproxError: otherwise, naming the setting, the value and what is allowed.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and least <= value and (most is None or value <= most):
        return value
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    raise wrong_setting(setting, value, f"a whole number {allowed}", task)


def switch_setting(task: str, setting: str, value: Any) -> bool:
    """Check a setting that is true or false.

    Raises:
        ApproxError: if it is neither.
    """
    if isinstance(value, bool):
        return value
    raise wrong_setting(setting, value, "true or false", task)


def names_setting(task: str, setting: str, value: Any) -> tuple[str, ...]:
    """Return the names in a setting: a list, or a text with commas between them.

    Raises:
        ApproxError: if it is neither or empty, naming the setting, the value and what is allowed.
    """
    listed = _BETWEEN_NAMES.split(value.strip()) if isinstance(value, str) else value
    if isinstance(listed, list | tuple) and listed and all(isinstance(name, str | int) for name in listed):
        names = tuple(map(str, listed))
        if all(names):
            return names
    raise wrong_setting(setting, value, f"a list of names, e.g. {setting}=one,two", task)


def number_setting(task: str, setting: str, value: Any, above: float, below: float) -> float:
    """Return the value of a setting if it is a number strictly between two bounds.

    Raises:
        ApproxError: otherwise, naming the setting, the value and what is allowed.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and above < value < below:
        return float(value)
    bounds = "finite number" if math.isinf(below) else f"number above {above:g} and below {below:g}"
    raise wrong_setting(setting, value, f"a {bounds}", task)


def window_within(task: str, window: int | None, limit: int | None, default: int) -> int:
    """Return the tokens of a window: the setting, or by default the smaller of default and limit.

    Raises:
        ApproxError: if the setting exceeds the limit.
    """
    if window is None:
        return default if limit is None else min(default, limit)
    if limit is not None and window > limit:
        raise ApproxError(
            f"The setting 'window' of the task '{task}' is {window}, but the limit is {limit} tokens: the positions of "
            f"the models, or --max-length. Set a smaller window, or convert with --max-length {window} to extend the "
            "positions."
        )
    return window
