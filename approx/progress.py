"""How long work reports what it does."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the steps done, and all steps."""


def silent(activity: str, done: int, total: int) -> None:
    """Ignore progress."""
