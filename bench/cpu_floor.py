"""How fast attention could be at best on this machine: counted operations and bytes over measured rates."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from approx.evaluation.timing import timed
from approx_kernels.cpu.compile import load
from approx_kernels.cpu.sources import expanded
from approx_kernels.cpu.structs import address
from bench import cpu_cases

_CPU = torch.device("cpu")
_SIDE, _COPIED, _REPETITIONS = 2048, 2**28, 5
# A product in another precision still counts as float32 below this relative error.
_FLOAT32_ERROR = 1e-6
# What products of +-1 are called among the rates; words a head and centroids that they are measured on.
SIGNS = "signs"
_WORDS, _CLUSTERS = 4096, 100
_SEARCH = expanded(r"""
#include "clustering/hamming.c"
void search(const uint64_t *words, const uint64_t *centroids, int64_t heads, int64_t n, int64_t clusters,
            int64_t threads, int32_t *groups) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t h = 0; h < heads; h++) nearest(words + h * n, n, centroids, clusters, groups + h * n);
}
""")
# The chunk of causal linear attention.
_CHUNK = 64
EXACT = ("full", "sdpa", "exact", "flash")
# Time over floor that each mechanism, at these settings or any, may have at most.
_LIMITS = {"linear": 2.0, "local": 2.4, "bigbird": 2.4, "clustered iterations=3": 4.5, "improved-clustered": 6.0}


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Compute products of float32 in this of PyTorch's precisions, and put back what was set for each kind of device.

    Setting what `torch.get_float32_matmul_precision` said would not: its "highest" is also said where nothing is set.
    """
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]  # a module made at run time
    before = [one.fp32_precision for one in settings]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        for one, was in zip(settings, before, strict=True):
            one.fp32_precision = was


def calibrate(dtype: str, threads: int) -> dict[str, Any]:
    """Operations a second of a large product, and bytes a second of a large copy, read and written, on so many threads.

    In float32 the product may take the way that `exact` may take, where the error allows it, and in 16 bits that by float32.
    Signs have no copy, nor a product where no C can be compiled.
    """
    if dtype == SIGNS:
        return _calibrate_signs(threads)
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIDE, _SIDE, generator=generator).to(kind) for _ in range(2))
    # As in a layer, whose weights have a row for each output; without it bfloat16 may take a hundred times as long.
    b = b.t()
    precisely = a.double() @ b.double()
    ways = ("highest", "medium") if dtype == "float32" else ("highest",)
    rates = {}
    for way in ways:
        with products_in(way):
            error = float(((a @ b).double() - precisely).norm() / precisely.norm())
            if way == "highest" or error <= _FLOAT32_ERROR:
                rates[way] = 2 * _SIDE**3 / _seconds(lambda: a @ b, threads)
    if dtype != "float32":
        rates["float32"] = 2 * _SIDE**3 / _seconds(lambda: (a.float() @ b.float()).to(kind), threads)
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "dtype": dtype,
        "threads": threads,
        "flops": max(rates.values()),
        "by_precision": rates,
        "bytes": 2 * _COPIED / _seconds(lambda: target.copy_(source), threads),
    }


def _calibrate_signs(threads: int) -> dict[str, Any]:
    """Operations a second of products of +-1, as our own search for the nearest of a hundred words of 64 bits does them.

    None where no C can be compiled.
    """
    torch.set_num_threads(threads)
    rate, found = None, load(_SEARCH)
    if not isinstance(found, str):
        generator, heads = torch.Generator().manual_seed(0), cpu_cases.HEADS
        words, centroids = (torch.randint(2**62, (n,), generator=generator) for n in (heads * _WORDS, _CLUSTERS))
        groups = torch.empty(len(words), dtype=torch.int32)
        numbers = map(ctypes.c_int64, (heads, _WORDS, _CLUSTERS, threads))
        signs = (address(x, torch.int64, len(x)) for x in (words, centroids))
        given = (*signs, *numbers, address(groups, torch.int32, len(words)))
        rate = 2 * 64 * len(words) * _CLUSTERS / _seconds(lambda: found.search(*given), threads)
    return {"dtype": SIGNS, "threads": threads, "flops": rate, "bytes": None}


def _seconds(call: Callable[[], object], threads: int) -> float:
    """The least of some repetitions: a rate is what the machine can do."""
    call()
    samples = [timed(call, 1, _CPU) for _ in range(_REPETITIONS)]
    return min(sample.ms * (sample.busy if threads == 1 else 1) for sample in samples) / 1e3


class Work(NamedTuple):
    """What attention must do for one token of one head.

    Attributes:
        flops: Operations of products, multiplications and additions apart.
        signs: Operations of products of +-1, which need 8 bits; half of them find the nearest centroids, half move them.
        numbers: Numbers that are read or written.
    """

    flops: float
    signs: float
    numbers: float


def limit(name: str) -> float | None:
    """Time over floor that a contender may have at most; None where nothing was asked."""
    return next((most for one, most in _LIMITS.items() if name == one or name.startswith(f"{one} ")), None)


def floor_ms(name: str, length: int, causal: bool, rates: dict[str, Any], signs: float | None) -> float | None:
    """Least milliseconds of a forward of one layer's attention, batch 1; None for what is no mechanism of ours, or unknown.

    The operations of its products at the rate of a large product, or what it must read and write at the rate of a large
    copy, whichever takes longer. Exponentials, sorting and choosing are not counted.

    Args:
        name: A contender.
        length: Tokens.
        causal: Whether a query sees its past alone.
        rates: What `calibrate` found in the precision.
        signs: Its products a second of +-1; None where nobody knows.
    """
    case = next(
        (one for one in [cpu_cases.Case("sdpa", "sdpa", {}), *cpu_cases.cases(causal, 1)] if one.name == name), None
    )
    if case is None:
        return None
    work, tokens = work_of(case, length, causal), cpu_cases.HEADS * length
    if work.signs and signs is None:
        return None
    # A processor moves centroids by few additions, not by products.
    finding = work.signs / 2 / signs if signs else 0.0
    width = getattr(torch, rates["dtype"]).itemsize
    return 1e3 * tokens * max(work.flops / rates["flops"] + finding, work.numbers * width / rates["bytes"])


def work_of(case: cpu_cases.Case, length: int, causal: bool, tile: int = 0) -> Work:
    """What a forward of a mechanism does at least for each token of each head; `tile` queries of a window share their keys."""
    mechanism = cpu_cases.mechanism_of(case, causal)
    size, half = cpu_cases.SIZE, 0.5 if causal else 1.0
    # Queries, keys, values and outputs once.
    io = numbers = 4 * size
    signs = 0
    if case.mechanism in EXACT:
        flops = 4 * size * length * half
    elif case.mechanism == "linear" and not case.settings:
        flops = 4 * size**2 + (2 * size * _CHUNK if causal else 0)
    elif case.mechanism == "performer":
        flops = 8 * size * mechanism.features
    elif case.mechanism in ("clustered", "improved-clustered") and not causal:
        clusters = 25 if length <= 512 else 100
        flops, signs = 2 * size * 64 + 4 * clusters * size, mechanism.iterations * 4 * 64 * clusters
        numbers = io + size
        if case.mechanism == "improved-clustered":
            flops += 4 * mechanism.topk * size
            numbers += 2 * size + 2 * clusters
    elif case.mechanism == "lsh":
        flops = mechanism.flops(length) / (cpu_cases.HEADS * length)
        numbers = io * (1 + 2 * mechanism.rounds)
    else:
        sides = {
            "local": lambda: (mechanism.left, mechanism.right),
            "longformer": lambda: (mechanism.window // 2, mechanism.window // 2),
        }.get(case.mechanism)
        if sides is not None:
            left, right = sides()
            pairs = min(_seen(length, left, 0 if causal else right) + tile, length * half)
        elif case.mechanism == "bigbird":
            pairs = min(mechanism.block * (5 + mechanism.random), length * half)
        else:
            pairs = mechanism.flops(length) / (cpu_cases.HEADS * length * 4 * size)
        flops = 4 * size * pairs
    return Work(flops, signs, numbers)


def _seen(length: int, left: int, right: int) -> float:
    """Keys within the window of a query, in the mean over all of them; at either end it is cut off."""
    return 1 + sum(side - side * (side + 1) / (2 * length) for side in (min(left, length - 1), min(right, length - 1)))
