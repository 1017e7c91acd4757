"""A grid: a YAML file with plans to compare over values of their settings and over seeds."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic.dataclasses import dataclass

from approx.errors import shown
from approx.planning.rule import KEYS, Rule, unwrapped
from approx.recipe import Recipe, Study
from approx.validation import Mistake, listed, validate

# The keys of a rule that a grid may vary; all other keys of a grid are settings.
_OF_THE_RULE = ("mechanism", "layers", "heads", "exact_below")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GridRule(Rule):
    """A rule with several values for some of its keys.

    Attributes:
        mechanism: Name of the mechanism, unless the grid lists mechanisms.
        grid: Setting (or one of the rule's `layers`, `heads`, `mechanism` and `exact_below`) -> the values to compare.
    """

    mechanism: str = ""
    grid: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] = field(
        default_factory=dict
    )


_GridRules = Annotated[
    list[GridRule],
    Field(min_length=1),
    BeforeValidator(unwrapped, json_schema_input_type=GridRule | list[GridRule]),
]


class Point(NamedTuple):
    """One plan of a grid.

    Attributes:
        variant: Name of its variant.
        plan: Its rules.
        values: Key of the grid -> the chosen value.
    """

    variant: str
    plan: list[Rule]
    values: dict[str, Any]


class Grid(Study):
    """The input of `approx sweep`; other keys are as in a recipe.

    Attributes:
        checkpoint: One or more checkpoints, suitable for all tasks.
        variants: Name -> a rule or a list of rules. A rule with a `grid` stands for all combinations of its values.
        seeds: Seeds of the mechanisms; plans without randomness are measured once.
        seed: Seed of all other random choices.
    """

    checkpoint: Annotated[
        list[str], Field(min_length=1), BeforeValidator(listed, json_schema_input_type=list[str] | str)
    ]
    variants: dict[str, _GridRules]
    seeds: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(min_length=1),
        BeforeValidator(listed, json_schema_input_type=list[int] | int),
    ] = Field(default_factory=lambda: [0])
    _points: dict[str, Point] = PrivateAttr(default_factory=dict)

    @property
    def points(self) -> dict[str, Point]:
        """Name -> one plan of the grid."""
        return self._points

    def recipe(self, checkpoint: str) -> Recipe:
        """The recipe of one checkpoint, with every plan of the grid as a variant."""
        shared = {key: getattr(self, key) for key in Study.model_fields}
        variants = {name: point.plan for name, point in self.points.items()}
        made = Recipe(**{**shared, "checkpoint": checkpoint, "variants": variants})
        made._mistakes = self._mistakes
        made._places = self._places | {
            ("variants", name): self.at("variants", point.variant) for name, point in self.points.items()
        }
        return made


def read(path: Path) -> Grid:
    """Read a grid.

    Args:
        path: The YAML file; paths in it are relative to the current folder.

    Returns:
        The valid part of the file, with `mistakes` for the rest, each with its line and the closest known name.

    Raises:
        ApproxError: if the file does not exist or is not a YAML mapping.
    """
    return Grid.parse(path, "grid", {"title": "", "checkpoint": [""], "variants": {}}, _loose_ends)


def _loose_ends(grid: Grid) -> Iterator[Mistake]:
    """Check the grid as a whole, and make its points."""
    for key in ("checkpoint", "seeds"):
        for value in _repeated(getattr(grid, key)):
            yield Mistake((key,), f"grid.{key}: {shown(value)} is given twice.")
    if grid.revision is not None and len(grid.checkpoint) > 1:
        text = "a revision needs a single checkpoint, but several are given. Leave it out."
        yield Mistake(("revision",), f"grid.revision: {text}")
    for number, heal in enumerate(grid.heal):
        if heal.exact:
            text = "a sweep compares with the untrained base. Leave it out, or train the base in a recipe."
            yield Mistake(("heal", number), f"grid.heal: exact: {text}")
    for variant, rules in grid.variants.items():
        mistakes: list[Mistake] = []
        for point in _points(variant, rules, mistakes):
            name = " ".join([point.variant, *(f"{key}={_text(value)}" for key, value in point.values.items())])
            if name in grid.points:
                text = f"two plans are called '{name}'. Rename one."
                yield Mistake(("variants", variant), f"grid.variants: {text}")
            grid.points[name] = point
        # Each combination with an invalid value repeats its mistake.
        yield from dict.fromkeys(mistakes)


def _points(variant: str, rules: list[GridRule], mistakes: list[Mistake]) -> Iterator[Point]:
    """All combinations of the values that the rules of a variant list."""
    wheres = [f"grid.variants.{variant}{f'[{n}]' if len(rules) > 1 else ''}" for n in range(len(rules))]
    places = [
        ("variants", variant, number) if len(rules) > 1 else ("variants", variant) for number in range(len(rules))
    ]
    axes = []
    for number, rule in enumerate(rules):
        for key, values in rule.grid.items():
            place, where = (*places[number], "grid", key), f"{wheres[number]}.grid.{key}"
            if getattr(rule, key) != getattr(Rule(""), key) if key in _OF_THE_RULE else key in rule.settings:
                mistakes.append(Mistake(place, f"{where}: it is also given outside the grid. Keep one of them."))
            elif twice := _repeated(values):
                mistakes.append(Mistake(place, f"{where}: {shown(twice[0])} is listed twice."))
            else:
                axes.append((number, key, values))
        if not rule.mechanism and "mechanism" not in rule.grid:
            mistakes.append(Mistake(places[number], f"{wheres[number]}: the key 'mechanism' is missing."))
    keys = [key for _, key, _ in axes]
    names = [key if keys.count(key) == 1 else f"rule {number + 1} {key}" for number, key, _ in axes]
    for chosen in itertools.product(*(values for _, _, values in axes)):
        data = [{key: getattr(rule, key) for key in KEYS} for rule in rules]
        for (number, key, _), value in zip(axes, chosen, strict=True):
            data[number] |= (
                {key: value} if key in _OF_THE_RULE else {"settings": {**data[number]["settings"], key: value}}
            )
        made = []
        for one, where, place in zip(data, wheres, places, strict=True):
            rule, wrong = validate(Rule, one, where, place)
            mistakes += wrong
            made += [rule] if rule is not None else []
        yield Point(variant, made, dict(zip(names, chosen, strict=True)))


def _repeated(values: list[Any]) -> list[Any]:
    """The repeated values of a list; 1 and true are different."""
    texts = [_text(value) for value in values]
    return [value for place, value in enumerate(values) if texts[place] in texts[:place]]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
