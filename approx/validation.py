"""Validate plain data into typed models, reporting all mistakes, each as a sentence with place, expectation and value."""

import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from approx.errors import ApproxError, did_you_mean, shown
from approx.yaml_text import Document

T = TypeVar("T")
_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
Path = tuple[Any, ...]


class Model(BaseModel):
    """Base of models for user files: frozen and strict, with no unknown keys and no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Written(BaseModel):
    """Base of models for files written by programs: strict, no infinities; unknown keys of later versions are allowed."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def to_data(self) -> dict[str, Any]:
        """Plain data with the keys of the file; keys without a value in the file are left out."""
        # Wrong types are found by validation; a warning would only repeat it.
        return self.model_dump(by_alias=True, exclude_unset=True, warnings=False)


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        path: Keys and indexes of the value in the file, to look up its line.
        text: A sentence with its place and what is wrong.
    """

    path: Path
    text: str


def listed(value: Any) -> Any:
    """Turn a single value into a list."""
    return value if isinstance(value, list | tuple) else [value]


def seconds(duration: str) -> float:
    """Convert a duration to seconds, such as `90s`, `30m` or `2h`.

    Raises:
        ValueError: if it is not of that form, or zero.
    """
    parts = _DURATION.fullmatch(duration.strip())
    if parts is None or not float(parts[1]):
        raise ValueError("a time above 0 in s, m or h, e.g. 90s, 30m or 2h,")
    return float(parts[1]) * _UNITS[parts[2]]


def checked(read: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A validator that keeps the text of an option if `read` can read it."""

    def check(text: str | None) -> str | None:
        if text is not None:
            read(text)
        return text

    return check


# A path; a file name on the command line may contain commas.
File = Annotated[str, "file"]
# A time such as 90s, 30m or 2h, see `seconds`.
Duration = Annotated[str, AfterValidator(checked(seconds))]
# Larger than any real number of things, and small enough for libraries written in C.
Count = Annotated[int, Field(ge=1, le=10**15)]
Counts = Annotated[
    list[Count], Field(min_length=1), BeforeValidator(listed, json_schema_input_type=list[Count] | Count)
]

_MAPPING = "a mapping of keys and values"
_NEEDED = {
    "bool_type": "true or false",
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "dataclass_type": _MAPPING,
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "text",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than": "a finite number above {gt}",
    "less_than": "a finite number below {lt}",
    "greater_than_equal": "a finite number of at least {ge}",
    "less_than_equal": "a finite number of at most {le}",
}


def validate(kind: type[T], data: Any, root: str, around: Path = ()) -> tuple[T | None, list[Mistake]]:
    """Validate plain data as a model or dataclass.

    Args:
        kind: The model or dataclass.
        data: The data of a file or a part of it.
        root: Name of the data in messages: `recipe`.
        around: Path of the part within its file.

    Returns:
        The model and no mistakes, or None and all mistakes.
    """
    try:
        return TypeAdapter(kind).validate_python(data), []
    except ValidationError as error:
        wrong = _mistakes(error, kind, data)
        return None, [Mistake((*around, *path), f"{named(root, place)}: {text}") for path, place, text in wrong]


def build(kind: type[T], what: str, **values: Any) -> T:
    """Make a model from keywords.

    Raises:
        ApproxError: with all mistakes.
    """
    made, mistakes = validate(kind, values, what)
    if made is None:
        raise ApproxError("\n".join(one.text for one in mistakes))
    return made


def salvage(kind: type[T], data: Mapping[Any, Any], root: str, blanks: Mapping[str, Any]) -> tuple[T, list[Mistake]]:
    """Make a model from the valid part of plain data, so that further checks can report more mistakes.

    Args:
        kind: The model.
        data: A mapping.
        root: Name of the data in messages: `recipe`.
        blanks: Valid values for required keys that are missing or wrong.

    Returns:
        The model of the valid part, and all mistakes.
    """
    made, mistakes = validate(kind, data, root)
    wrong = mistakes
    while made is None:
        # Later items of a list are removed first, so that earlier ones keep their indexes.
        valid = data
        for path in sorted({one.path for one in wrong if one.path}, key=_order, reverse=True):
            valid = _without(valid, path)
        valid = {**blanks, **valid}
        data = valid if valid != data else blanks
        made, wrong = validate(kind, data, root)
    return made, mistakes


def error_lines(mistakes: Iterable[Mistake], source: str, document: Document | None = None) -> list[str]:
    """Mistakes as lines that begin with the source; with a document in file order, with line numbers and repeated keys."""
    if document is None:
        return [f"{source}, {one.text}" for one in mistakes]
    lines = [(document.line(one.path), one.text) for one in mistakes]
    lines += [(line, f"the key '{key}' is given twice. Keep one of them.") for line, key in document.repeated]
    return [f"{source}, line {line}, {text}" for line, text in sorted(lines, key=lambda pair: pair[0])]


def first_mistake(error: ValidationError) -> str:
    """The first mistake in a file that a program wrote, in one line with its place: `plans.0: Input should be a valid list`."""
    first = error.errors(include_url=False)[0]
    text = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    # Keys of a damaged file are part of its place.
    return " ".join(text.split())[:200]


def named(root: str, path: Path) -> str:
    """A path in words: `recipe.bench[0].lengths`."""
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _mistakes(error: ValidationError, kind: Any, data: Any) -> list[tuple[Path, Path, str]]:
    """Path, place, and what is wrong; unknown keys are reported for the mapping that contains them."""
    unknown, wrong = [], []
    needed: dict[Path, tuple[Any, list[str]]] = {}
    choices: dict[Path, list[str]] = {}
    for one in error.errors(include_url=False):
        loc, name = one["loc"], one["type"]
        path = _in_data(loc, data)
        if name == "missing":
            wrong.append((path, path, f"the key '{loc[-1]}' is missing.{_example(kind, loc)}"))
        elif name in ("extra_forbidden", "unexpected_keyword_argument"):
            known = list(_fields(kind, loc[:-1]))
            hint = did_you_mean(str(loc[-1]), known)
            place = path[:-1] if path[-1:] == loc[-1:] else path
            unknown.append((path, place, f"unknown key '{loc[-1]}'.{hint} Known: {', '.join(known)}."))
        elif name == "invalid_key" or loc[-1:] == ("[key]",):
            wrong.append((path, path[:-1], f"names must be text, found {shown(one['input'])}. Put it in quotes."))
        else:
            # Each member of a union reports its own expectation.
            words = needed.setdefault(path, (one["input"], []))[1]
            if name == "literal_error":
                choices[path] = re.findall(r"'([^']*)'", one.get("ctx", {})["expected"])
                words.append(("one of " if len(choices[path]) > 1 else "") + ", ".join(choices[path]))
            else:
                words.append(_needed(name, one["msg"], one.get("ctx", {})))
    for path, (value, words) in needed.items():
        hint = did_you_mean(value, choices[path]) if isinstance(value, str) and path in choices else ""
        wrong.append((path, path, f"{' or '.join(words)} is needed, found {shown(value)}.{hint}"))
    return unknown + wrong


def _needed(name: str, message: str, about: Mapping[str, Any]) -> str:
    if name == "too_short" and about["min_length"] == 1:
        return "at least one"
    return _NEEDED[name].format(**about) if name in _NEEDED else message.removeprefix("Value error, ")


def _in_data(loc: Path, data: Any) -> Path:
    """Path in the data of a validator's location, which differs for `{rules: [...]}`, single values and unions."""
    path = []
    for step in loc:
        if (
            isinstance(step, int)
            and isinstance(data, dict)
            and set(data) == {"rules"}
            and isinstance(data["rules"], list)
        ):
            path.append("rules")
            data = data["rules"]
        if (isinstance(data, dict) and step in data) or (
            isinstance(data, list | tuple) and isinstance(step, int) and step < len(data)
        ):
            path.append(step)
            data = data[step]
        elif not isinstance(step, int):
            break
    return tuple(path)


def _fields(kind: Any, loc: Path) -> dict[str, FieldInfo]:
    """The fields of the model at a location."""
    fields = _owned(kind)
    for step in loc:
        if step in fields:
            fields = _owned(fields[step].annotation) or fields
    return fields


def _owned(annotation: Any) -> dict[str, FieldInfo]:
    """The fields of the first model in an annotation."""
    fields = getattr(annotation, "model_fields", None) or getattr(annotation, "__pydantic_fields__", None)
    return fields or next((inner for part in typing.get_args(annotation) if (inner := _owned(part))), {})


def _example(kind: Any, loc: Path) -> str:
    field = _fields(kind, loc[:-1]).get(loc[-1])
    return f" Example: {loc[-1]}: {field.examples[0]}" if field is not None and field.examples else ""


def _order(path: Path) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (-1, str(step)) for step in path]


def _without(data: Any, path: Path) -> Any:
    step, *rest = path
    copied = data.copy()
    if rest:
        copied[step] = _without(data[step], tuple(rest))
    else:
        del copied[step]
    return copied
