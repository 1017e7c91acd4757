"""The names that options take, for completion and early checks; found without torch, which takes seconds to import."""

from collections.abc import Callable, Iterable

import typer

from approx.errors import did_you_mean
from approx.registry import added, written


def mechanisms() -> tuple[str, ...]:
    """Names of the mechanisms."""
    return tuple(dict.fromkeys((*written("approx.mechanisms", "BUILT_IN"), *added("approx.mechanisms"))))


def families() -> tuple[str, ...]:
    """Names of the families that are tested."""
    return tuple(written("approx.checkpoints.families", "FAMILIES"))


def tasks() -> tuple[str, ...]:
    """Names of the tasks."""
    from approx.tasks import TASKS

    return tuple(dict.fromkeys((*TASKS.here, *added(TASKS.group))))


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
    """A completion function for these names."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


def known(
    what: str, names: Callable[[], Iterable[str]], one: Callable[[str], bool] | None = None
) -> Callable[[typer.Context, str | None], str | None]:
    """A callback of an option or argument that refuses unknown names before anything else happens.

    Args:
        what: The kind of name, for the message.
        names: The names to list in the message.
        one: Whether a name is known; by default if it is listed.
    """

    def check(context: typer.Context, value: str | None) -> str | None:
        if value is None or context.resilient_parsing:
            return value
        if not (one(value) if one else value in names()):
            raise typer.BadParameter(
                f"Unknown {what} '{value}'.{did_you_mean(value, names())} Known: {', '.join(names())}."
            )
        return value

    return check
