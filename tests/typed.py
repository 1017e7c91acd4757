"""Typed records and parts of them, from dicts that name only what a test is about."""

import types
import typing
from typing import Any, TypeVar

from approx.evaluation.record import Record
from approx.validation import Written

Part = TypeVar("Part", bound=Written)
T = TypeVar("T")

_BLANK = {str: "", int: 0, float: 0.0, bool: False, list: [], dict: {}}


def record_of(data: dict[str, Any]) -> Record:
    """A whole record."""
    return Record.model_validate(data)


def part_of(kind: type[Part], **data: Any) -> Part:
    """A part of a record; required keys that are not given, at any depth, are blank."""
    return kind.model_validate(_filled(kind, data))


def parts_of(kind: type[Part], *data: dict[str, Any]) -> list[Part]:
    """Several parts."""
    return [part_of(kind, **one) for one in data]


def known(value: T | None) -> T:
    """A value that this record has, though others may lack it."""
    assert value is not None
    return value


def _filled(kind: Any, data: Any) -> Any:
    if typing.get_origin(kind) is typing.Annotated:
        return _filled(typing.get_args(kind)[0], data)
    if isinstance(data, list):
        (of, *_) = *typing.get_args(kind), None
        return [_filled(of, one) for one in data]
    if _optional(kind):
        return None if data is None else _filled(typing.get_args(kind)[0], data)
    if not (isinstance(kind, type) and issubclass(kind, Written)) or not isinstance(data, dict):
        return data
    filled = dict(data)
    for name, field in kind.model_fields.items():
        key = field.alias or name
        if key in filled:
            filled[key] = _filled(field.annotation, filled[key])
        elif field.is_required():
            filled[key] = _blank(field.annotation)
    return filled


def _optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _blank(kind: Any) -> Any:
    options = typing.get_args(kind)
    if _optional(kind):
        return None
    if typing.get_origin(kind) is typing.Literal:
        return options[0]
    if isinstance(kind, type) and issubclass(kind, Written):
        return _filled(kind, {})
    return _BLANK[typing.get_origin(kind) or kind]
