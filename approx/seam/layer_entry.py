"""Builds a mechanism from a converted layer's entry in config.json; copied into converted checkpoints."""

from collections.abc import Mapping
from typing import Any

from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.mechanisms.head_groups import HeadGroups
from approx.mechanisms.mechanism import Mechanism


def parts(site: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of heads of a layer, or the layer itself if it has none.

    Each has `mechanism` and `settings`, and may have `exact_below` and `recompute`; a group also has a list of `heads`.
    """
    return site.get("groups") or [site]


def build(site: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a layer.

    Args:
        site: heads, head_dim, causal and scale, and either the keys of one part or a list of `groups`.

    Raises:
        ApproxError: if a mechanism is unknown, its settings are invalid, or the groups do not name every head once.
    """
    if "groups" not in site:
        return _part(site, site["heads"], site)
    named = sorted(head for group in site["groups"] for head in group["heads"])
    if named != list(range(site["heads"])):
        raise ApproxError(
            f"The groups of a converted layer name the heads {named}, but must name each of 0-{site['heads'] - 1} once. "
            "Its config.json is damaged: convert the base checkpoint again."
        )
    return HeadGroups([(group["heads"], _part(group, len(group["heads"]), site)) for group in site["groups"]])


def _part(part: Mapping[str, Any], heads: int, site: Mapping[str, Any]) -> Mechanism:
    if part["mechanism"] not in MECHANISMS:
        raise ApproxError(f"Unknown mechanism '{part['mechanism']}'. Known: {', '.join(sorted(MECHANISMS))}.")
    kind = MECHANISMS[part["mechanism"]]
    settings = {**kind.earlier, **part["settings"]}
    mechanism = kind(heads, site["head_dim"], causal=site["causal"], scale=site["scale"], **settings)
    mechanism.exact_below = part.get("exact_below", 0)
    mechanism.recompute = part.get("recompute", False)
    return mechanism
