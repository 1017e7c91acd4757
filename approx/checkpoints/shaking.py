"""Of the modules of this project what some names need, definition by definition, as the text that stands in the source."""

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
# Where nothing is compiled, the fastest exact attention is PyTorch's.
_FASTEST = {"approx_kernels.ops.fastest.api": "approx_kernels.ops.exact.api", "fastest_attention": "exact_attention"}
# Methods and facts of a class that plan, fit or count a mechanism. They stay where what a checkpoint needs reads them.
_PLANNING = re.compile(
    "__init_subclass__|flops|memory|exact_settings|for_layer|warning|calibrate|needs_calibration|takes_calibration|redraw"
    "|approximates|approximates_from|differs_from|sparse|supports_decode|trainable|takes_notes|padding|gradient|compiles|runs_c"
)
# PyTorch's counter of operations is told ours by statements of a module.
_COUNTS = "flop_registry"

Symbol = tuple[str, str]


@dataclass(frozen=True)
class _Import:
    """A name that a module takes from elsewhere: `module` and `name`, "" where it is the module itself."""

    module: str
    name: str
    bound: str


@dataclass
class _Item:
    """A definition at the top of a module, in pieces of text; the methods of a class are pieces with names."""

    pieces: list[tuple[str, str]]
    kept: set[str] = field(default_factory=lambda: {""})

    def text(self) -> str:
        """The source, with the methods that are kept so far."""
        return "".join(piece for name, piece in self.pieces if name in self.kept).rstrip("\n")


@dataclass
class Module:
    """A source file in its plain form.

    Attributes:
        name: Its dotted name.
        purpose: Its docstring, or its first paragraph.
        items: Its definitions by name, in their order; statements that define nothing have a number for a name.
        imports: What it takes from elsewhere, by the name it is bound to.
        future: Whether its annotations are not evaluated.
    """

    name: str
    purpose: str
    items: dict[str, _Item]
    imports: dict[str, _Import]
    future: bool


def source(module: str) -> str:
    """The text of a module of ours.

    Raises:
        RuntimeError: if it has no file.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{module} has no source file")
    return Path(spec.origin).read_text(encoding="utf-8")


def docstring(module: str) -> str:
    """The docstring of a module or package of ours."""
    return ast.get_docstring(ast.parse(source(module))) or ""


@functools.cache
def _plain(module: str, false: frozenset[str]) -> str:
    text = source(module)
    for name, plain in _FASTEST.items():
        text = text.replace(name, plain)
    return folded(text, false)


class Shaken:
    """What is reached from some names.

    Args:
        start: Modules and names in them.
        given: Texts of modules that stand in for those of the package.
        false: Functions that give False, whoever calls them.
        unused: Methods that nothing calls.

    Raises:
        RuntimeError: if what is reached cannot be told by names.
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
        """Where the names come from that a definition reads and its own module does not define."""
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
        # What a module does when it is imported, such as to register, belongs to all that it defines.
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
        """Keep the private and the planning members that what is reached asks for; whether there are more than before."""
        item = self.modules[module].items[name]
        if len(item.pieces) == 1:
            return False
        said = "".join(self.modules[each].items[symbol].text() for each, symbol in self.reached)
        asked = {*re.findall(r"(?:\.|\")(_\w+)", said), *re.findall(r"\b(?:self|mechanism|each)\.(\w+)", said)}
        asked -= self._unused
        before = len(item.kept)
        item.kept |= {method for method, _ in item.pieces if method in asked}
        return len(item.kept) > before


def _names(text: str) -> set[str]:
    """Names that a definition reads and does not bind itself."""
    top = symtable.symtable(text, "", "exec")
    waiting, found = list(top.get_children()), {each.get_name() for each in top.get_symbols() if each.is_referenced()}
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        found |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return found


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
    """The text of a statement with the comments above it; of a class its methods and the facts for planning are apart."""
    at, last = _first_line(node, lines), node.end_lineno or 0
    pieces = []
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        method = isinstance(member, ast.FunctionDef)
        name = member.name if method else ast.unparse(member.target) if isinstance(member, ast.AnnAssign) else ""
        if method or _PLANNING.fullmatch(name):
            first, end = _first_line(member, lines), member.end_lineno or 0
            before, text = "".join(lines[at:first]), "".join(lines[first:end])
            # Methods are parted by a blank line from each other and from what stands above, but for the head of the class.
            gap = "\n" if method and (pieces or len(before.splitlines()) > 1) else ""
            pieces += [("", before.rstrip() + "\n" if method else before), (name, gap + text)]
            at = end
    pieces.append(("", "".join(lines[at:last])))
    return [(name, text) for name, text in pieces if text.strip()]


def _waits(member: str) -> bool:
    """Whether a member of a class is kept only where something asks for it."""
    dunder = member.startswith("__") and member.endswith("__")
    return bool(_PLANNING.fullmatch(member)) or (member.startswith("_") and not dunder)


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first
