"""Small deliberate errors: the operators of mutmut, statements left out and conditions turned round, each by itself.

Left out is what no behaviour can show: annotations, docstrings, prose, messages of errors, logging, assertions,
decorators, and the looks of pictures.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

# pyright: reportMissingImports=false
# They are of the extra `mutants`, which whoever checks types need not have.
import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

# Calls that only tell somebody something, or only help the reader and the type checker.
_TELLING = {"cast", "debug", "info", "print", "warn", "warning", "TypeVar", "getLogger"}
# Where a picture has its ink is for the eye to judge; what it holds is tested, not how it looks.
_DRAWN = {"axes", "figure"}
# Keywords of calls that state what holds anyway, or only silence a warning.
_STATING = {"encoding", "strict", "verbose"}


@dataclass(frozen=True)
class Mutant:
    """One change of one place: `source[start:end]` becomes `new`."""

    file: str
    source: str
    start: int
    end: int
    new: str

    @property
    def text(self) -> str:
        """The whole file with the change in it."""
        return self.source[: self.start] + self.new + self.source[self.end :]

    @property
    def line(self) -> int:
        """The line of the first character that changes, from 1."""
        return self._first_line() + 1

    @property
    def lines(self) -> range:
        """The lines of the old text that the change covers, from 1."""
        return range(self.source.count("\n", 0, self.start) + 1, self.source.count("\n", 0, self.end) + 2)

    def shown(self) -> tuple[str, str]:
        """The lines that change, before and after, without their indentation."""
        before, after = self.source.splitlines(), self.text.splitlines()
        was, now = [], []
        for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind != "equal":
                was += [line.strip() for line in before[a:b]]
                now += [line.strip() for line in after[c:d]]
        return " ".join(was), " ".join(now)

    def _first_line(self) -> int:
        changed = self.text
        same = next((i for i, (a, b) in enumerate(zip(self.source, changed, strict=False)) if a != b), self.start)
        return self.source.count("\n", 0, same)


def mutants_of(file: str, source: str, texts: bool = False) -> list[Mutant]:
    """All mutants of a module's source, in the order of the text.

    Args:
        file: Its path, which the mutants carry.
        source: Its text.
        texts: Whether expressions inside f-strings are changed too: where sentences are the product, not messages.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(file, source, wrapper.module, texts)
    wrapper.visit(visitor)
    mutants = {(one.start, one.end, one.new): one for one in visitor.mutants if one.new != source[one.start : one.end]}
    return list(mutants.values())


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (WhitespaceInclusivePositionProvider,)

    def __init__(self, file: str, source: str, module: cst.Module, texts: bool) -> None:
        super().__init__()
        self.mutants: list[Mutant] = []
        self._file, self._source, self._module, self._texts = file, source, module, texts
        self._begins = [0]
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Raise):
            self._add(node, cst.Pass())
        if self._left_out(node):
            return False
        for changed in _changes(node):
            self._add(node, changed)
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name | cst.Attribute | cst.Call | cst.Subscript):
            # The other conditions are turned round by mutmut's operators.
            self._add(node.test, cst.UnaryOperation(cst.Not(), node.test))
        return True

    def _left_out(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Expr):
            value = node.value
            return isinstance(value, cst.BaseString) or (isinstance(value, cst.Call) and self._left_out(value))
        if isinstance(node, cst.Call):
            return _name(node.func) in _TELLING or _owner(node.func) in _DRAWN
        if isinstance(node, cst.Assign):
            # What a star would import; nobody writes one.
            return any(isinstance(one.target, cst.Name) and one.target.value == "__all__" for one in node.targets)
        if isinstance(node, cst.Arg):
            return node.keyword is not None and node.keyword.value in _STATING
        if isinstance(node, cst.FormattedString | cst.ConcatenatedString):
            return not self._texts
        return isinstance(
            node, cst.Raise | cst.Annotation | cst.Decorator | cst.Assert | cst.Import | cst.ImportFrom | cst.TypeAlias
        )

    def _add(self, node: cst.CSTNode, changed: cst.CSTNode) -> None:
        place: CodeRange = self.get_metadata(WhitespaceInclusivePositionProvider, node)  # type: ignore[assignment]  # no default is asked for
        start = self._begins[place.start.line - 1] + place.start.column
        end = self._begins[place.end.line - 1] + place.end.column
        self.mutants.append(Mutant(self._file, self._source, start, end, self._module.code_for_node(changed)))


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.SimpleString):
        # One change tells whether a name matters; prose is no behaviour.
        if " " not in node.value:
            yield from list(operator_string(node))[:1]
        return
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            for changed in operator(node):
                if not (isinstance(node, cst.Call) and _drops_a_statement_of_fact(node, changed)):
                    yield changed
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
        yield cst.Pass()


def _drops_a_statement_of_fact(call: cst.Call, changed: cst.CSTNode) -> bool:
    def stated(node: cst.Call) -> list[cst.BaseExpression]:
        return [arg.value for arg in node.args if arg.keyword is not None and arg.keyword.value in _STATING]

    return isinstance(changed, cst.Call) and stated(call) != stated(changed)


def _name(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _owner(function: cst.BaseExpression) -> str:
    """Whose method it is: `axes` of `axes.xaxis.set_ticks`."""
    while isinstance(function, cst.Attribute):
        function = function.value
    return _name(function)
