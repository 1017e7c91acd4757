"""A plan: ordered rules that say which layers and heads get which mechanism; the last rule that matches wins."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from approx import yaml_text
from approx.errors import ApproxError, shown
from approx.planning.anatomy import Anatomy, Site
from approx.planning.resolve import resolve
from approx.planning.rule import KEYS, Rule, parse_rule


@dataclass(frozen=True)
class Plan:
    """Ordered rules; for each head of each layer the last one that matches wins, and what none matches stays exact."""

    rules: tuple[Rule, ...]

    @classmethod
    def of(
        cls,
        mechanism: str,
        layers: str | int = "all",
        *,
        heads: str | int = "all",
        exact_below: int = 0,
        checkpoint: bool = False,
        **settings: Any,
    ) -> "Plan":
        """The plan of a single rule; what its parts mean says `Rule`.

        Raises:
            ApproxError: with every mistake of form.
        """
        rule = {
            "mechanism": mechanism,
            "layers": layers,
            "heads": heads,
            "settings": settings,
            "exact_below": exact_below,
            "checkpoint": checkpoint,
        }
        return cls.parse(rule)

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> "Plan":
        """Make a plan of plain data: a rule, a list of rules, or `{rules: [...]}`.

        Raises:
            ApproxError: with every mistake of form in `data`, each with the nearest known name.
        """
        if isinstance(data, dict) and set(data) == {"rules"}:
            data = data["rules"]
        items = [data] if isinstance(data, dict) else data
        if not isinstance(items, list) or not items:
            raise ApproxError(
                f"{source}: a plan is a list of rules with the keys {', '.join(KEYS)}, found {shown(data)}. "
                "Example: [{layers: all, mechanism: improved-clustered}]"
            )
        mistakes: list[str] = []
        rules = [parse_rule(item, f"{source}, rule {number}", mistakes) for number, item in enumerate(items, 1)]
        if mistakes:
            raise ApproxError("\n".join(mistakes))
        return cls(tuple(rule for rule in rules if rule is not None))

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan from a YAML or JSON file.

        Raises:
            ApproxError: if the file is missing, is not YAML, or holds mistakes.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ApproxError(f"Plan {path} cannot be read: {reason}. Give the path of a YAML or JSON file.") from None
        try:
            data, repeated = yaml_text.load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # Dates and numbers that are none are ValueErrors in YAML.
            raise ApproxError(f"Plan {path} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
        if repeated:
            raise ApproxError("\n".join(f"{path}: {mistake}" for mistake in repeated))
        return cls.parse(data, str(path))

    def to_data(self) -> list[dict[str, Any]]:
        """The rules as plain data; `Plan.parse` makes the same plan of it."""
        return [rule.to_dict() for rule in self.rules]

    def to_yaml(self) -> str:
        """The plan as YAML text that `Plan.read` understands."""
        return yaml.safe_dump({"rules": self.to_data()}, sort_keys=False)

    def to_json(self) -> str:
        """The plan as JSON text that `Plan.read` understands."""
        return json.dumps({"rules": self.to_data()}, indent=2)

    def resolve(self, anatomy: Anatomy) -> dict[Site, tuple[Rule, ...]]:
        """Say which site gets what, after checking every rule against the model.

        Returns:
            Site -> the rules of its groups of heads, in the order of their lowest heads, a single rule where all heads are
            alike; their settings are complete and made concrete for the layer. Heads that no rule names in a layer that
            others name are a group with `sdpa`; sites that no rule names are left out.

        Raises:
            ApproxError: with all mistakes at once: unknown names and settings, layers and heads that do not exist, a
                mechanism without a causal form on a causal layer, settings out of range; or if nothing would be swapped.
        """
        return resolve(self.rules, anatomy)
