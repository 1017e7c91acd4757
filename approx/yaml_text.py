"""Read YAML: 1e-6 is a number, repeated keys are detected, and every value has its line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from approx.errors import ApproxError

# No hand-written file is larger, and reading takes a second per megabyte.
_LARGEST = 1_000_000
# Number of values with all aliases expanded: a few hundred bytes can expand to billions.
_MOST_REPEATED = 10_000
_DEEPEST = 100
# PyYAML's own pattern accepts only 1.0e-6.
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_scalar(self, node: Any) -> Any:
        """The text of a node; pairs of surrogates, as JSON writes characters beyond 16 bits, become one character."""
        value = super().construct_scalar(node)
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16") if isinstance(value, str) else value
        except UnicodeDecodeError:
            raise yaml.constructor.ConstructorError(
                None, None, "half of a surrogate pair is not a character", node.start_mark
            ) from None


def _refused(loader: _Loader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"{node.tag.rpartition(':')[2]} is no kind of value here; write text, a number, a list or a mapping",
        node.start_mark,
    )


# YAML types without a counterpart in JSON: dates become text, others are refused unless tagged explicitly.
_NO_JSON = [f"tag:yaml.org,2002:{name}" for name in ("timestamp", "binary", "set", "omap", "pairs")]
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _NO_JSON]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag in _NO_JSON:
    _Loader.add_constructor(_tag, _refused)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class Document:
    """A parsed YAML or JSON text.

    Attributes:
        text: The text.
        data: Its content.
        node: Its syntax tree, with the line of each value.
        repeated: Line and name of each repeated key; PyYAML silently uses the last one.
    """

    text: str
    data: Any
    node: yaml.Node | None
    repeated: tuple[tuple[int, str], ...]

    def line(self, path: Sequence[Any]) -> int:
        """The line, from 1, of the value at a path of keys and indexes, or of its nearest parent."""
        node, line = self.node, 1
        for step in path:
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if pair[0].value == str(step)]
                # Keys of the mapping override merged ones (<<), whose lines come earlier in the text.
                keys = [pair for pair in pairs if pair[0].start_mark.index >= node.start_mark.index]
                pair = next(iter(keys or pairs), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                pair = (node.value[step], node.value[step])
            else:
                pair = None
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        return line


def _repeated(document: yaml.Node | None) -> Iterator[tuple[int, str]]:
    todo, seen = [document], set()
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            for place, (key, _) in enumerate(node.value):
                if keys[place] in keys[:place]:
                    yield key.start_mark.line + 1, keys[place]
            todo += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _refuse_endless(document: yaml.Node | None) -> None:
    """Check how many values a document has once aliases are resolved, and how deep they are nested.

    Raises:
        ValueError: if there are too many, they are too deep, or one contains itself.
    """
    # For each node, the number of its values and of its levels.
    sizes: dict[int, tuple[int, int]] = {}
    opened: set[int] = set()
    todo = [] if document is None else [document]
    while todo:
        node = todo[-1]
        inner = [
            part
            for pair in (node.value if isinstance(node, yaml.CollectionNode) else ())
            for part in (pair if isinstance(pair, tuple) else (pair,))
        ]
        waiting = [part for part in inner if id(part) not in sizes]
        if waiting and id(node) not in opened:
            opened.add(id(node))
            todo += waiting
            continue
        if waiting:
            raise ValueError(f"line {node.start_mark.line + 1}: a value contains itself through an alias")
        todo.pop()
        found = [sizes[id(part)] for part in inner]
        sizes[id(node)] = (1 + sum(many for many, _ in found), 1 + max((deep for _, deep in found), default=0))
    many, deep = sizes[id(document)] if document is not None else (0, 0)
    if many > max(_MOST_REPEATED, len(sizes)):
        raise ValueError(f"its aliases stand for {many:,} values, and {_MOST_REPEATED:,} are allowed")
    if deep > _DEEPEST:
        raise ValueError(f"it is nested {deep} deep, and {_DEEPEST} are allowed")


def load(text: str) -> Document:
    """Read YAML or JSON.

    Raises:
        yaml.YAMLError: if the text is neither.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_endless(node)
        # Constructing replaces merge keys by the merged ones.
        repeated = tuple(_repeated(node))
        return Document(text, None if node is None else loader.construct_document(node), node, repeated)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML raises these for invalid dates, numbers and tags.
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def read(path: Path, what: str) -> Document:
    """Read a file.

    Args:
        path: The YAML or JSON file.
        what: The kind of file: `recipe`.

    Raises:
        ApproxError: if the file cannot be read, or is neither YAML nor JSON.
    """
    called = f"{what.capitalize()} {path}"
    try:
        if (size := path.stat().st_size) > _LARGEST:
            raise ApproxError(f"{called} has {size:,} bytes, but a {what} has at most {_LARGEST:,}. Give another file.")
        return load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ApproxError(f"{called} cannot be read: {reason}. Give the path of a YAML or JSON file.") from None
    except yaml.YAMLError as error:
        raise ApproxError(f"{called} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
