"""Arguments of C functions: structures of equal size on both sides, and only tensors that C can read."""

import ctypes
import re

import pytest
import torch

from approx_kernels.cpu import structs
from approx_kernels.cpu.compile import load
from approx_kernels.cpu.structs import STRUCTS, address, rows_of
from c_sources import compiled, needs_compiler, sources

SOURCES = sources()


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
def test_structures_are_as_large_in_c_as_here(name):
    library = compiled(SOURCES[name])
    for struct in told_by(SOURCES[name]):
        tell = getattr(library, f"size_of_{struct}")
        tell.restype = ctypes.c_int64
        assert tell() == ctypes.sizeof(STRUCTS[struct])


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
