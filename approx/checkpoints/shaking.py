"""Tree shaking: the definitions that some names need from the modules of this project, as source text."""

import ast
import functools
import importlib.util
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from approx.checkpoints.folding import folded

OURS = ("approx", "approx_kernels")
# Without compiled code, the fastest exact attention is PyTorch's.
_FASTEST = {"approx_kernels.ops.fastest.api": "approx_kernels.ops.exact.api", "fastest_attention": "exact_attention"}
# Class members that plan, fit or count a mechanism; kept only if code that a checkpoint needs reads them.
_PLANNING = re.compile(
    "__init_subclass__|flops|memory|exact_settings|for_layer|warning|calibrate|needs_calibration|takes_calibration|redraw"
    "|approximates|approximated_pairs|approximates_from|differs_from|sparse|supports_decode|trainable|takes_notes|padding|gradient|compiles|runs_c"
)
# Statements that register our operators with PyTorch's FLOP counter contain this.
_COUNTS = "flop_registry"

Symbol = tuple[str, str]


@dataclass(frozen=True)
class _Import:
    """An imported name: `module` and `name`, which is "" for the module itself."""

    module: str
    name: str
    bound: str


@dataclass
class _Item:
    """A top-level definition in pieces of text; the methods of a class are named pieces."""

    pieces: list[tuple[str, str]]
    kept: set[str] = field(default_factory=lambda: {""})

    def text(self) -> str:
        """The source, with the methods kept so far."""
        return "".join(piece for name, piece in self.pieces if name in self.kept).rstrip("\n")


@dataclass
class Module:
    """A source file in its plain form.

    Attributes:
        name: Its dotted name.
        purpose: Its docstring, or its first paragraph.
        items: Its definitions by name, in order; statements that define nothing are named by a number.
        imports: Its imports, by the name they are bound to.
        future: Whether it postpones the evaluation of annotations.
    """

    name: str
    purpose: str
    items: dict[str, _Item]
    imports: dict[str, _Import]
    future: bool


def source(module: str) -> str:
    """The source of one of our modules.

    Raises:
        RuntimeError: if it has no file.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{module} has no source file")
    return Path(spec.origin).read_text(encoding="utf-8")


def docstring(module: str) -> str:
    """The docstring of one of our modules or packages."""
    return ast.get_docstring(ast.parse(source(module))) or ""


@functools.cache
def _plain(module: str, false: frozenset[str]) -> str:
    text = source(module)
    for name, plain in _FASTEST.items():
        text = text.replace(name, plain)
    return folded(text, false)


class Shaken:
    """Everything reachable from some names.

    Args:
        start: Modules and names in them.
        given: Sources that replace those of modules of the package.
        false: Functions that always return False.
        unused: Methods that nothing calls.

    Raises:
        RuntimeError: if a name is not defined where it is imported from.
    """

    def __init__(
        self, start: Iterable[Symbol], given: Mapping[str, str], false: frozenset[str], unused: frozenset[str]
    ) -> None:
        self._given, self._false, self._unused = given, false, unused
        self.modules: dict[str, Module] = {}
        self.reached: dict[Symbol, set[str]] = {}
        waiting = list(start)
        while waiting:
            while waiting:
                waiting += self._reach(*waiting.pop())
            waiting = [(module, name) for (module, name) in self.reached if self._grows(module, name)]
            for symbol in waiting:
                del self.reached[symbol]

    def needs(self, module: str, name: str) -> Iterator[_Import]:
        """The imports of the names that a definition reads but its own module does not define."""
        for each in sorted(self.reached[module, name]):
            if each in self.modules[module].items:
                continue
            taken = self.modules[module].imports.get(each)
            if taken is not None and taken.module.split(".")[0] in OURS:
                yield _Import(*self._origin(taken), taken.bound)
            elif taken is not None:
                yield taken

    def _reach(self, module: str, name: str) -> list[Symbol]:
        if (module, name) in self.reached:
            return []
        if module not in self.modules:
            self._open(module)
        own = self.modules[module]
        if name not in own.items:
            raise RuntimeError(f"{module} does not define {name}")
        read = _names(own.items[name].text())
        self.reached[module, name] = read
        following = [(module, each) for each in read if each in own.items]
        following += [
            (each.module, each.name) for each in self.needs(module, name) if each.module.split(".")[0] in OURS
        ]
        # Statements that run on import, such as registrations, belong to every definition of the module.
        return following + [(module, each) for each in own.items if each.isdigit()]

    def _open(self, module: str) -> None:
        own = _read(module, self._given.get(module) or _plain(module, self._false))
        self.modules[module] = own
        for item in own.items.values():
            item.kept -= self._unused

    def _origin(self, taken: _Import) -> Symbol:
        module, name = taken.module, taken.name
        if module not in self.modules:
            self._open(module)
        own = self.modules[module]
        if name not in own.items and name in own.imports:
            return self._origin(own.imports[name])
        return module, name

    def _grows(self, module: str, name: str) -> bool:
        """Keep the private and planning members that reached code uses; return whether any were added."""
        item = self.modules[module].items[name]
        if len(item.pieces) == 1:
            return False
        reached = "".join(self.modules[each].items[symbol].text() for each, symbol in self.reached)
        asked = {*re.findall(r"(?:\.|\")(_\w+)", reached), *re.findall(r"\b(?:self|mechanism|each)\.(\w+)", reached)}
        asked -= self._unused
        before = len(item.kept)
        item.kept |= {method for method, _ in item.pieces if method in asked}
        return len(item.kept) > before


def _names(text: str) -> set[str]:
    """Names that a definition reads and does not bind itself."""
    top = symtable.symtable(text, "", "exec")
    waiting, read = list(top.get_children()), {each.get_name() for each in top.get_symbols() if each.is_referenced()}
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        read |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return read


def _read(name: str, text: str) -> Module:
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    purpose = (ast.get_docstring(tree) or "").split("\n\n")[0]
    module = Module(name, purpose, {}, {}, future=False)
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            module.future = True
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name
                source = (node.module or "", alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, "")
                module.imports[bound] = _Import(*source, bound)
        elif bound := _defined(node):
            item = _Item(_pieces(node, lines))
            item.kept |= {member for member, _ in item.pieces if not _waits(member)}
            module.items |= dict.fromkeys(bound, item)
        elif not isinstance(getattr(node, "value", None), ast.Constant) and _COUNTS not in ast.unparse(node):
            module.items[str(number)] = _Item(_pieces(node, lines))
    module.items.pop("__all__", None)
    return module


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _pieces(node: ast.stmt, lines: list[str]) -> list[tuple[str, str]]:
    """The text of a statement with the comments above it; methods and planning members of a class are separate pieces."""
    at, last = _first_line(node, lines), node.end_lineno or 0
    pieces = []
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        method = isinstance(member, ast.FunctionDef)
        name = member.name if method else ast.unparse(member.target) if isinstance(member, ast.AnnAssign) else ""
        if method or _PLANNING.fullmatch(name):
            first, end = _first_line(member, lines), member.end_lineno or 0
            before, text = "".join(lines[at:first]), "".join(lines[first:end])
            # A blank line precedes each method, except directly below the head of the class.
            gap = "\n" if method and (pieces or len(before.splitlines()) > 1) else ""
            pieces += [("", before.rstrip() + "\n" if method else before), (name, gap + text)]
            at = end
    pieces.append(("", "".join(lines[at:last])))
    return [(name, text) for name, text in pieces if text.strip()]


def _waits(member: str) -> bool:
    """Whether a class member is kept only if something uses it."""
    dunder = member.startswith("__") and member.endswith("__")
    return bool(_PLANNING.fullmatch(member)) or (member.startswith("_") and not dunder)


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first
