"""The code that travels with a converted checkpoint: our own sources, flattened, with relative imports only."""

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from approx.mechanisms import MECHANISMS
from approx.seam.transformers_internals import auto_classes
from approx_kernels.cpu import sources as c_sources

_OURS = ("approx", "approx_kernels")
_REGISTRY = "approx.mechanisms"
_START = "approx.seam.model"
_C_SOURCES = "approx_kernels.cpu.sources"
_NOTE = (
    "# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else."
)


def config_class_name(config_class: type) -> str:
    """Name of the converted config class: `BertConfig` -> `ApproxBertConfig`."""
    return f"Approx{config_class.__name__}"


def model_class_name(model_class: type) -> str:
    """Name of the converted model class: `BertModel` -> `ApproxBertModel`."""
    return f"Approx{model_class.__name__}"


def auto_map(config_class: type, model_class: type) -> dict[str, str]:
    """The `auto_map` of a converted config: auto class -> file and class of the code that travels."""
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    table = {"AutoConfig": f"configuration_approx_{_file(family)}.{config_class_name(config_class)}"}
    for auto, stock in auto_classes(family).items():
        table[auto] = f"modeling_approx_{_file(family)}.Approx{stock}"
    if model_class.__name__ not in auto_classes(family).values():
        table.setdefault("AutoModel", f"modeling_approx_{_file(family)}.{model_class_name(model_class)}")
    return table


def write_code(folder: Path, config_class: type, model_class: type, mechanisms: Iterable[str]) -> list[Path]:
    """Write the code that makes a converted checkpoint loadable without this tool.

    Args:
        folder: Where config.json will stand.
        config_class: Stock config class of the family.
        model_class: Stock class of the converted model.
        mechanisms: Names of the mechanisms that the checkpoint uses; only their code travels.

    Returns:
        The files written.
    """
    sources = {_flat(_REGISTRY): _registry(sorted(set(mechanisms)))}
    waiting = [_START, *(MECHANISMS[name].__module__ for name in set(mechanisms))]
    seen = {_REGISTRY}
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        text, needed = _flatten(module)
        sources[_flat(module)] = text
        waiting += needed
    if _C_SOURCES in seen:
        whole = "".join(sources.values())
        used = {name: c_sources.source(name) for name in c_sources.names() if f'"{name}"' in whole}
        sources[_flat(_C_SOURCES)] = _inlined(used)
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    sources[f"configuration_approx_{_file(family)}"] = _configuration(config_class)
    sources[f"modeling_approx_{_file(family)}"] = _modeling(config_class, model_class)
    written = []
    for name, text in sorted(sources.items()):
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _file(family: str) -> str:
    return family.replace("-", "_")


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _flatten(module: str) -> tuple[str, list[str]]:
    """Source of a module with its own imports made relative and flat, and the modules it needs."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{module} has no source file")
    text = Path(spec.origin).read_text(encoding="utf-8")
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    lines, needed = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in _OURS for alias in node.names):
            raise RuntimeError(f"{module}, line {node.lineno}: write 'from … import …', so that the code can travel")
        if not isinstance(node, ast.ImportFrom):
            continue
        name = node.module or ""
        if node.level:
            parts = package.split(".")
            name = ".".join([*parts[: len(parts) - node.level + 1], name]).rstrip(".")
        if name.split(".")[0] not in _OURS:
            continue
        needed.append(name)
        written = "." * node.level + (node.module or "")
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(
            f"from {written} import", f"from .{_flat(name)} import", 1
        )
    return "\n".join([_NOTE, *lines, ""]), needed


def _registry(mechanisms: list[str]) -> str:
    classes = {name: MECHANISMS[name] for name in mechanisms}
    imports = [f"from .{_flat(kind.__module__)} import {kind.__name__}" for kind in classes.values()]
    table = ", ".join(f'"{name}": {kind.__name__}' for name, kind in classes.items())
    return "\n".join([_NOTE, *imports, "", f"MECHANISMS = {{{table}}}", ""])


def _inlined(sources: dict[str, str]) -> str:
    """A module with the C in it, for transformers copies no files but those of Python."""
    texts = "".join(f'    "{name}": r"""\n{text}""",\n' for name, text in sources.items())
    return (
        f"{_NOTE}\n_SOURCES = {{\n{texts}}}\n\n\ndef source(name: str) -> str:\n"
        '    """The text of one C source."""\n    return _SOURCES[name]\n'
    )


def _configuration(config_class: type) -> str:
    name = config_class.__name__
    return f'''{_NOTE}
from transformers import {name}


class {config_class_name(config_class)}({name}):
    """{name} of a checkpoint whose attention was exchanged; the field `approx` says where and how."""

    model_type = "approx_{config_class.model_type}"
    approx: dict | None = None
'''  # type: ignore[attr-defined]  # every config class has model_type


def _modeling(config_class: type, model_class: type) -> str:
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    stock = sorted({*auto_classes(family).values(), model_class.__name__})
    classes = "".join(
        f"\n\nclass Approx{name}(ApproxModel, {name}):\n"
        f'    """{name} with exchanged attention."""\n\n    config_class = {config_class_name(config_class)}\n'
        for name in stock
    )
    imports = "".join(f"    {name},\n" for name in stock)
    return (
        f"{_NOTE}\nfrom transformers import (\n{imports})\n\n"
        f"from .{_flat(_START)} import ApproxModel\n"
        f"from .configuration_approx_{_file(family)} import {config_class_name(config_class)}\n{classes}"
    )
