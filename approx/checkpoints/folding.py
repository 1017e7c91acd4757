"""Reduce a source file to plain PyTorch: resolve every choice of implementation and remove the unused code.

Only whole statements and operands are removed; the remaining lines are those of the source, with their comments.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from approx_kernels.dispatch.implementation import IN_PYTORCH

_UNKNOWN = object()
# The parameter `impl`, the argument, and its mentions in docstrings.
_IMPL = (
    re.compile(r",\s*impl: str(?: = \"auto\")?(?=[,\s)])"),
    re.compile(r",\s*impl=(?:\w+|\"\w+\")(?=[,\s)])"),
    re.compile(r"\n {8}impl: .*(?:\n {9,}\S.*)*"),
    re.compile(r",?\s+or\s+(?:`impl`|the\s+(?:requested\s+)?implementation)\s+cannot\s+run"),
)


@dataclass(frozen=True)
class _Edit:
    """Replace the bytes from `start` to `end` of the source by `text`."""

    start: int
    end: int
    text: bytes = b""


def folded(text: str, false: Collection[str]) -> str:
    """The source with each `choose` resolved to PyTorch, without the branches, values and parameters this makes unused.

    Args:
        text: Source of a module.
        false: Functions that always return False.

    Raises:
        RuntimeError: if the result is not valid Python.
    """
    for pattern in _IMPL:
        text = pattern.sub("", text)
    while True:
        try:
            edits = _Source(text, false).edits()
        except SyntaxError as error:
            raise RuntimeError(f"The plain form of a source file is not valid Python: {error}\n{text}") from error
        if not edits:
            return text
        text = _applied(text, edits)


def _applied(text: str, edits: list[_Edit]) -> str:
    """The text after the outermost edits; edits inside them are left to the next round."""
    data, parts, at = text.encode(), [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if edit.start >= at:
            parts += [data[at : edit.start], edit.text]
            at = edit.end
    return b"".join([*parts, data[at:]]).decode()


class _Source:
    """The text of a module, its syntax tree, and the positions of nodes."""

    def __init__(self, text: str, false: Collection[str]) -> None:
        self.false = false
        self.tree = ast.parse(text)
        self.lines = text.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.data = text.encode()

    def edits(self) -> list[_Edit]:
        """Everything that can be resolved or removed in the current text."""
        return [edit for node in ast.iter_child_nodes(self.tree) for edit in self._within(node, {})]

    def _within(self, node: ast.AST, known: Mapping[str, str]) -> Iterator[_Edit]:
        if isinstance(node, ast.FunctionDef):
            known = {**known, **_decided(node)}
            yield from self._unused(node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                yield from self._unreachable(statements)
        if self._opens(node) and (value := self._value(node.test, known)) is not _UNKNOWN:
            yield self._branch(node, bool(value))
        elif isinstance(node, ast.IfExp) and (value := self._value(node.test, known)) is not _UNKNOWN:
            yield _Edit(*self._span(node), self._source(node.body if value else node.orelse))
        elif isinstance(node, ast.BoolOp):
            open_ = [each for each in node.values if self._value(each, known) is _UNKNOWN]
            if len(open_) < len(node.values) and self._value(node, known) is _UNKNOWN:
                joint = b" and " if isinstance(node.op, ast.And) else b" or "
                yield _Edit(*self._span(node), joint.join(map(self._source, open_)))
        for child in ast.iter_child_nodes(node):
            yield from self._within(child, known)

    def _opens(self, node: ast.AST) -> TypeGuard[ast.If]:
        """Whether a statement is an `if`; an `elif` becomes one once the conditions before it are resolved."""
        return isinstance(node, ast.If) and not self.lines[node.lineno - 1].lstrip().startswith(b"elif")

    def _unused(self, function: ast.FunctionDef) -> Iterator[_Edit]:
        """Values and inner functions that nothing reads any more; the original sources have none."""
        read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for statement in _own_statements(function):
            if isinstance(statement, ast.FunctionDef):
                name = statement.name
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
            else:
                continue
            if name not in read:
                yield self._without([statement])

    def _unreachable(self, statements: list[ast.stmt]) -> Iterator[_Edit]:
        for place, statement in enumerate(statements[:-1]):
            if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
                yield self._without(statements[place + 1 :])
                return

    def _branch(self, node: ast.If, value: bool) -> _Edit:
        """Replace the whole statement by the branch that is taken."""
        first, last = self._first_line(node, comments=False), node.end_lineno or 0
        taken = node.body if value else node.orelse
        if not taken:
            return self._without([node])
        begin = self._first_line(taken[0])
        text = self.lines[begin : taken[-1].end_lineno]
        if text[0].lstrip().startswith(b"elif"):
            text = [text[0].replace(b"elif", b"if", 1), *text[1:]]
        else:
            text = [line.removeprefix(b"    ") for line in text]
        return _Edit(self.starts[first], self.starts[last], b"".join(text))

    def _without(self, statements: list[ast.stmt]) -> _Edit:
        first, last = self._first_line(statements[0]), statements[-1].end_lineno or 0
        # With a blank line on both sides, keep only one.
        if first and not self.lines[first - 1].strip() and last < len(self.lines) and not self.lines[last].strip():
            first -= 1
        return _Edit(self.starts[first], self.starts[last])

    def _first_line(self, node: ast.stmt, *, comments: bool = True) -> int:
        """Index of the first line of a statement, including its decorators and the comments above it."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
        while comments and first and self.lines[first - 1].lstrip().startswith(b"#"):
            first -= 1
        return first

    def _span(self, node: ast.expr) -> tuple[int, int]:
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def _source(self, node: ast.expr) -> bytes:
        start, end = self._span(node)
        return self.data[start:end]

    def _value(self, node: ast.expr, known: Mapping[str, str]) -> object:
        """The value of an expression about the implementation; `_UNKNOWN` for all others."""
        if isinstance(node, ast.Name):
            return known.get(node.id, _UNKNOWN)
        if _called(node) in self.false:
            return False
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand, known)
            return value if value is _UNKNOWN else not value
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            left, right = self._value(node.left, known), node.comparators[0].value
            if left is _UNKNOWN or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
                return _UNKNOWN
            return (left == right) == isinstance(node.ops[0], ast.Eq)
        if isinstance(node, ast.BoolOp):
            values = [self._value(each, known) for each in node.values]
            decisive = isinstance(node.op, ast.Or)
            if any(value is not _UNKNOWN and bool(value) == decisive for value in values):
                return decisive
            return _UNKNOWN if _UNKNOWN in values else not decisive
        return _UNKNOWN


def _own_statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The statements of a function at any depth, excluding inner functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _called(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _decided(function: ast.FunctionDef) -> dict[str, str]:
    """The results of calls of `choose`: the first implementation in `IN_PYTORCH` that the op has."""
    assigned = {
        statement.targets[0].id: statement.value
        for statement in _own_statements(function)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    choices = {}
    for name, value in assigned.items():
        if isinstance(value, ast.Call) and _called(value) == "choose":
            parts: list[ast.AST] = [value.args[2]]
            parts += [
                assigned[node.id] for node in ast.walk(parts[0]) if isinstance(node, ast.Name) and node.id in assigned
            ]
            ways = {way for part in parts for node in ast.walk(part) for way in _ways(node)}
            choices[name] = next(way for way in IN_PYTORCH if way in ways)
    return choices


def _ways(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Dict):
        return [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
    return [keyword.arg for keyword in node.keywords if keyword.arg] if isinstance(node, ast.Call) else []
