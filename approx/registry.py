"""Registries of names: what this package has, and what other installed packages add through entry points."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from approx.errors import ApproxError, Exit

T = TypeVar("T")


class Origin(NamedTuple):
    """The installed package that an entry comes from."""

    package: str
    version: str

    @property
    def pinned(self) -> str:
        """The package as pip takes it: `approx-dilated==1.0`."""
        return f"{self.package}=={self.version}"


def added(group: str) -> tuple[str, ...]:
    """The names that other installed packages give in an entry point group; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


@cache
def written(module: str, table: str) -> Mapping[str, str]:
    """The keys of a table that a module defines, and the names of its values; read from its source, not imported.

    Args:
        module: The module, whose import may take seconds.
        table: A dictionary, whose keys are texts, or a tuple of texts.
    """
    for name, value in _assignments(_parsed(module)):
        if name == table:
            keys = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
            values = value.values if isinstance(value, ast.Dict) else keys
            return {ast.literal_eval(key): getattr(one, "id", "") for key, one in zip(keys, values, strict=True) if key}
    raise ImportError(f"{module} defines no {table}")


@cache
def class_facts(module: str, table: str, attribute: str) -> Mapping[str, Any]:
    """Key of a table of classes -> a literal attribute of its class; read from source, since importing it takes seconds.

    Classes without the attribute are left out; they may inherit it from a class of their own file.

    Args:
        module: The module of the table, which imports the classes by name.
        table: Its name.
        attribute: Name of the class attribute.
    """
    facts = {}
    for key, classes in _classes(module, table):
        if value := next(
            (found[attribute] for one in classes if attribute in (found := dict(_assignments(one)))), None
        ):
            facts[key] = ast.literal_eval(value)
    return facts


@cache
def class_defaults(module: str, table: str) -> Mapping[str, Mapping[str, Any]]:
    """Key of a table of classes -> keywords of its constructor and their defaults, of those that are literals; read from source.

    Args: as for `class_facts`.
    """
    defaults = {}
    for key, classes in _classes(module, table):
        functions = (node for one in classes for node in one.body if isinstance(node, ast.FunctionDef))
        made = next((one.args for one in functions if one.name == "__init__"), None)
        pairs = [] if made is None else zip(made.kwonlyargs, made.kw_defaults, strict=True)
        defaults[key] = {one.arg: value.value for one, value in pairs if isinstance(value, ast.Constant)}
    return defaults


def _classes(module: str, table: str) -> Iterator[tuple[str, list[ast.ClassDef]]]:
    """The keys of a table of classes, each with its class and the bases of that in its file."""
    nodes = ast.walk(_parsed(module))
    homes = {one.name: node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    for key, name in written(module, table).items():
        classes = {node.name: node for node in _parsed(homes[name]).body if isinstance(node, ast.ClassDef)}
        owners = [classes[name]]
        for owner in owners:
            owners += [classes[base.id] for base in owner.bases if isinstance(base, ast.Name) and base.id in classes]
        yield key, owners


@cache
def _parsed(module: str) -> ast.Module:
    # Looking for a module with `find_spec` imports the packages around it.
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"The source of {module} is missing")
    place = Path(spec.origin).parent.joinpath(*inner)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _assignments(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for line in node.body:
        targets = (
            [line.target] if isinstance(line, ast.AnnAssign) else line.targets if isinstance(line, ast.Assign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
                yield target.id, line.value


class Registry(MutableMapping[str, T], Generic[T]):
    """Names, and what they stand for.

    What another package names in an entry point group is imported when that name is first looked up, or when all names
    are listed. An entry that cannot be used is left out of the list and of `len`; looking it up raises the reason, and
    `broken` lists the reasons.

    Attributes:
        here: The entries of this package, and those that were added at run time.

    Args:
        group: The entry point group, such as `approx.mechanisms`.
        noun: What an entry is, for messages.
        here: The entries of this package.
        check: Returns what was loaded from an entry point, or raises an exception that says what is wrong with it.

    Raises:
        KeyError: in a look-up, if the name is unknown.
        ApproxError: in a look-up, if the entry of another package cannot be used.
    """

    def __init__(self, group: str, noun: str, here: Mapping[str, T], check: Callable[[object], T]) -> None:
        self.group, self.noun = group, noun
        self.here, self._check = dict(here), check
        self.read_again()

    def read_again(self) -> None:
        """Forget what other packages add; the next look-up finds what is installed by then."""
        self._found: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, T] = {}
        self._wrong: dict[str, str] = {}

    @property
    def _points(self) -> dict[str, list[EntryPoint]]:
        if self._found is None:
            self._found = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _origin(point))):
                self._found.setdefault(point.name, []).append(point)
        return self._found

    def __getitem__(self, name: str) -> T:
        if name in self.here:
            return self.here[name]
        if name not in self._points:
            raise KeyError(name)
        if name not in self._loaded and name not in self._wrong:
            self._load(name)
        if name in self._wrong:
            raise ApproxError(self._wrong[name], Exit.MISSING)
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self.here[name] = value

    def __delitem__(self, name: str) -> None:
        del self.here[name]

    def __iter__(self) -> Iterator[str]:
        yield from list(self.here)
        for name in self._points:
            if name in self.here:
                continue
            if name not in self._loaded and name not in self._wrong:
                self._load(name)
            if name in self._loaded:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def origin(self, name: str) -> Origin | None:
        """The package that a name comes from; None if it is this one, if it was added at run time, or if it is unknown."""
        return None if name in self.here or name not in self._points else _origin(self._points[name][0])

    def broken(self) -> list[str]:
        """Why entries of other packages are not used, one line for each, with the package and the remedy."""
        list(self)
        taken = [
            f"The {self.noun} '{name}' of the package {_origin(point).pinned} is not used, because approx has one of that "
            f"name. Ask its authors for another name, or uninstall it: pip uninstall {_origin(point).package}"
            for name, points in self._points.items()
            if name in self.here
            for point in points
        ]
        return [*taken, *self._wrong.values()]

    def _load(self, name: str) -> None:
        points = self._points[name]
        where = _origin(points[0])
        if len(points) > 1:
            packages = " and ".join(_origin(point).pinned for point in points)
            self._wrong[name] = (
                f"The {self.noun} '{name}' cannot be used, because {packages} both define it. Uninstall one of them."
            )
            return
        try:
            if not re.fullmatch(r"[a-z0-9]+([-_/][a-z0-9]+)*", name):
                raise ValueError("its name is not lower-case letters and digits, with - between words")
            self._loaded[name] = self._check(points[0].load())
        except (Exception, SystemExit) as error:
            # Importing another package's code can raise anything.
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._wrong[name] = (
                f"The {self.noun} '{name}' of the package {where.pinned} cannot be used: {points[0].value} fails with "
                f"{why.rstrip('.')}. Update the package, or uninstall it: pip uninstall {where.package}"
            )


def _origin(point: EntryPoint) -> Origin:
    # Only entry points read from a folder without metadata have no distribution; `entry_points` finds none of these.
    return Origin(point.dist.name, point.dist.version) if point.dist else Origin(point.module, "unknown")
