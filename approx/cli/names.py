"""The names that options take, for completion and early checks; found without torch, which takes seconds to import."""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import typer

from approx.errors import did_you_mean


@cache
def written(module: str, table: str) -> tuple[str, ...]:
    """The keys of a dictionary, or the elements of a tuple, that a module defines or fills; read from its source, not imported."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"The source of {module} is missing")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            value = getattr(node, "value", None)
            parts = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
            return tuple(ast.literal_eval(part) for part in parts if part is not None)
    raise ImportError(f"{module} defines no {table}")


def mechanisms() -> tuple[str, ...]:
    """Names of the mechanisms."""
    return written("approx.mechanisms", "MECHANISMS")


def families() -> tuple[str, ...]:
    """Names of the families that are tested."""
    return written("approx.checkpoints.families", "FAMILIES")


def tasks() -> tuple[str, ...]:
    """Names of the tasks."""
    from approx.tasks import TASKS

    return tuple(TASKS)


def is_task(name: str) -> bool:
    """Whether there is a task of this name."""
    from approx.tasks import known

    return known(name)


def recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    from approx.recipe import named

    return tuple(named("recipe"))


def grids() -> tuple[str, ...]:
    """Names of the grids that come with the package."""
    from approx.recipe import named

    return tuple(named("grid"))


def completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of a name."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


def known(
    what: str, names: Callable[[], Iterable[str]], one: Callable[[str], bool] | None = None
) -> Callable[[typer.Context, str | None], str | None]:
    """A callback of an option or argument that refuses unknown names before anything else happens.

    Args:
        what: What the names are of.
        names: All names that are listed.
        one: Whether a name is known; by default those that are listed are.
    """

    def check(context: typer.Context, given: str | None) -> str | None:
        if given is None or context.resilient_parsing:
            return given
        if not (one(given) if one else given in names()):
            raise typer.BadParameter(
                f"Unknown {what} '{given}'.{did_you_mean(given, names())} Known: {', '.join(names())}."
            )
        return given

    return check
