"""C: it compiles here and for other processors, structures have one size on both sides, and it gets only tensors it can read."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from approx_kernels.cpu import compile, structs
from approx_kernels.cpu.compile import load
from approx_kernels.cpu.structs import STRUCTS, address, rows_of
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


def told_by(source: str) -> set[str]:
    return set(re.findall(r"^SIZE_OF\((\w+), ", source, re.M))


def test_every_structure_has_its_size_in_a_source():
    assert set().union(*map(told_by, SOURCES.values())) == STRUCTS.keys()


def test_every_structure_argument_in_c_exports_its_size():
    for name, source in SOURCES.items():
        taken = set(re.findall(r"^int \w+\(const (\w+) \*\w", source, re.M)) - {"uint8_t", "float"}
        measured = set(re.findall(r"^SIZE_OF\(\w+, (\w+)\)", source, re.M))
        assert taken <= measured, name


@needs_compiler
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles_and_its_structures_are_as_large_in_c_as_here(name):
    library = compiled(SOURCES[name])
    for struct in told_by(SOURCES[name]):
        tell = getattr(library, f"size_of_{struct}")
        tell.restype = ctypes.c_int64
        assert tell() == ctypes.sizeof(STRUCTS[struct])


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


@needs_compiler
def test_refuses_a_library_with_other_structures(monkeypatch):
    class Longer(ctypes.Structure):
        _fields_ = (*structs.TopK._fields_, ("more", ctypes.c_int64))

    monkeypatch.setitem(STRUCTS, "topk", Longer)
    loaded = load.__wrapped__(SOURCES["topk/forward.c"])
    assert isinstance(loaded, str)
    assert "the structure topk has" in loaded
    assert f"{ctypes.sizeof(Longer)} in Python" in loaded


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "torch.int64 on cpu of shape"),
        (torch.zeros(2, 4, dtype=torch.int32), r"\[2, 4\]"),
        (torch.zeros(6, dtype=torch.int32), r"\[6\]"),
        (torch.zeros(3, 2, dtype=torch.int32).T, r"strides \[1, 2\]"),
        (torch.zeros(2, 3, dtype=torch.int32, device="meta"), "on meta"),
    ],
)
def test_only_tensors_for_c_have_an_address(tensor, words):
    with pytest.raises(ValueError, match=words) as caught:
        address(tensor, torch.int32, 2, 3)
    assert "it reads contiguous torch.int32 on the CPU of shape [2, 3]" in str(caught.value)


def test_missing_tensors_are_null():
    assert address(None, torch.int32, 2, 3).value is None
    right = torch.zeros(2, 3, dtype=torch.int32)
    assert address(right, torch.int32, 2, 3).value == right.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 4, 5, 6, dtype=torch.float64),
        torch.zeros(3, 4, 5, 6),
        torch.zeros(2, 3, 5, 6),
        torch.zeros(4, 5, 6),
        torch.zeros(2, 4, 6, 5).transpose(2, 3),
        torch.zeros(2, 4, 5, 6, device="meta"),
    ],
    ids=["dtype", "batch", "heads", "dimensions", "strides", "device"],
)
def test_only_rows_that_c_reads_have_strides(other):
    with pytest.raises(ValueError, match="C got rows of"):
        rows_of(torch.zeros(2, 4, 7, 6), other)


def test_rows_of_one_number_may_have_any_stride():
    narrow = torch.zeros(1, 2, 3, 4)[..., :1]
    assert rows_of(narrow.transpose(2, 3).transpose(2, 3))[0].row == 4
