"""The kernels of LSH attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.lsh import triton_rounds as lsh
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Own keys in every round, as a last resort and as any other; of each dtype and head size; forward and backward."""
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}, causal", _both(torch.bfloat16, size, own="always"), tensor_cores=False)
    yield Launch("bfloat16, 64, shared", _both(torch.bfloat16, 64, own="last resort"), tensor_cores=False)


def _both(dtype: torch.dtype, size: int, *, own: str, masked: bool = False, dedup: bool = False) -> Callable[[], None]:
    def run() -> None:
        x, lse = torch.empty(2, 256, 4, size, dtype=dtype).transpose(1, 2), torch.empty(2, 4, 256)
        mask = torch.ones(2, 256, dtype=torch.uint8) if masked else None
        by_rank, by_query = (torch.zeros(2, 2, 4, n, dtype=torch.int32) for n in (512, 256))
        keys = torch.zeros(2, 512, dtype=torch.int32)
        plan = [by_rank, by_rank, by_query, by_query, by_query, keys]
        given = x, x, x, mask, plan, by_rank if dedup else None, own, 128, 0.125
        lsh.lsh_forward(*given)
        lsh.lsh_backward(x, x, lse, *given)

    return run
