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
from approx.planning.rule import KEYS, Rule, unwrapped
from approx.validation import told, validate
from approx.yaml_text import Document


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
        recompute: bool = False,
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
            "recompute": recompute,
        }
        return cls.parse(rule)

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> "Plan":
        """Make a plan of plain data: a rule, a list of rules, or `{rules: [...]}`.

        Raises:
            ApproxError: with every mistake of form in `data`, each with the nearest known name.
        """
        return cls._made(data, source, None)

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan from a YAML or JSON file.

        Raises:
            ApproxError: if the file is missing, is not YAML, or holds mistakes; they are told with their lines.
        """
        document = yaml_text.read(Path(path), "plan")
        return cls._made(document.data, str(path), document)

    @classmethod
    def _made(cls, data: Any, source: str, document: Document | None) -> "Plan":
        items = unwrapped(data)
        if not items or not isinstance(data, dict | list):
            raise ApproxError(
                f"{source}: a plan is a list of rules with the keys {', '.join(KEYS)}, found {shown(data)}. "
                "Example: [{layers: all, mechanism: improved-clustered}]"
            )
        rules, mistakes = [], []
        for number, item in enumerate(items):
            rule, wrong = validate(Rule, item, f"rule {number + 1}", _place(data, number))
            rules.append(rule)
            mistakes += wrong
        if lines := told(mistakes, source, document):
            raise ApproxError("\n".join(lines))
        return cls(tuple(rules))

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


def _place(data: Any, number: int) -> tuple[Any, ...]:
    """Where a rule stands in a file."""
    if isinstance(data, list):
        return (number,)
    return ("rules", number) if set(data) == {"rules"} else ()
