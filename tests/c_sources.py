"""The C sources of the kernels; tests that need them are skipped only without a compiler."""

import ctypes

import pytest

from approx_kernels.cpu.compile import find_compiler, load
from approx_kernels.cpu.sources import names, source


def sources() -> dict[str, str]:
    """Every separately compiled source, by its file."""
    return {name: source(name) for name in names()}


_COMPILER, _WHY = find_compiler()
# With a compiler, C that does not compile is an error, not a reason to skip.
needs_compiler = pytest.mark.skipif(_COMPILER is None, reason=_WHY)


def compiled(source: str) -> ctypes.CDLL:
    """Compile and load a source."""
    library = load(source)
    assert not isinstance(library, str), library
    return library
