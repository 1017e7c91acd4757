"""Every wrong setting of a mechanism; its constructor stops at the first."""

import re
from typing import Any

from approx.errors import ApproxError
from approx.mechanisms.mechanism import Mechanism

_SETTING = re.compile(r"Setting '(\w+)' is")


def refusals(
    name: str,
    kind: type[Mechanism],
    settings: dict[str, Any],
    heads: int,
    head_dim: int,
    *,
    causal: bool,
    scale: float,
) -> list[ApproxError]:
    """Check settings by calling the constructor with them.

    Args:
        name: Name of the mechanism, for messages.
        kind: Its class.
        settings: Its settings; those left out take their defaults.
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: The form to try.
        scale: Factor of the scores.

    Returns:
        One error per wrong setting; empty if the settings are valid.
    """
    errors, defaults = [], kind.defaults()
    while True:
        try:
            kind(heads, head_dim, causal=causal, scale=scale, **kind.for_layer(settings, 0))
        except ApproxError as error:
            errors.append(error)
        except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
            text = f"'{name}' cannot be made with these settings: {str(error).splitlines()[0]}"
            return [*errors, ApproxError(text)]
        else:
            return errors
        wrong = _SETTING.match(str(errors[-1]))
        if wrong is None or settings.get(wrong[1], defaults.get(wrong[1])) == defaults.get(wrong[1]):
            return errors
        # With this one at its default, the constructor reaches the next.
        settings = {**settings, wrong[1]: defaults[wrong[1]]}
