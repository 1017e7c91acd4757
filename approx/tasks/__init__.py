"""The tasks, in an explicit registry."""

from __future__ import annotations

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

__all__ = ["TASKS", "Example", "SequenceClassification", "Split", "Task", "open_task"]

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
    try:
        return TASKS[name](**settings)
    except TypeError as error:
        raise ApproxError(f"Wrong settings for task '{name}': {str(error).rpartition('() ')[2]}.") from None
