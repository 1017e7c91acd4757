"""A plan: ordered rules that assign mechanisms to layers and heads; the last matching rule wins."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from approx import yaml_text
from approx.errors import ApproxError, shown
from approx.planning.anatomy import Anatomy, Site
from approx.planning.resolve import resolve, unknown_names
from approx.planning.rule import KEYS, Rule, unwrapped
from approx.validation import told, validate
from approx.yaml_text import Document


@dataclass(frozen=True)
class Plan:
    """Ordered rules; for each head of each layer the last matching one wins, and unmatched heads stay exact."""

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
        """The plan of a single rule; `Rule` documents the arguments.

        Raises:
            ApproxError: listing every mistake in its form, or if the mechanism or a setting is unknown.
        """
        rule = {
            "mechanism": mechanism,
            "layers": layers,
            "heads": heads,
            "settings": settings,
            "exact_below": exact_below,
            "recompute": recompute,
        }
        plan = cls.parse(rule)
        if wrong := unknown_names(plan.rules[0], "the plan"):
            raise ApproxError("\n".join(wrong))
        return plan

    @classmethod
    def parse(cls, data: Any, source: str = "plan") -> "Plan":
        """Parse a plan from plain data: a rule, a list of rules, or `{rules: [...]}`.

        Raises:
            ApproxError: listing every mistake in the form of `data`, each with the nearest known name.
        """
        return cls._made(data, source, None)

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan from a YAML or JSON file.

        Raises:
            ApproxError: if the file is missing, is not YAML, or has mistakes, which are listed with their lines.
        """
        document = yaml_text.read(Path(path), "plan")
        return cls._made(document.data, str(path), document)

    @classmethod
    def _made(cls, data: Any, source: str, document: Document | None) -> "Plan":
        items = unwrapped(data)
        if not items or not isinstance(data, dict | list):
            raise ApproxError(
                f"{source}: a plan is a list of rules with the keys {', '.join(KEYS)}, not {shown(data)}. "
                "Example: [{layers: all, mechanism: improved-clustered}]"
            )
        if isinstance(data, dict) and len(data) == 1 and "rules" not in data:
            ((key, value),) = data.items()
            if isinstance(value, list) and key not in KEYS:
                raise ApproxError(
                    f"{source}: unknown key {shown(key)}. The rules of a plan are a list under the key 'rules'."
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
        """The rules as plain data, for `Plan.parse`."""
        return [rule.to_dict() for rule in self.rules]

    def to_yaml(self) -> str:
        """The plan as YAML text, for `Plan.read`."""
        return yaml.safe_dump({"rules": self.to_data()}, sort_keys=False)

    def to_json(self) -> str:
        """The plan as JSON text, for `Plan.read`."""
        return json.dumps({"rules": self.to_data()}, indent=2)

    def resolve(self, anatomy: Anatomy) -> dict[Site, tuple[Rule, ...]]:
        """Assign rules to sites, after checking every rule against the model.

        Returns:
            Site -> the rules of its groups of heads, ordered by lowest head, or a single rule if all heads are alike;
            settings are complete and resolved for the layer. In a layer with rules, heads without one form a group with
            `sdpa`; sites without rules are left out.

        Raises:
            ApproxError: listing all mistakes at once: unknown names and settings, layers and heads that do not exist, a
                mechanism without a causal form on a causal layer, settings out of range; or if no layer is selected.
        """
        return resolve(self.rules, anatomy)


def _place(data: Any, number: int) -> tuple[Any, ...]:
    """The location of a rule in a file."""
    if isinstance(data, list):
        return (number,)
    return ("rules", number) if set(data) == {"rules"} else ()
