"""The kernels of Performer attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.performer.triton import performer_backward, performer_forward
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Both forms of both kernels, of each dtype and head size; forward and backward."""
    half = torch.bfloat16
    yield Launch("bfloat16, 64", _both(half, 64, causal=False))
    for size in (64, 80, 128):
        yield Launch(f"bfloat16, {size}, causal", _both(half, size))
        yield Launch(f"float16, {size}, causal", _both(torch.float16, size))
        yield Launch(f"float32, {size}, causal", _both(torch.float32, size), tensor_cores=False)
    for dtype, told in ((half, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        whole = dtype == torch.float32
        yield Launch(f"{told}, 128", _both(dtype, 128, causal=False), tensor_cores=not whole)
        yield Launch(f"{told}, 128, causal, relu", _both(dtype, 128, kernel="relu"), tensor_cores=not whole)
    yield Launch("bfloat16, 64, relu", _both(half, 64, causal=False, kernel="relu"))
    yield Launch("bfloat16, 64, causal, key mask", _both(half, 64, masked=True))
    yield Launch("bfloat16, 64, causal, values of 32, 100 features", _both(half, 64, values=32, features=100))


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
