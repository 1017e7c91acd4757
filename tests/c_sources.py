"""The C sources of the kernels, and whether tests may do without one: only where there is no compiler at all."""

import ctypes

import pytest

from approx_kernels.cpu.compile import find_compiler, load
from approx_kernels.cpu.sources import names, source


def sources() -> dict[str, str]:
    """Every text that is compiled by itself, by its file."""
    return {name: source(name) for name in names()}


_COMPILER, _WHY = find_compiler()
# Where there is a compiler, C that does not compile is an error and no reason to skip.
needs_compiler = pytest.mark.skipif(_COMPILER is None, reason=_WHY)


def compiled(source: str) -> ctypes.CDLL:
    """The functions of a source."""
    found = load(source)
    assert not isinstance(found, str), found
    return found
