"""How fast attention could be at best on this machine: counted operations and bytes over measured rates."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from approx.evaluation.timing import timed
from bench import cpu_cases

_CPU = torch.device("cpu")
_SIDE, _COPIED, _REPETITIONS = 2048, 2**28, 5
# A product in another precision still counts as float32 below this relative error.
_FLOAT32_ERROR = 1e-6
# Rows of a tile of queries that share their keys, and the chunk of causal linear attention.
_TILE, _CHUNK = 128, 64
EXACT = ("full", "sdpa", "exact", "flash")


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
    """
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


def _seconds(call: Callable[[], object], threads: int) -> float:
    """The least of some repetitions: a rate is what the machine can do."""
    call()
    samples = [timed(call, 1, _CPU) for _ in range(_REPETITIONS)]
    return min(sample.ms * (sample.busy if threads == 1 else 1) for sample in samples) / 1e3


class Work(NamedTuple):
    """What attention must do for one token of one head.

    Attributes:
        flops: Operations of products, multiplications and additions apart.
        signs: Operations of products of +-1, which need 8 bits.
        numbers: Numbers that are read or written.
    """

    flops: float
    signs: float
    numbers: float


def floor_ms(name: str, length: int, causal: bool, rates: dict[str, Any]) -> float | None:
    """Least milliseconds of a forward of one layer's attention, batch 1; None for what is no mechanism of ours.

    The operations of its products at the rate of a large product, or what it must read and write at the rate of a large
    copy, whichever takes longer. Exponentials, sorting and choosing are not counted; clustering is, as products.
    """
    case = next(
        (one for one in [cpu_cases.Case("sdpa", "sdpa", {}), *cpu_cases.cases(causal, 1)] if one.name == name), None
    )
    if case is None:
        return None
    work, tokens = work_of(case, length, causal), cpu_cases.HEADS * length
    width = getattr(torch, rates["dtype"]).itemsize
    return 1e3 * tokens * max((work.flops + work.signs) / rates["flops"], work.numbers * width / rates["bytes"])


def work_of(case: cpu_cases.Case, length: int, causal: bool) -> Work:
    """What a forward of a mechanism does at least for each token of each head."""
    mechanism = cpu_cases.mechanism_of(case, causal)
    size, half = cpu_cases.SIZE, 0.5 if causal else 1.0
    # Queries, keys, values and outputs once.
    io = numbers = 4 * size
    signs, pairs = 0, None
    if case.mechanism in EXACT:
        flops = 4 * size * length * half
    elif case.mechanism == "linear":
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
        flops = mechanism.rounds * 4 * size * 2 * mechanism.cluster
        numbers = io * (1 + 2 * mechanism.rounds)
    else:
        pairs = {
            "local": lambda: mechanism.left + (0 if causal else mechanism.right) + _TILE,
            "longformer": lambda: mechanism.window // (2 if causal else 1) + _TILE,
            "bigbird": lambda: mechanism.block * (5 + mechanism.random),
        }.get(case.mechanism)
        counted = mechanism.flops(length) / (cpu_cases.HEADS * length)
        flops = counted if pairs is None else min(4 * size * pairs(), 4 * size * length * half)
    return Work(flops, signs, numbers)
