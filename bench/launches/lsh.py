"""The kernels of LSH attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.ops.lsh.triton_rounds import lsh_backward, lsh_forward
from approx_kernels.ops.lsh.triton_tokens import lsh_tokens
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Own keys in every round, as a last resort and as any other, of each dtype and head size; forward and backward."""
    half, whole = torch.bfloat16, torch.float32
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}, causal", _both(half, size, "always"))
        yield Launch(f"bfloat16, {size}, causal, key mask, dedup", _both(half, size, "always", masked=True, dedup=True))
        yield Launch(f"bfloat16, {size}, shared", _both(half, size, "last resort"))
    yield Launch("bfloat16, 80, causal", _both(half, 80, "always"))
    yield Launch("bfloat16, 64, dedup", _both(half, 64, "as any other", dedup=True))
    yield Launch("float16, 64, causal", _both(torch.float16, 64, "always"))
    for size in (64, 128):
        dedup = _both(whole, size, "always", masked=True, dedup=True)
        yield Launch(f"float32, {size}, causal", _both(whole, size, "always"), tensor_cores=False)
        yield Launch(f"float32, {size}, causal, key mask, dedup", dedup, tensor_cores=False)
    yield Launch("sums, bfloat16, 64, shared", _sums(half, 64, "last resort"), tensor_cores=False)
    yield Launch("sums, bfloat16, 128, causal", _sums(half, 128, "always"), tensor_cores=False)
    yield Launch("sums, float32, 128, causal", _sums(whole, 128, "always"), tensor_cores=False)


def _both(dtype: torch.dtype, size: int, own: str, *, masked: bool = False, dedup: bool = False) -> Callable[[], None]:
    def run() -> None:
        x, lse = torch.empty(2, 256, 4, size, dtype=dtype).transpose(1, 2), torch.empty(2, 4, 256)
        mask = torch.ones(2, 256, dtype=torch.uint8) if masked else None
        by_rank, by_query = (torch.zeros(1, 2, 4, n, dtype=torch.int32) for n in (512, 256))
        plan = [by_rank, by_rank, by_query, by_query, by_query, torch.zeros(2, 512, dtype=torch.int32)]
        given = x, x, x, mask, plan, by_rank if dedup else None, own, 128, 0.125
        lsh_forward(*given)
        lsh_backward(x, x, lse, *given)

    return run


def _sums(dtype: torch.dtype, size: int, own: str) -> Callable[[], None]:
    def run() -> None:
        x, lse = torch.empty(2, 256, 4, size, dtype=dtype).transpose(1, 2), torch.empty(2, 4, 256)
        mask, keys, sums = torch.ones(2, 256, dtype=torch.uint8), torch.zeros(2, 512), torch.empty(2, 4, 512, size)
        lsh_tokens(x, lse, lse, sums, sums, x, x, x, mask, keys.int(), 4, own, 0.125)

    return run
