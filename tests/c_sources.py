"""The C sources of the kernels, and whether tests may do without one: only where there is no compiler at all."""

import ctypes
import importlib
import pkgutil
import re

import pytest

import approx_kernels
from approx_kernels.cpu.compile import find_compiler, library


def sources() -> dict[str, str]:
    """Every text that is compiled by itself, by module and name; other texts are parts of these and export no function."""
    found = {}
    for module in pkgutil.walk_packages(approx_kernels.__path__, "approx_kernels."):
        if module.name.endswith("_c"):
            texts = vars(importlib.import_module(module.name)).items()
            found |= {
                f"{module.name.partition('.')[2]}.{name}": text
                for name, text in texts
                if name.isupper() and isinstance(text, str) and re.search(r"^int \w+\(", text, re.M)
            }
    # Some modules import the text of another.
    return {name: text for text, name in {text: name for name, text in found.items()}.items()}


_COMPILER, _WHY = find_compiler()
# Where there is a compiler, C that does not compile is an error and no reason to skip.
needs_compiler = pytest.mark.skipif(_COMPILER is None, reason=_WHY)


def compiled(source: str) -> ctypes.CDLL:
    """The functions of a source."""
    found = library(source)
    assert not isinstance(found, str), found
    return found
