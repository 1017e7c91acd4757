"""The kernels of clustered attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from approx_kernels.ops.clustered.triton_causal_launches import Launches
from approx_kernels.ops.clustered.triton_members import spread_rows, sum_rows
from approx_kernels.ops.clustered.triton_own import improved_backward, improved_forward
from approx_kernels.ops.clustered.triton_top import largest_keys
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Means and what is spread, and the queries' own weights of each dtype and head size; forward and backward."""
    yield Launch("means, bfloat16, 64", _means(torch.bfloat16, 64), tensor_cores=False)
    yield Launch("means, float32, 128", _means(torch.float32, 128), tensor_cores=False)
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}", _improved(torch.bfloat16, size))
    yield Launch("float32, 128", _improved(torch.float32, 128), tensor_cores=False)
    for size in (64, 80, 128):
        yield Launch(f"causal, bfloat16, {size}", _causal(torch.bfloat16, size))
    yield Launch("causal, plain, bfloat16, 64", _causal(torch.bfloat16, 64, kept=0))
    yield Launch("causal, float16, 64", _causal(torch.float16, 64))
    for size in (64, 128):
        yield Launch(f"causal, float32, {size}", _causal(torch.float32, size), tensor_cores=False)
    for size in (64, 128):
        yield Launch(f"causal, one row, bfloat16, {size}", _row(torch.bfloat16, size, 256), tensor_cores=False)
    yield Launch("causal, one row, plain, bfloat16, 64", _row(torch.bfloat16, 64, 256, kept=0), tensor_cores=False)
    yield Launch("causal, one row, float32, 128, chunks of 2048", _row(torch.float32, 128, 2048), tensor_cores=False)


def _means(dtype: torch.dtype, size: int) -> Callable[[], None]:
    def run() -> None:
        x, (order, begins) = torch.empty(2, 256, 4, size, dtype=dtype).transpose(1, 2), _lists()
        spread_rows(sum_rows(x, order, begins, True), order, begins, 256, True)

    return run


def _improved(dtype: torch.dtype, size: int) -> Callable[[], None]:
    def run() -> None:
        x = torch.empty(2, 256, 4, size, dtype=dtype).transpose(1, 2)
        means = torch.empty(2, 4, 25, size, dtype=dtype)
        largest_keys(means, x, torch.ones(2, 256, dtype=torch.uint8), 32, 0.125)
        lse, own_lse = torch.empty(2, 4, 25), torch.empty(2, 4, 256)
        given = x, x, x, means, means, lse, torch.zeros(2, 4, 25, 32, dtype=torch.int32), *_lists(), 0.125, False
        improved_forward(*given)
        improved_backward(x, own_lse, lse, *given)

    return run


def _causal(dtype: torch.dtype, size: int, kept: int = 32) -> Callable[[], None]:
    """What has products."""

    def run() -> None:
        x, launches, top, until, past, line = _chunks(dtype, size, 256, kept)
        launches.sums(until, past)
        launches.outputs((x, line), top, past, x, line)
        launches.query_gradients((x, line), top, past, x, line, x, x, (x, line), past, line)
        added = torch.empty(2, 4, launches.keys, 2 * size) if kept else None
        launches.key_gradients(until, past[0], past, added, x, x)

    return run


def _row(dtype: torch.dtype, size: int, chunk: int, kept: int = 32) -> Callable[[], None]:
    """What each program does for one row or one key."""

    def run() -> None:
        x, launches, top, until, past, line = _chunks(dtype, size, chunk, kept)
        best = None if until is None else launches.select(top, until)
        launches.carry(top, best, until, past)
        launches.carry_back(past, past)
        if until is not None:
            launches.own_key_gradients(until, past[0], past, line, line, x)

    return run


def _chunks(dtype: torch.dtype, size: int, chunk: int, kept: int) -> tuple[Any, ...]:
    x = torch.empty(2, 3 * chunk, 4, size, dtype=dtype).transpose(1, 2)
    order, begins = torch.zeros(2, 4, 3 * chunk, dtype=torch.int32), torch.zeros(2, 4, 301, dtype=torch.int32)
    launches = Launches(x, x, x, torch.empty(2, 4, 100, size), order, begins, chunk, kept, 0.125)
    top = torch.zeros(2, 4, 2, 100, kept, dtype=torch.int32)
    until = torch.zeros(2, 4, 100, 2 * chunk, dtype=torch.int16) if kept else None
    past = torch.empty(2, 4, 2, 100), *torch.empty(2, 2, 4, 2, 100, size)
    return x, launches, top, until, past, torch.empty(2, 4, 3 * chunk)


def _lists() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 4, 256, dtype=torch.int32), torch.zeros(2, 4, 26, dtype=torch.int32)
