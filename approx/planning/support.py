"""The support matrix of the mechanisms, read from their classes."""

from typing import Any

from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import attends_causally


def support(family: str | None = None) -> list[dict[str, Any]]:
    """One row per mechanism.

    Args:
        family: Also report which of them fit this family (`bert`, `gpt2`, …).

    Raises:
        ApproxError: if the family is unknown or cannot be converted.
    """
    causal = None if family is None else attends_causally(family)
    return [
        {
            "name": name,
            "bidirectional": kind.supports_bidirectional,
            "causal": kind.supports_causal,
            "decode": kind.supports_decode,
            "decode_state": kind.decode_state if kind.supports_causal else None,
            "padding": kind.padding,
            "gradient": kind.gradient,
            "compiles": kind.compiles,
            "trainable": kind.trainable,
            "settings": kind.defaults(),
            "exact_when": kind.exact_when,
            "source": kind.source,
            **({} if causal is None else {"fits": kind.supports_causal if causal else kind.supports_bidirectional}),
        }
        for name, kind in MECHANISMS.items()
    ]
