"""The code of a slim converted folder: the mechanisms used, in plain PyTorch, in a few readable files."""

import functools
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from approx.checkpoints.shaking import OURS, Module, Shaken, docstring
from approx.mechanisms import MECHANISMS

NOTE = (
    "# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else."
)
MODEL = ("approx.seam.model", "ApproxModel")
INSTALLED = ("approx.seam.installed", "installed_model")
_REGISTRY = "approx.mechanisms"
_WIDTH = 120
# Functions that return False without compiled code: attention is never one operator, and only C takes notes.
_NEVER = frozenset({"is_one_operator", "exact_is_one_operator", "takes_notes", "has_notes"})
# Those that also return False if every mechanism decodes from an ordinary cache.
_WITHOUT_STATE = frozenset({"has_state", "keeps_state"})


def room(module: str) -> str:
    """Name of the file that holds a module's code."""
    parts = module.split(".")
    if module == INSTALLED[0]:
        return "approx_installed"
    if parts[:2] == ["approx_kernels", "ops"]:
        return f"approx_{parts[2]}"
    return f"approx_{parts[1]}"


@functools.cache
def slim_sources(mechanisms: frozenset[str]) -> Mapping[str, str]:
    """The texts of the files that some mechanisms need, by file name without `.py`.

    Args:
        mechanisms: Names of the mechanisms that the checkpoint uses.

    Raises:
        RuntimeError: if two modules of one file define the same name, or imports are circular.
    """
    used = sorted(mechanisms)
    states = any(MECHANISMS[name].decode_state != "cache" for name in used)
    shaken = Shaken(
        [MODEL, INSTALLED],
        {_REGISTRY: _registry(used)},
        _NEVER if states else _NEVER | _WITHOUT_STATE,
        frozenset() if states else frozenset({"decode"}),
    )
    files: dict[str, set[str]] = {}
    for module, _ in shaken.reached:
        files.setdefault(room(module), set()).add(module)
    needed: dict[str, set[str]] = {name: set() for name in files}
    texts = {name: _file(shaken, name, modules, needed[name]) for name, modules in files.items()}
    _ordered(needed)
    return texts


def _registry(mechanisms: list[str]) -> str:
    classes = {name: MECHANISMS[name] for name in mechanisms}
    imports = {f"from {kind.__module__} import {kind.__name__}\n" for kind in classes.values()}
    table = "".join(f'    "{name}": {kind.__name__},\n' for name, kind in classes.items())
    return (
        f'"""The mechanisms of this checkpoint by name."""\nfrom approx.mechanisms.mechanism import Mechanism\n'
        f"{''.join(sorted(imports))}\nMECHANISMS: dict[str, type[Mechanism]] = {{\n{table}}}\n"
    )


def _file(shaken: Shaken, name: str, modules: set[str], needed: set[str]) -> str:
    """The text of one file; adds the names of the files that it imports from to `needed`."""
    imports, beside = set(), {module: set() for module in modules}
    homes: dict[str, str] = {}
    for module, symbol in shaken.reached:
        if module not in modules:
            continue
        if not symbol.isdigit() and homes.setdefault(symbol, module) != module:
            raise RuntimeError(
                f"{homes[symbol]} and {module} share a file, and both define {symbol}. Rename one of them."
            )
        for taken in shaken.needs(module, symbol):
            ours = taken.module.split(".")[0] in OURS
            if ours and taken.bound != taken.name:
                raise RuntimeError(
                    f"{module} imports {taken.module}.{taken.name} as {taken.bound}. Rename it at its source."
                )
            if ours and room(taken.module) == name:
                beside[module].add(taken.module)
                continue
            source = f".{room(taken.module)}" if ours else taken.module
            imports.add((source, taken.name, taken.bound))
            needed |= {room(taken.module)} if ours else set()
    taken_names = {bound for _, _, bound in imports} & homes.keys()
    if taken_names:
        raise RuntimeError(f"{name} defines and imports {', '.join(sorted(taken_names))}. Rename one of them.")
    order = [module for module in _ordered(beside) if module in modules]
    parts = [part for module in order for part in _definitions(shaken, shaken.modules[module], len(modules) > 1)]
    future = any(shaken.modules[module].future for module in modules)
    head = [
        NOTE,
        f'"""{_purpose(shaken, modules)}"""\n',
        *(["from __future__ import annotations", ""] if future else []),
        *_import_lines(imports),
    ]
    # One blank line below the imports, or two before a definition.
    gap = "\n" if parts[0].startswith(("def ", "class ", "@")) else ""
    return "\n".join(head).rstrip("\n") + f"\n{gap}\n" + "\n\n\n".join(parts) + "\n"


def _purpose(shaken: Shaken, modules: set[str]) -> str:
    """The docstring of a file: that of its only module, or of the package of its modules."""
    last = max(modules)
    text = shaken.modules[last].purpose if len(modules) == 1 else docstring(last.rpartition(".")[0])
    return f"{text}\n" if "\n" in text else text


def _ordered(graph: dict[str, set[str]]) -> list[str]:
    try:
        return list(TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order())
    except CycleError as error:
        raise RuntimeError(f"Circular imports: {', '.join(error.args[1])}.") from error


def _definitions(shaken: Shaken, module: Module, several: bool) -> Iterator[str]:
    """The definitions of a module, consecutive constants together; with its docstring if a file has several modules."""
    texts: list[str] = []
    done: set[int] = set()
    for symbol, item in module.items.items():
        if (module.name, symbol) not in shaken.reached or id(item) in done:
            continue
        done.add(id(item))
        text = item.text()
        plain = not text.lstrip("#").startswith(("def ", "class ", "@")) and "\ndef " not in text
        if plain and texts and texts[-1][0] == "=":
            texts[-1] += f"\n{text}"
        else:
            texts.append(f"{'=' if plain else ' '}{text}")
    # One or two definitions are described well enough by their own docstrings.
    told = several and len(texts) > 2
    purpose = "".join(f"# {line}\n" for line in module.purpose.splitlines()) if told else ""
    for number, text in enumerate(texts):
        gap = "\n" if text[0] == "=" else "\n\n"
        yield f"{purpose}{gap}{text[1:]}" if purpose and not number else text[1:]


def _import_lines(imports: set[tuple[str, str, str]]) -> Iterator[str]:
    """Import statements in ruff's order: standard library, third party, this folder."""
    sections: dict[int, set[tuple[str, str, str]]] = {}
    for each in imports:
        top = each[0].split(".")[0]
        sections.setdefault(2 if not top else 0 if top in sys.stdlib_module_names else 1, set()).add(each)
    for section in sorted(sections):
        whole = sorted((module, bound) for module, name, bound in sections[section] if not name)
        yield from (f"import {module}" if bound == module else f"import {module} as {bound}" for module, bound in whole)
        names: dict[str, list[str]] = {}
        for module, name, bound in sorted(sections[section], key=lambda each: (each[0], _rank(each[1]))):
            if name:
                names.setdefault(module, []).append(name if name == bound else f"{name} as {bound}")
        for module, taken in names.items():
            line = f"from {module} import {', '.join(taken)}"
            broken = "".join(f"    {name},\n" for name in taken)
            yield line if len(line) <= _WIDTH else f"from {module} import (\n{broken})"
        yield ""


def _rank(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name
