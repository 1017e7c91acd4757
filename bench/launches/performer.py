"""The kernels of Performer attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.performer.triton import performer_backward, performer_forward
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Both forms of each dtype and size of heads, and what else is compiled differently; forward and backward."""
    half = torch.bfloat16
    yield Launch("bfloat16, 64", _both(half, 64, causal=False))
    for size in (64, 80, 128):
        yield Launch(f"bfloat16, {size}, causal, key mask", _both(half, size, masked=True))
    yield Launch("bfloat16, 128", _both(half, 128, causal=False))
    yield Launch("bfloat16, 64, causal, relu", _both(half, 64, kernel="relu"))
    yield Launch("bfloat16, 64, causal, values of 32, 100 features", _both(half, 64, values=32, features=100))
    for size in (64, 128):
        yield Launch(f"float16, {size}, causal", _both(torch.float16, size))
        yield Launch(f"float32, {size}, causal", _both(torch.float32, size), tensor_cores=False)
    yield Launch("float16, 128", _both(torch.float16, 128, causal=False))
    yield Launch("float32, 128", _both(torch.float32, 128, causal=False), tensor_cores=False)


def _both(
    dtype: torch.dtype, size: int, *, values: int | None = None, features: int = 256, causal: bool = True,
    kernel: str = "softmax", masked: bool = False,
) -> Callable[[], None]:  # fmt: skip
    def run() -> None:
        q, v = (torch.empty(2, 1024, 4, n, dtype=dtype).transpose(1, 2) for n in (size, values or size))
        mask = torch.ones(2, 1024, dtype=torch.uint8) if masked else None
        given = q, q, v, torch.empty(features, size), mask, causal
        out, *kept, _, _ = performer_forward(*given, False, kernel, 0.125)
        performer_backward(out, out, *kept, *given, kernel, 0.125)

    return run
