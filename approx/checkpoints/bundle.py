"""The code written into a converted checkpoint: slim, in plain PyTorch, or our own sources with C and Triton.

Both kinds are files beside the weights with relative imports only, since transformers does not copy folders.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

from approx.checkpoints.shaking import OURS, source
from approx.checkpoints.slim import INSTALLED, MODEL, NOTE, room, slim_sources
from approx.mechanisms import MECHANISMS
from approx.seam.dispatch import FORMAT
from approx.seam.transformers_internals import auto_classes
from approx.version import __version__
from approx_kernels.cpu import sources as c_sources

_REGISTRY = "approx.mechanisms"
_C_SOURCES = "approx_kernels.cpu.sources"
_CHOICE = f"""
{MODEL[1]} = {INSTALLED[1]}(layout={FORMAT}, version="{__version__}")
if {MODEL[1]} is None:
    from .{room(MODEL[0])} import {MODEL[1]}
"""


def config_class_name(config_class: type) -> str:
    """Name of the converted config class: `BertConfig` -> `ApproxBertConfig`."""
    return f"Approx{config_class.__name__}"


def model_class_name(model_class: type) -> str:
    """Name of the converted model class: `BertModel` -> `ApproxBertModel`."""
    return f"Approx{model_class.__name__}"


def auto_map(config_class: type, model_class: type) -> dict[str, str]:
    """The `auto_map` of a converted config: auto class -> file and class of the folder's code."""
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    table = {"AutoConfig": f"configuration_approx_{_file(family)}.{config_class_name(config_class)}"}
    for auto, stock in auto_classes(family).items():
        table[auto] = f"modeling_approx_{_file(family)}.Approx{stock}"
    if model_class.__name__ not in auto_classes(family).values():
        table.setdefault("AutoModel", f"modeling_approx_{_file(family)}.{model_class_name(model_class)}")
    return table


def write_code(
    folder: Path, config_class: type, model_class: type, mechanisms: Iterable[str], *, kernels: bool
) -> list[Path]:
    """Write the code that makes a converted checkpoint loadable without this tool.

    Args:
        folder: Folder of config.json.
        config_class: Stock config class of the family.
        model_class: Stock class of the converted model.
        mechanisms: Names of the mechanisms that the checkpoint uses; only their code is written.
        kernels: Whether to write the mechanisms' C and Triton too, in many files.

    Returns:
        The files written.
    """
    used = frozenset(mechanisms)
    sources = dict(_with_kernels(used) if kernels else slim_sources(used))
    family = _file(config_class.model_type)  # type: ignore[attr-defined]  # every config class has it
    sources[f"configuration_approx_{family}"] = _configuration(config_class)
    sources[f"modeling_approx_{family}"] = _modeling(config_class, model_class, slim=not kernels)
    written = []
    for name, text in sorted(sources.items()):
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _with_kernels(mechanisms: frozenset[str]) -> dict[str, str]:
    """The sources of all modules that the mechanisms import."""
    sources = {_flat(_REGISTRY): _registry(sorted(mechanisms))}
    waiting = [MODEL[0], *(MECHANISMS[name].__module__ for name in mechanisms)]
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
    return sources


def _file(family: str) -> str:
    return family.replace("-", "_")


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _flatten(module: str) -> tuple[str, list[str]]:
    """Source of a module with imports of our modules made relative and flat, and the modules it needs."""
    text = source(module)
    lines, needed = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in OURS for alias in node.names):
            raise RuntimeError(f"{module}, line {node.lineno}: write 'from … import …', so that the code can be copied")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            needed.append(node.module)
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(
                f"from {node.module} import", f"from .{_flat(node.module)} import", 1
            )
    return "\n".join([NOTE, *lines, ""]), needed


def _registry(mechanisms: list[str]) -> str:
    classes = {name: MECHANISMS[name] for name in mechanisms}
    imports = [f"from .{_flat(kind.__module__)} import {kind.__name__}" for kind in classes.values()]
    table = ", ".join(f'"{name}": {kind.__name__}' for name, kind in classes.items())
    return "\n".join([NOTE, *imports, "", f"MECHANISMS = {{{table}}}", ""])


def _inlined(sources: dict[str, str]) -> str:
    """A Python module that holds the C sources, since transformers copies only Python files."""
    texts = "".join(f'    "{name}": r"""\n{text}""",\n' for name, text in sources.items())
    return (
        f"{NOTE}\n_SOURCES = {{\n{texts}}}\n\n\ndef source(name: str) -> str:\n"
        '    """The text of one C source."""\n    return _SOURCES[name]\n'
    )


def _configuration(config_class: type) -> str:
    name = config_class.__name__
    return f'''{NOTE}
"""The converted config of the family."""

from transformers import {name}


class {config_class_name(config_class)}({name}):
    """{name} of a checkpoint whose attention was replaced; the field `approx` says where and how."""

    model_type = "approx_{config_class.model_type}"
    approx: dict | None = None
'''  # type: ignore[attr-defined]  # every config class has model_type


def _modeling(config_class: type, model_class: type, *, slim: bool) -> str:
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    stock = sorted({*auto_classes(family).values(), model_class.__name__})
    classes = "".join(
        f"\n\nclass Approx{name}(ApproxModel, {name}):\n"
        f'    """{name} with replaced attention."""\n\n    config_class = {config_class_name(config_class)}\n'
        for name in stock
    )
    imports = "".join(f"    {name},\n" for name in stock)
    # A slim folder uses the installed package's base class if there is one, and with it C and Triton.
    base, choice = (INSTALLED, _CHOICE) if slim else (MODEL, "")
    file = room(base[0]) if slim else _flat(base[0])
    return (
        f'{NOTE}\n"""The converted classes of the family."""\n\nfrom transformers import (\n{imports})\n\n'
        f"from .{file} import {base[1]}\n"
        f"from .configuration_approx_{_file(family)} import {config_class_name(config_class)}\n{choice}{classes}"
    )
