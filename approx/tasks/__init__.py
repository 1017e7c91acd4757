"""The tasks, in an explicit registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from approx.errors import ApproxError, did_you_mean, shown
from approx.registry import Registry
from approx.tasks.classification import SequenceClassification
from approx.tasks.copying import Copying
from approx.tasks.documents import Documents
from approx.tasks.generation import Passkey
from approx.tasks.glue import GLUE, Glue
from approx.tasks.harness import ANY, PREFIX, Harness
from approx.tasks.images import ImageClassification
from approx.tasks.labelled import Classification
from approx.tasks.language import LanguageModelling
from approx.tasks.librispeech import LIBRISPEECH, LibriSpeech
from approx.tasks.listops import ListOps
from approx.tasks.masked_language import MaskedLanguageModelling
from approx.tasks.needle import Needle
from approx.tasks.settings import wrong_setting
from approx.tasks.squad import Squad
from approx.tasks.task import Example, Split, Task
from approx.tasks.token_classification import TokenClassification
from approx.text_file import known_encoding

__all__ = [
    "ORDER",
    "SHARED",
    "TASKS",
    "Example",
    "SequenceClassification",
    "Split",
    "Task",
    "kind_of",
    "known",
    "open_task",
    "settings_of",
]

_HERE: dict[str, Callable[..., Task]] = {
    **{f"glue/{subset}": partial(Glue, subset) for subset in GLUE},
    "squad": partial(Squad, 1),
    "squad_v2": partial(Squad, 2),
    **{f"librispeech/{split}": partial(LibriSpeech, split) for split in LIBRISPEECH},
    LanguageModelling.name: LanguageModelling,
    MaskedLanguageModelling.name: MaskedLanguageModelling,
    Classification.name: Classification,
    TokenClassification.name: TokenClassification,
    ImageClassification.name: ImageClassification,
    Harness.name: partial(Harness, ANY),
    Documents.name: Documents,
    ListOps.name: ListOps,
    Needle.name: Needle,
    Copying.name: Copying,
    Passkey.name: Passkey,
}


def _usable(made: object) -> Callable[..., Task]:
    """What another package calls a task, if it is a complete one."""
    kind = getattr(made, "func", made)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise TypeError(f"{made!r} is neither a subclass of approx.tasks.Task nor a functools.partial of one")
    if missing := sorted(kind.__abstractmethods__):
        raise TypeError(
            f'{kind.__name__} does not define {", ".join(missing)}. CONTRIBUTING.md, "Add a task", says what a task must '
            "define"
        )
    return cast("Callable[..., Task]", made)


TASKS: Registry[Callable[..., Task]] = Registry("approx.tasks", "task", _HERE, _usable)
"""Name on the command line and in recipes -> function that makes the task from its settings."""


SHARED = {
    "encoding": "Encoding of text files, such as cp1252; None is UTF-8, or UTF-16 or UTF-32 if a file begins with their byte order mark."
}
"""Settings of every task that reads files, with their meanings."""

ORDER = {
    "labels": "The class that each of the model's outputs stands for, in their order, by name or number, e.g. 1,0; None matches names."
}
"""Setting of every classification with classes of its own, with its meaning."""


def open_task(name: str, columns: Any = None, **settings: Any) -> Task:
    """Make a task by name.

    Args:
        name: A key of `TASKS`, or `lm-eval/` with a task of the LM Evaluation Harness.
        columns: A mapping from fields of the task, such as `text` or `label`, to columns of a table.
        settings: Settings of the task, such as the length of generated documents (`needle`).

    Raises:
        ApproxError: if the task or a setting is unknown.
    """
    if not known(name):
        raise ApproxError(f"Unknown task '{name}'.{did_you_mean(name, TASKS)} Known: {', '.join(TASKS)}.")
    allowed = settings_of(name)
    if wrong := [setting for setting in settings if setting not in allowed]:
        listed = f"Its settings are {', '.join(allowed)}." if allowed else "It has no settings."
        raise ApproxError(f"The task '{name}' has no setting '{wrong[0]}'.{did_you_mean(wrong[0], allowed)} {listed}")
    order = settings.pop("labels", None) if _is_ordered(name) else None
    encoding = settings.pop("encoding", None)
    if encoding is not None and (not isinstance(encoding, str) or known_encoding(encoding) is None):
        allowed = "the name of an encoding, e.g. cp1252 or utf-16"
        raise wrong_setting("encoding", encoding, allowed, name)
    try:
        task = _maker(name)(**settings)
    except TypeError as error:
        raise ApproxError(f"Wrong settings for task '{name}': {str(error).rpartition('() ')[2]}.") from None
    if encoding is not None:
        task.encoding = encoding
    if order is not None:
        assert isinstance(task, SequenceClassification), "only they have this setting"
        task.arrange(order)
    if columns:
        task.columns = _checked(task, columns)
    return task


def _checked(task: Task, columns: Any) -> dict[str, str]:
    if not task.fields:
        raise ApproxError(f"The task '{task.name}' reads no tables, so it has no columns to name. Leave out columns.")
    if not isinstance(columns, Mapping) or not all(isinstance(one, str) for pair in columns.items() for one in pair):
        raise ApproxError(
            f"The columns {shown(columns)} of the task '{task.name}' must be names, e.g. {{text: review}}."
        )
    known = (*task.fields, *task.optional_fields, "id", "group")
    if wrong := [field for field in columns if field not in known]:
        raise ApproxError(
            f"The task '{task.name}' reads no column '{wrong[0]}'.{did_you_mean(wrong[0], known)} "
            f"It reads {', '.join(known)}."
        )
    return dict(columns)


def known(name: str) -> bool:
    """Whether there is a task of this name: a key of `TASKS`, or `lm-eval/` with any task of the harness."""
    return name in TASKS or (name.startswith(PREFIX) and name != PREFIX)


def kind_of(name: str) -> type[Task]:
    """The class of a task, by its name."""
    made: Any = _maker(name)
    return getattr(made, "func", made)


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a task and their defaults, read from its constructor, and those of all that read files, by its name."""
    parameters = [*inspect.signature(_maker(name)).parameters.values()]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        parameters += inspect.signature(kind_of(name).__bases__[0]).parameters.values()
    arguments = {each.name: each.default for each in parameters if each.default is not each.empty}
    return {
        **arguments,
        **dict.fromkeys(ORDER if _is_ordered(name) else ()),
        **dict.fromkeys(SHARED if kind_of(name).fields else ()),
    }


def _is_ordered(name: str) -> bool:
    """Whether a task has classes of its own, whose order in the model may be set."""
    kind = kind_of(name)
    return issubclass(kind, SequenceClassification) and not issubclass(kind, Classification) and name != "glue/stsb"


def _maker(name: str) -> Callable[..., Task]:
    return TASKS[name] if name in TASKS else partial(Harness, name.removeprefix(PREFIX))
