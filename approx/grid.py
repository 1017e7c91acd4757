"""A grid: one short YAML file that says which plans to compare, over which values of their settings and which seeds."""

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from approx.errors import shown
from approx.recipe import BenchStage, EvaluateStage, Recipe, loose_ends, parse

# What else of a rule a grid may go through; every other key of a grid is a setting.
_OF_THE_RULE = ("mechanism", "layers", "heads", "exact_below")


@dataclass(frozen=True)
class Point:
    """One plan of a grid.

    Attributes:
        variant: Name of the variant that it belongs to.
        plan: As plain data, without the key `grid`.
        values: What the grid chose for it: key -> value.
    """

    variant: str
    plan: Any
    values: dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """Everything `approx sweep` needs; what is not said here is as in a recipe.

    Attributes:
        title: Of the tables.
        checkpoint: Checkpoints that all the tasks fit.
        variants: Name -> a rule or a list of rules. A rule may have a key `grid`, which lists values of settings (or of
            the rule's `layers`, `heads`, `mechanism` and `exact_below`); the variant stands for all of their combinations.
        evaluate: Tasks.
        bench: Grids of lengths and batch sizes.
        seeds: Of the mechanisms; plans that draw nothing at random are measured once.
        revision: Commit of the hub.
        notice: A sentence that stands above the tables.
        seed: Of everything else that is random.
        device: As in a recipe.
        dtype: As in a recipe.
        text: The file as it was read.
        mistakes: What is wrong with the file, a sentence each.
        points: Name -> one plan of the grid.
    """

    title: str
    checkpoint: list[str]
    variants: dict[str, Any]
    evaluate: list[EvaluateStage] = field(default_factory=list)
    bench: list[BenchStage] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    revision: str | None = None
    notice: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    text: str = ""
    mistakes: tuple[str, ...] = ()
    points: dict[str, Point] = field(default_factory=dict)

    EMPTY: ClassVar = {"title": "", "checkpoint": [], "variants": {}}

    @property
    def sha256(self) -> str:
        """Of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def recipe(self, checkpoint: str) -> Recipe:
        """The recipe of one checkpoint, with every plan of the grid as a variant."""
        shared = {key: getattr(self, key) for key in ("title", "evaluate", "bench", "revision", "notice", "seed")}
        shared |= {key: getattr(self, key) for key in ("device", "dtype", "mistakes")}
        return Recipe(checkpoint=checkpoint, variants={name: p.plan for name, p in self.points.items()}, **shared)


def read(path: Path) -> Grid:
    """Read a grid.

    Args:
        path: Of the YAML file; paths inside it are meant from the folder that the command runs in.

    Returns:
        What could be read; what could not is among its `mistakes`, each with the nearest known name.

    Raises:
        ApproxError: if there is no such file, or it is no YAML mapping.
    """
    grid, data, mistakes = parse(Grid, path, "grid")
    mistakes += loose_ends(grid, data, "grid")
    for key in ("checkpoint", "seeds"):
        values = getattr(grid, key)
        mistakes += [f"grid.{key}: {shown(value)} is given twice." for value in _repeated(values)]
    if grid.revision is not None and len(grid.checkpoint) > 1:
        mistakes.append("grid.revision: a revision belongs to one checkpoint, and several are given. Leave it out.")
    points: dict[str, Point] = {}
    for variant, plan in grid.variants.items():
        for point in _points(str(variant), plan, mistakes):
            name = " ".join([point.variant, *(f"{key}={_text(value)}" for key, value in point.values.items())])
            if name in points:
                mistakes.append(f"grid.variants: two plans would be called '{name}'. Rename one.")
            points[name] = point
    told = tuple(f"{path}: {mistake}" for mistake in mistakes)
    return dataclasses.replace(grid, mistakes=told, points=points)


def _points(variant: str, plan: Any, mistakes: list[str]) -> list[Point]:
    """All combinations of the values that the rules of a variant list."""
    rules = plan["rules"] if isinstance(plan, dict) and set(plan) == {"rules"} else plan
    rules = rules if isinstance(rules, list) else [rules]
    where = f"grid.variants.{variant}"
    # Number of the rule, key, values; a rule that is no mapping is told by whoever makes a plan of it.
    axes = [
        (number, key, values)
        for number, rule in enumerate(rules)
        if isinstance(rule, dict) and "grid" in rule
        for key, values in _axes(rule, where if len(rules) == 1 else f"{where}, rule {number + 1}", mistakes).items()
    ]
    keys = [key for _, key, _ in axes]
    names = [key if keys.count(key) == 1 else f"rule {number + 1} {key}" for number, key, _ in axes]
    points = []
    for chosen in itertools.product(*(values for _, _, values in axes)):
        made = [{k: v for k, v in rule.items() if k != "grid"} if isinstance(rule, dict) else rule for rule in rules]
        for (number, key, _), value in zip(axes, chosen, strict=True):
            own = (
                {key: value}
                if key in _OF_THE_RULE
                else {"settings": {**(made[number].get("settings") or {}), key: value}}
            )
            made[number] |= own
        points.append(Point(variant, made, dict(zip(names, chosen, strict=True))))
    return points


def _axes(rule: dict[str, Any], where: str, mistakes: list[str]) -> dict[str, list[Any]]:
    """The lists of one rule, without those that are wrong."""
    grid = rule["grid"]
    if not isinstance(grid, dict) or not grid or not all(isinstance(key, str) for key in grid):
        mistakes.append(f"{where}.grid: a mapping of settings to lists of values is needed, found {shown(grid)}.")
        return {}
    if not isinstance(rule.get("settings") or {}, dict):
        # Whoever makes a plan of it says what is wrong with these settings.
        return {}
    axes = {}
    for key, values in grid.items():
        given = rule if key in _OF_THE_RULE else rule.get("settings")
        if not isinstance(values, list) or not values:
            mistakes.append(f"{where}.grid.{key}: a list of values is needed, found {shown(values)}.")
        elif isinstance(given, dict) and key in given:
            mistakes.append(f"{where}.grid.{key}: it is also given outside of the grid. Keep one of them.")
        elif twice := _repeated(values):
            mistakes.append(f"{where}.grid.{key}: {shown(twice[0])} is listed twice.")
        else:
            axes[key] = values
    return axes


def _repeated(values: list[Any]) -> list[Any]:
    """What stands in a list a second time; 1 and true are not the same."""
    texts = [_text(value) for value in values]
    return [value for place, value in enumerate(values) if texts[place] in texts[:place]]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
