"""All C compiles without warnings, here and for other processors."""

import shutil
import subprocess

import pytest

from approx_kernels.cpu import compile
from c_sources import compiled, needs_compiler, sources

SOURCES = sources()
STRICT = ("-Wall", "-Wextra", "-Werror")
TARGETS = {
    "x86-64": "-march=x86-64",
    "x86-64 with AVX2": "-march=x86-64-v3",
    "x86-64 with AVX-512": "-march=x86-64-v4",
    "x86-64 with AMX": "-march=sapphirerapids",
    "aarch64": "-march=armv8-a",
}


def test_the_sources_are_found():
    assert {"key_lists/forward.c", "lsh/sorting.c", "topk/backward.c"} <= SOURCES.keys()


@needs_compiler
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles_here(name):
    compiled(SOURCES[name])


def compiler_for(target: str, option: str) -> str:
    """A compiler that knows the target; the test is skipped where there is none."""
    candidates = ["aarch64-linux-gnu-gcc"] if target == "aarch64" else []
    for compiler in filter(None, [compile.find_compiler()[0], *map(shutil.which, candidates)]):
        if (
            subprocess.run(
                [compiler, option, "-xc", "-c", "-", "-o", "/dev/null"], input=b"", capture_output=True
            ).returncode
            == 0
        ):
            return compiler
    pytest.skip(f"there is no C compiler for {target}")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_warnings_for_other_processors(target):
    compiler = compiler_for(target, TARGETS[target])
    flags = [flag for flag in compile._FLAGS if flag not in ("-O3", "-march=native", "-shared")]
    said = ""
    for name, source in SOURCES.items():
        # Compile to assembly, as data-flow warnings and missing instructions show only then.
        command = [compiler, *flags, "-Og", TARGETS[target], "-fopenmp", *STRICT, "-xc", "-S", "-", "-o", "/dev/null"]
        result = subprocess.run(command, input=source, capture_output=True, text=True)
        said += f"{name}:\n{result.stderr}" if result.returncode else ""
    assert not said
