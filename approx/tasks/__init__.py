"""The tasks, in an explicit registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from approx.errors import ApproxError, did_you_mean
from approx.tasks.classification import SequenceClassification
from approx.tasks.copying import Copying
from approx.tasks.documents import Documents
from approx.tasks.glue import GLUE, Glue
from approx.tasks.language import LanguageModelling
from approx.tasks.librispeech import LIBRISPEECH, LibriSpeech
from approx.tasks.listops import ListOps
from approx.tasks.masked_language import MaskedLanguageModelling
from approx.tasks.needle import Needle
from approx.tasks.squad import Squad
from approx.tasks.task import Example, Split, Task

__all__ = ["TASKS", "Example", "SequenceClassification", "Split", "Task", "kind_of", "open_task", "settings_of"]

TASKS: dict[str, Callable[..., Task]] = {
    **{f"glue/{subset}": partial(Glue, subset) for subset in GLUE},
    "squad": partial(Squad, 1),
    "squad_v2": partial(Squad, 2),
    **{f"librispeech/{split}": partial(LibriSpeech, split) for split in LIBRISPEECH},
    LanguageModelling.name: LanguageModelling,
    MaskedLanguageModelling.name: MaskedLanguageModelling,
    Documents.name: Documents,
    ListOps.name: ListOps,
    Needle.name: Needle,
    Copying.name: Copying,
}
"""Name on the command line and in recipes -> function that makes the task from its settings."""


def open_task(name: str, **settings: Any) -> Task:
    """Make a task by name.

    Args:
        name: A key of `TASKS`.
        settings: Settings of the task, such as the length of generated documents (`needle`); GLUE has none.

    Raises:
        ApproxError: if the task or a setting is unknown.
    """
    if name not in TASKS:
        raise ApproxError(f"Unknown task '{name}'.{did_you_mean(name, TASKS)} Known: {', '.join(TASKS)}.")
    known = settings_of(name)
    if wrong := [setting for setting in settings if setting not in known]:
        listed = f"Its settings are {', '.join(known)}." if known else "It has no settings."
        raise ApproxError(f"The task '{name}' has no setting '{wrong[0]}'.{did_you_mean(wrong[0], known)} {listed}")
    try:
        return TASKS[name](**settings)
    except TypeError as error:
        raise ApproxError(f"Wrong settings for task '{name}': {str(error).rpartition('() ')[2]}.") from None


def kind_of(name: str) -> type[Task]:
    """The class of a task, by a key of `TASKS`."""
    made: Any = TASKS[name]
    return made.func if isinstance(made, partial) else made


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a task and their defaults, read from its constructor, by a key of `TASKS`."""
    parameters = [*inspect.signature(TASKS[name]).parameters.values()]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        parameters += inspect.signature(kind_of(name).__bases__[0]).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}
