"""One rule of a plan: which layers and heads get which mechanism, and what is wrong with one as it was written."""

from dataclasses import dataclass, field
from typing import Any

from approx.errors import did_you_mean, shown
from approx.mechanisms import MECHANISMS


@dataclass(frozen=True)
class Rule:
    """Give some layers, or some heads of them, a mechanism.

    Attributes:
        mechanism: A name of the registry, e.g. `improved-clustered`.
        layers: `all`, or numbers and ranges such as `0-5,8`; -1 is the last layer.
        settings: Settings of the mechanism; what is left out has its default.
        exact_below: Inputs shorter than this many tokens keep exact attention, decided anew for each call.
        heads: `all`, or numbers and ranges such as `0-3,8`; -1 is the last head.
        checkpoint: Whether training recomputes the mechanism in the backward pass instead of keeping what it computed.
    """

    mechanism: str
    layers: str = "all"
    settings: dict[str, Any] = field(default_factory=dict)
    exact_below: int = 0
    heads: str = "all"
    checkpoint: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The rule as plain data, without what is at its default; layers and mechanism are always said."""
        data = {key: getattr(self, key) for key in KEYS}
        plain = Rule(self.mechanism)
        return {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in data.items()
            if key in ("layers", "mechanism") or value != getattr(plain, key)
        }


# In the order in which a person writes them.
KEYS = ("layers", "heads", "mechanism", "settings", "exact_below", "checkpoint")


def parse_rule(item: Any, where: str, mistakes: list[str]) -> Rule | None:
    """Make a rule of plain data; what is wrong with its form is added to `mistakes`, a sentence each."""
    found = _form_mistakes(item, where)
    mistakes += found
    if found:
        return None
    return Rule(
        mechanism=item["mechanism"],
        layers=str(item.get("layers", "all")),
        settings=dict(item.get("settings") or {}),
        exact_below=item.get("exact_below", 0),
        heads=str(item.get("heads", "all")),
        checkpoint=item.get("checkpoint", False),
    )


def _form_mistakes(item: Any, where: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{where}: a rule is a mapping with the keys {', '.join(KEYS)}, found {shown(item)}."]
    mistakes = [
        f"{where}: unknown key '{key}'.{did_you_mean(str(key), KEYS)} Known: {', '.join(KEYS)}."
        for key in item
        if key not in KEYS
    ]
    if "mechanism" not in item:
        mistakes.append(f"{where}: the key 'mechanism' is missing. Known mechanisms: {', '.join(sorted(MECHANISMS))}.")
    elif not isinstance(item["mechanism"], str):
        mistakes.append(f"{where}: 'mechanism' must be a name, found {shown(item['mechanism'])}.")
    for key in ("layers", "heads"):
        if not isinstance(item.get(key, "all"), str | int) or isinstance(item.get(key), bool):
            mistakes.append(
                f"{where}: '{key}' must be 'all', a number or ranges such as '0-5,8', found {shown(item[key])}."
            )
    settings = item.get("settings")
    if settings is not None and (not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings)):
        mistakes.append(f"{where}: 'settings' must be a mapping of names to values, found {shown(settings)}.")
    below = item.get("exact_below", 0)
    if not isinstance(below, int) or isinstance(below, bool) or below < 0:
        mistakes.append(f"{where}: 'exact_below' must be a number of tokens, 0 or more, found {shown(below)}.")
    if not isinstance(item.get("checkpoint", False), bool):
        mistakes.append(f"{where}: 'checkpoint' must be true or false, found {shown(item['checkpoint'])}.")
    return mistakes
