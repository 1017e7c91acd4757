"""The kernels of linear attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.linear import triton as linear
from approx_kernels.linear.triton_decode import linear_step
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Sums of the parallel and of the causal form, of each dtype and head size, and of ready-made features; both ways."""
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}", _both(torch.bfloat16, size, causal=False))
        yield Launch(f"bfloat16, {size}, causal", _both(torch.bfloat16, size))
        yield Launch(f"float16, {size}, causal", _both(torch.float16, size))
        yield Launch(f"float32, {size}, causal", _both(torch.float32, size), tensor_cores=False)
    yield Launch("bfloat16, 80, causal, key mask and window", _both(torch.bfloat16, 80, masked=True, window=True))
    yield Launch("bfloat16, 256 features, causal", _both(torch.bfloat16, 64, features=256))
    yield Launch("float16, 256 features", _both(torch.float16, 64, features=256, causal=False))
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}, one token", _step(size), tensor_cores=False)


def _both(
    dtype: torch.dtype, size: int, *, features: int = 0, causal: bool = True, masked: bool = False, window: bool = False
) -> Callable[[], None]:
    def run() -> None:
        wide = torch.float32 if features and dtype == torch.float16 else dtype
        q = torch.empty(2, 1024, 4, features or size, dtype=wide).transpose(1, 2)
        v = torch.empty(2, 1024, 4, size, dtype=dtype).transpose(1, 2)
        mask = torch.ones(2, 1024, dtype=torch.uint8) if masked else None
        made = "given" if features else "elu"
        found = linear.linear_forward(q, q, v, mask, causal, False, made, 1.0, 1e-6)
        grad_inverse = found[1] if window else None
        linear.linear_backward(v, grad_inverse, *found, q, q, v, mask, causal, made, 1.0)

    return run


def _step(size: int) -> Callable[[], None]:
    def run() -> None:
        x = torch.empty(2, 4, 1, size, dtype=torch.bfloat16)
        linear_step(x, x, x, None, torch.zeros(2, 4, size, size + 1), "elu", 1.0, 1e-6)

    return run
