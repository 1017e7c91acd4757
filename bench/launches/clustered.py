"""The kernels of clustered attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.clustered.triton_members import spread_rows, sum_rows
from approx_kernels.clustered.triton_own import improved_backward, improved_forward
from approx_kernels.clustered.triton_top import largest_keys
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Means and what is spread, and the queries' own weights of each dtype and head size; forward and backward."""
    yield Launch("means, bfloat16, 64", _means(torch.bfloat16, 64), tensor_cores=False)
    yield Launch("means, float32, 128", _means(torch.float32, 128), tensor_cores=False)
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}", _improved(torch.bfloat16, size))
    yield Launch("float32, 128", _improved(torch.float32, 128), tensor_cores=False)


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


def _lists() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 4, 256, dtype=torch.int32), torch.zeros(2, 4, 26, dtype=torch.int32)
