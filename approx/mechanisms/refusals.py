"""All that is wrong with the settings of a mechanism, where its constructor stops at the first."""

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
    """Try the settings out; the constructor is the one judge of them.

    Args:
        name: What the mechanism is called, for messages.
        kind: Its class.
        settings: Settings that it has; what is left out has its default.
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: The form to try.
        scale: Factor of the scores.

    Returns:
        One error for each wrong setting, none if a layer can be made.
    """
    found, defaults = [], kind.defaults()
    while True:
        try:
            kind(heads, head_dim, causal=causal, scale=scale, **kind.for_layer(settings, 0))
        except ApproxError as error:
            found.append(error)
        except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
            text = f"'{name}' cannot be made with these settings: {str(error).splitlines()[0]}"
            return [*found, ApproxError(text)]
        else:
            return found
        wrong = _SETTING.match(str(found[-1]))
        if wrong is None or settings.get(wrong[1], defaults.get(wrong[1])) == defaults.get(wrong[1]):
            return found
        # With this one at its default, the constructor comes to the next.
        settings = {**settings, wrong[1]: defaults[wrong[1]]}
