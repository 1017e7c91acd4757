"""The code written into a converted folder: whole files of this package, without dispatch unless C and Triton go along.

All files are next to the weights and import each other relatively, since transformers does not copy folders. In place
of an op's `api.py`, which chooses among implementations, its `reference.py` travels, which has the same names in plain
PyTorch.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from approx.mechanisms import BUILT_IN, MECHANISMS
from approx.seam.dispatch import FORMAT
from approx.seam.internals import INSTALL, auto_classes
from approx.version import __version__
from approx_kernels.cpu import sources as c_sources

NOTE = (
    "# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else."
)
_KERNEL_NOTE = (
    "# Part of a package of attention functions made by approx (Apache-2.0); it needs torch and transformers."
)
OURS = ("approx", "approx_kernels")
_MODEL, _INTERNALS, _MECHANISM = "approx.seam.model", "approx.seam.internals", "approx.mechanisms.mechanism"
_UNCONVERTED = "approx.seam.unconverted"
_ONE_OPERATOR = "approx_kernels.dispatch.opaque"
_C_SOURCES = "approx_kernels.cpu.sources"
# Without compiled code, the fastest exact attention is PyTorch's.
_EXACT = re.compile(r"approx_kernels\.ops\.(?:exact|fastest|flash)\.api")
_API = re.compile(r"(approx_kernels\.ops\.\w+)\.api")

_KERNEL = '''{note}
"""Attention functions for models that are not converted."""

from typing import Any

{code}
# transformers refuses packages that have neither FlashAttention's functions nor this name.
flash_attn_forward = attention_function("improved_clustered")


def __getattr__(name: str) -> Any:
    """The attention function of a name, as `attention_function` explains."""
    if name.startswith("_") or name in ("flash_attn_varlen_func", "sparse_atten_func", "supports_flash_attn"):
        raise AttributeError(name)
    return attention_function(name)
'''


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
    folder: Path,
    config_class: type,
    model_class: type,
    mechanisms: Iterable[str],
    *,
    kernels: bool,
    packages: Mapping[str, str] = MappingProxyType({}),
) -> list[Path]:
    """Write the code that makes a converted checkpoint loadable without this tool.

    Args:
        folder: Folder of config.json.
        config_class: Stock config class of the family.
        model_class: Stock class of the converted model.
        mechanisms: Names of the mechanisms that the checkpoint uses; only their code is written.
        kernels: Whether to write dispatch, C and Triton too, in many files.
        packages: Mechanism -> package, for those that are code of another package, which does not go along. The folder
            then loads only where approx and that package are installed.

    Returns:
        The files written.
    """
    used = tuple(sorted(set(mechanisms)))
    family = _file(config_class.model_type)  # type: ignore[attr-defined]  # every config class has it
    base_class = _refusal(packages) if packages else _own_code(used, kernels)
    sources = {
        **(_only(_INTERNALS) if packages else _sources(used, kernels)),
        f"configuration_approx_{family}": _configuration(config_class),
        f"modeling_approx_{family}": _modeling(
            config_class, model_class, base_class, kernels=kernels, required=bool(packages)
        ),
    }
    written = []
    for name, text in sorted(sources.items()):
        path = folder / f"{name}.py"
        path.write_text(text.replace(NOTE, _note(packages), 1), encoding="utf-8")
        written.append(path)
    return written


def write_kernel(folder: Path, name: str) -> list[str]:
    """Write a package of Hugging Face's `kernels`, whose attention functions run in models that are not converted.

    It holds the C and Triton of every mechanism of this package that is neither trained nor fitted to a model.

    Args:
        folder: The repository to create, a folder that exists.
        name: Its name on a hub, without the owner: small letters, digits and hyphens.

    Returns:
        The mechanisms.
    """
    used = tuple(sorted(name for name, kind in BUILT_IN.items() if not (kind.trainable or kind.always_exact)))
    place = folder / "build" / "torch-universal"
    place.mkdir(parents=True)
    sources = {name: text.replace(NOTE, _KERNEL_NOTE, 1) for name, text in _sources(used, True, _UNCONVERTED).items()}
    sources["__init__"] = _KERNEL.format(
        note=_KERNEL_NOTE, code=_own_code(used, True, (_UNCONVERTED, "attention_function"))
    )
    for file, text in sources.items():
        (place / f"{file}.py").write_text(text, encoding="utf-8")
    about = {
        "id": f"{name.replace('-', '_')}_{hashlib.sha256(''.join(sources.values()).encode()).hexdigest()[:12]}",
        "name": name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (place / "metadata.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return list(used)


def _file(family: str) -> str:
    return family.replace("-", "_")


def _flat(module: str) -> str:
    return module.replace(".", "_")


@functools.cache
def _sources(mechanisms: tuple[str, ...], kernels: bool, root: str = _MODEL) -> Mapping[str, str]:
    """The texts of all modules that `root` and the mechanisms import, by file name without `.py`."""
    waiting = [root, _ONE_OPERATOR if kernels else _INTERNALS, *(MECHANISMS[name].__module__ for name in mechanisms)]
    seen: set[str] = set()
    sources = {}
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            sources[_flat(module)], needed = _flatten(module, kernels)
            waiting += needed
    if _C_SOURCES in seen:
        whole = "".join(sources.values())
        used = {name: c_sources.source(name) for name in c_sources.names() if f'"{name}"' in whole}
        sources[_flat(_C_SOURCES)] = _inlined(used)
    return sources


def _only(module: str) -> Mapping[str, str]:
    """The text of a module that imports no other of ours, by file name without `.py`."""
    return {_flat(module): _flatten(module, kernels=False)[0]}


def _flatten(module: str, kernels: bool) -> tuple[str, list[str]]:
    """The text of a module that imports files of its folder in place of our modules, and the modules it needs."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{module} has no source file")
    text = Path(spec.origin).read_text(encoding="utf-8")
    lines, needed = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in OURS for alias in node.names):
            raise RuntimeError(f"{module}, line {node.lineno}: write 'from … import …', so that the code can travel")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            source = node.module if kernels else _plain(node.module)
            needed.append(source)
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(
                f"from {node.module} import", f"from .{_flat(source)} import", 1
            )
    return "\n".join([NOTE, *lines, ""]), needed


def _plain(module: str) -> str:
    """The module that takes the place of another where only PyTorch runs."""
    return _API.sub(r"\1.reference", _EXACT.sub("approx_kernels.ops.exact.reference", module))


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


def _modeling(config_class: type, model_class: type, base_class: str, *, kernels: bool, required: bool) -> str:
    family = config_class.model_type  # type: ignore[attr-defined]  # every config class has it
    stock = sorted({*auto_classes(family).values(), model_class.__name__})
    classes = "".join(
        f"\n\nclass Approx{name}(ApproxModel, {name}):\n"
        f'    """{name} with replaced attention."""\n\n    config_class = {config_class_name(config_class)}\n'
        for name in stock
    )
    imports = "".join(f"    {name},\n" for name in stock)
    configuration = f"from .configuration_approx_{_file(family)} import {config_class_name(config_class)}\n"
    if not kernels:
        # The installed package's base class runs C and Triton.
        configuration = f"from .{_flat(_INTERNALS)} import installed_model\n{configuration}"
        how = ", required=True" if required else ""
        indented = "".join(f"    {line}\n" for line in base_class.splitlines())
        base_class = (
            f'\nApproxModel = installed_model(layout={FORMAT}, version="{__version__}"{how})\n'
            f"if ApproxModel is None:\n{indented}"
        )
    return (
        f'{NOTE}\n"""The converted classes of the family."""\n\nfrom transformers import (\n{imports})\n\n'
        f"{configuration}{base_class}{classes}"
    )


def _note(packages: Mapping[str, str]) -> str:
    if not packages:
        return NOTE
    needed = ", ".join(["torch", "transformers", "approx-attention", *dict.fromkeys(packages.values())])
    return NOTE.replace("torch and transformers, and nothing else", needed)


def _refusal(packages: Mapping[str, str]) -> str:
    """A statement that says what a folder needs, where it is loaded without the installed package."""
    names = ", ".join(f"'{name}' of the package {package}" for name, package in packages.items())
    ours = f"approx-attention>={__version__},<{int(__version__.split('.')[0]) + 1}"
    needed = " ".join(dict.fromkeys(packages.values()))
    message = (
        f"This checkpoint attends by code that is not in its folder: {names}. Install what it needs, if you trust it: "
        f"pip install {needed}; and {ours}. {INSTALL}"
    )
    return f"raise ImportError({message!r})\n"


def _own_code(mechanisms: Iterable[str], kernels: bool, root: tuple[str, str] = (_MODEL, "ApproxModel")) -> str:
    """Statements that import a name of the folder's module, and tell it the mechanisms that the folder uses."""
    classes = {name: MECHANISMS[name] for name in mechanisms}
    imports = {f"from .{_flat(kind.__module__)} import {kind.__name__}\n" for kind in classes.values()}
    imports |= {f"from .{_flat(root[0])} import {root[1]}\n"}
    imports |= {f"from .{_flat(_MECHANISM)} import MECHANISMS{', Mechanism' if kernels else ''}\n"}
    imports |= {f"from .{_flat(_ONE_OPERATOR)} import attend_as_one_operator\n"} if kernels else set()
    known = "".join(f'MECHANISMS["{name}"] = {kind.__name__}\n' for name, kind in classes.items())
    hooked = "Mechanism.as_one_operator = attend_as_one_operator\n" if kernels else ""
    return f"{''.join(sorted(imports))}\n{known}{hooked}"
