"""Options of a command from the stage that declares them: the fields of a pydantic model with their types and docstring."""

import importlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from approx.cli import names, options
from approx.cli.docstrings import arguments
from approx.errors import ApproxError


@dataclass(frozen=True)
class Stage:
    """A pydantic model whose fields are options of a command.

    Attributes:
        model: Dotted name of the model; it is imported when its options are first needed, as pydantic takes long to
            import.
        panels: Panel of the help -> names of the fields in it, both in their order; it may hold only options of the
            command itself. The other fields come first, in no panel.
        renamed: Field -> its option, where that is not named after the field.
        former: Earlier name of an option, still accepted but not shown -> its field.
        defaults: Field -> its value as typed, where the model has no default.
        omitted: Fields that are no options.
    """

    model: str
    panels: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()

    @property
    def kind(self) -> Any:
        """The model."""
        module, _, name = self.model.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def option(self, name: str) -> str:
        """The option of a field."""
        return self.renamed.get(name, "--set" if name == "settings" else f"--{name.replace('_', '-')}")

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The options as parameters that Typer understands."""
        kind, meanings = self.kind, arguments(self.kind, "Attributes")
        placed = {name: panel for panel, fields in self.panels.items() for name in fields.split()}
        first = [name for name in kind.model_fields if name not in placed and name not in self.omitted]
        for name in [*first, *placed]:
            if name == "settings":
                yield _parameter("settings", options.TaskSettings, None)
                yield _parameter("columns", options.Columns, None)
                yield _parameter("labels", options.Labels, None)
                continue
            one = kind.model_fields[name]
            accepted, bounds = _unwrapped(one.annotation)
            typed = _typed(accepted)
            if one.is_required():
                default = self.defaults.get(name, inspect.Parameter.empty)
            else:
                default = _shown(one.get_default(call_default_factory=True))
            about: dict[str, Any] = {
                "help": meanings[name] + _repeated(accepted, self.option(name)),
                "rich_help_panel": placed.get(name),
                "metavar": _allowed(accepted, [*bounds, *one.metadata]),
                "show_default": default not in (None, inspect.Parameter.empty),
            }
            if name == "task":
                about |= options.NAMED_TASK
            if get_origin(accepted) is Literal:
                about["autocompletion"] = names.completed(partial(get_args, accepted))
            optional = typed if default is not None else typed | None
            option = self.option(name)
            if accepted is bool and default is None:
                # What is chosen by default can be forced either way.
                option = f"{option}/--no-{option.removeprefix('--')}"
            yield _parameter(name, Annotated[optional, typer.Option(option, **about)], default)
            for old in (old for old, new in self.former.items() if new == name):
                about["hidden"] = True
                yield _parameter(
                    old, Annotated[typed | None, typer.Option(f"--{old.replace('_', '-')}", **about)], None
                )

    def read(self, typed: dict[str, Any]) -> Any:
        """Take the values of the options out of `typed`, by the names of `parameters`, and make the model.

        Raises:
            ApproxError: with all mistakes, by option.
        """
        from approx.validation import validate

        values: dict[str, Any] = {}
        for old, name in self.former.items():
            if (value := typed.pop(old)) is not None:
                if typed[name] is not None:
                    raise ApproxError(
                        f"{self.option(name)} and its earlier name --{old.replace('_', '-')} were both given. Give one of them."
                    )
                typed[name] = value
        for name, one in self.kind.model_fields.items():
            if name in self.omitted:
                continue
            if name == "settings":
                values[name] = options.task_settings(*(typed.pop(part) for part in ("settings", "columns", "labels")))
            elif (value := typed.pop(name)) not in (None, []):
                values[name] = _read(value, _unwrapped(one.annotation)[0], self.option(name))
        made, mistakes = validate(self.kind, values, "")
        if made is None:
            named = (re.sub(r"^\.(\w+)", lambda field: self.option(field[1]), one.text) for one in mistakes)
            raise ApproxError("\n".join(named))
        return made


def panel_of(parameter: inspect.Parameter) -> str | None:
    """The panel of an option in the help."""
    return get_args(parameter.annotation)[1].rich_help_panel


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    """A type without None, and what it is annotated with."""
    notes: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            for one in more:
                notes += getattr(one, "metadata", [one])
        elif get_origin(annotation) in (Union, types.UnionType):
            parts = [part for part in get_args(annotation) if part is not types.NoneType]
            if len(parts) > 1:
                return annotation, notes
            (annotation,) = parts
        else:
            return (Path if "file" in notes else annotation), notes


def _item(accepted: Any) -> Any:
    """The type of the items of a list; None for what is not a list."""
    return _unwrapped(get_args(accepted)[0])[0] if get_origin(accepted) is list else None


def _typed(accepted: Any) -> Any:
    """The type that Typer takes for the type of a field: mostly text, which the model checks, as its message says what was typed."""
    item = _item(accepted)
    if accepted in (bool, Path):
        return accepted
    if item is Path:
        return list[Path]
    if hasattr(item, "__pydantic_fields__"):
        return Path
    return list[str] if hasattr(accepted, "model_fields") else str


def _repeated(accepted: Any, option: str) -> str:
    """What is to be said of an option that may be repeated."""
    if hasattr(accepted, "model_fields"):
        shown = {name: one.examples[0] if one.examples else one.default for name, one in accepted.model_fields.items()}
        # A part that has a default is more telling than one that is left out.
        name = next((name for name, one in accepted.model_fields.items() if one.default is not None), next(iter(shown)))
        return f" May be repeated: {option} {name}={shown[name]}."
    return " May be repeated." if _item(accepted) is Path else ""


def _allowed(accepted: Any, bounds: list[Any]) -> str | None:
    """The allowed numbers or words for the help; None for what Typer describes itself."""
    if get_origin(accepted) is Literal:
        return f"<{'|'.join(get_args(accepted))}>"
    if accepted not in (int, float):
        return None
    for one in bounds:
        for name, sign in (("ge", ">="), ("gt", ">")):
            if hasattr(one, name):
                return f"<{accepted.__name__} range> [x{sign}{getattr(one, name):g}]"
    return f"<{accepted.__name__}>"


def _shown(default: Any) -> Any:
    """A default as it would be typed."""
    if isinstance(default, list):
        return ",".join(map(str, default))
    if default is None or isinstance(default, bool):
        return default
    return None if hasattr(type(default), "model_fields") else str(default)


def _read(value: Any, accepted: Any, option: str) -> Any:
    """A typed value as data of a model, which checks it; what cannot be read stays as typed."""
    item = _item(accepted)
    if accepted is Path:
        return str(value)
    if isinstance(value, list):
        if item is Path:
            return [str(path) for path in value]
        parts, read = accepted.model_fields, options.read_settings(value, option)
        return {name: _listed(one, parts[name].annotation) if name in parts else one for name, one in read.items()}
    if isinstance(value, Path):
        from approx.planning.plan import Plan

        return Plan.read(value).to_data()
    if item is not None:
        return [_number(part, item) for part in _listed(value, accepted)]
    return _number(value, int if get_origin(accepted) in (Union, types.UnionType) else accepted)


def _listed(value: Any, annotation: Any) -> Any:
    """The parts of a text that stands for a list."""
    return (
        [part.strip() for part in value.split(",")]
        if isinstance(value, str) and _item(_unwrapped(annotation)[0])
        else value
    )


def _number(value: Any, kind: Any) -> Any:
    """A text as a number, where one is accepted and it is one."""
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:
        return value
