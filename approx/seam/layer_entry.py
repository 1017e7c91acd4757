"""A converted layer as config.json describes it, and the mechanism that is made of that; it travels with checkpoints."""

from collections.abc import Mapping
from typing import Any

from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.mechanisms.head_groups import HeadGroups
from approx.mechanisms.mechanism import Mechanism


def parts(site: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a layer consists of: its groups of heads where they differ, itself where they do not.

    Each has `mechanism` and `settings`, and may have `exact_below` and `recompute`; a group has its `heads`, a list.
    """
    return site.get("groups") or [site]


def build(site: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a layer.

    Args:
        site: heads, head_dim, causal and scale, and either what one part has or a list of `groups`.

    Raises:
        ApproxError: if a mechanism is unknown, its settings are refused, or the groups are not all of the heads, once each.
    """
    if "groups" not in site:
        return _part(site, site["heads"], site)
    named = sorted(head for group in site["groups"] for head in group["heads"])
    if named != list(range(site["heads"])):
        raise ApproxError(
            f"The groups of a converted layer name the heads {named}; each of 0-{site['heads'] - 1} belongs to one of them. "
            "Its config.json is damaged: convert the base checkpoint again."
        )
    return HeadGroups([(group["heads"], _part(group, len(group["heads"]), site)) for group in site["groups"]])


def _part(part: Mapping[str, Any], heads: int, site: Mapping[str, Any]) -> Mechanism:
    if part["mechanism"] not in MECHANISMS:
        raise ApproxError(f"Mechanism '{part['mechanism']}' is not known here. Known: {', '.join(sorted(MECHANISMS))}.")
    kind = MECHANISMS[part["mechanism"]]
    settings = {**kind.earlier, **part["settings"]}
    mechanism = kind(heads, site["head_dim"], causal=site["causal"], scale=site["scale"], **settings)
    mechanism.exact_below = part.get("exact_below", 0)
    mechanism.recompute = part.get("recompute", False)
    return mechanism
