"""Lower bounds on the time of attention on this machine: counted operations and bytes over measured rates."""

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
# The name of products of +-1 among the rates; words per head and centroids for measuring them.
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
# Largest time over floor allowed for each mechanism, with these settings or any.
_LIMITS = {"linear": 2.0, "local": 2.4, "bigbird": 2.4, "clustered iterations=3": 4.5, "improved-clustered": 6.0}


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Compute float32 products in one of PyTorch's precisions, and restore the setting of each kind of device.

    Restoring `torch.get_float32_matmul_precision` would not do: it reports "highest" also if nothing is set.
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
    """Operations per second of a large product, and bytes per second of a large copy, read and written, on these threads.

    In float32 the product may use the fastest precision within the allowed error, and in 16 bits it may go through
    float32. Products of signs have no copy, and no rate if C cannot be compiled.
    """
    if dtype == SIGNS:
        return _calibrate_signs(threads)
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIDE, _SIDE, generator=generator).to(kind) for _ in range(2))
    # As in a layer, whose weights have a row per output; otherwise bfloat16 may take a hundred times as long.
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
    """Operations per second of products of +-1, as in our search for the nearest of a hundred words of 64 bits.

    None if C cannot be compiled.
    """
    torch.set_num_threads(threads)
    rate, library = None, load(_SEARCH)
    if not isinstance(library, str):
        generator, heads = torch.Generator().manual_seed(0), cpu_cases.HEADS
        words, centroids = (torch.randint(2**62, (n,), generator=generator) for n in (heads * _WORDS, _CLUSTERS))
        groups = torch.empty(len(words), dtype=torch.int32)
        numbers = map(ctypes.c_int64, (heads, _WORDS, _CLUSTERS, threads))
        signs = (address(x, torch.int64, len(x)) for x in (words, centroids))
        arguments = (*signs, *numbers, address(groups, torch.int32, len(words)))
        rate = 2 * 64 * len(words) * _CLUSTERS / _seconds(lambda: library.search(*arguments), threads)
    return {"dtype": SIGNS, "threads": threads, "flops": rate, "bytes": None}


def _seconds(call: Callable[[], object], threads: int) -> float:
    """The minimum of some repetitions, since a rate is an upper bound of the machine."""
    call()
    samples = [timed(call, 1, _CPU) for _ in range(_REPETITIONS)]
    return min(sample.ms * (sample.busy if threads == 1 else 1) for sample in samples) / 1e3


class Work(NamedTuple):
    """Work of attention for one token of one head.

    Attributes:
        flops: Operations of products, counting multiplications and additions separately.
        signs: Operations of products of +-1, which need 8 bits; half of them find the nearest centroids, half move
            them.
        numbers: Numbers read or written.
    """

    flops: float
    signs: float
    numbers: float


def limit(name: str) -> float | None:
    """Largest time over floor allowed for a contender; None without a target."""
    return next((most for one, most in _LIMITS.items() if name == one or name.startswith(f"{one} ")), None)


def floor_ms(name: str, length: int, causal: bool, rates: dict[str, Any], signs: float | None) -> float | None:
    """Minimum milliseconds of one layer's attention, batch 1; None if unknown or not one of our mechanisms.

    The operations of its products at the rate of a large product, or its reads and writes at the rate of a large
    copy, whichever takes longer. Exponentials, sorting and choosing are not counted.

    Args:
        name: A contender.
        length: Tokens.
        causal: Whether a query sees only its past.
        rates: The result of `calibrate` in the precision.
        signs: Rate of products of +-1 per second; None if unknown.
    """
    case = next(
        (one for one in [cpu_cases.Case("sdpa", "sdpa", {}), *cpu_cases.cases(causal, 1)] if one.name == name), None
    )
    if case is None:
        return None
    work, tokens = work_of(case, length, causal), cpu_cases.HEADS * length
    if work.signs and signs is None:
        return None
    # A CPU moves centroids by a few additions, not by products.
    finding = work.signs / 2 / signs if signs else 0.0
    width = getattr(torch, rates["dtype"]).itemsize
    return 1e3 * tokens * max(work.flops / rates["flops"] + finding, work.numbers * width / rates["bytes"])


def work_of(case: cpu_cases.Case, length: int, causal: bool, tile: int = 0) -> Work:
    """Minimum work of a mechanism per token of each head; `tile` queries of a window share their keys."""
    mechanism = cpu_cases.mechanism_of(case, causal)
    size, half = cpu_cases.SIZE, 0.5 if causal else 1.0
    # Queries, keys, values and outputs once.
    io = numbers = 4 * size
    signs = 0
    if case.mechanism in cpu_cases.EXACT:
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
    """Keys within a query's window, averaged over all queries; it is cut off at either end."""
    return 1 + sum(side - side * (side + 1) / (2 * length) for side in (min(left, length - 1), min(right, length - 1)))
