"""The kernels of linear attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.ops.linear import triton as linear
from approx_kernels.ops.linear.triton_decode import linear_step
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Sums of the parallel and of the causal form, of each dtype and head size, and of ready-made features; both ways."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        told, cores = str(dtype).removeprefix("torch."), dtype != torch.float32
        for size in (64, 128):
            yield Launch(f"{told}, {size}", _both(dtype, size, causal=False), cores)
            yield Launch(f"{told}, {size}, causal", _both(dtype, size), cores)
        yield Launch(f"{told}, 80, causal, key mask and window", _both(dtype, 80, masked=True, window=True), cores)
    # Hedgehog has two for each number of a head; those of float16 are float32.
    yield Launch("bfloat16, 64, 128 features, causal", _both(torch.bfloat16, 64, features=128))
    yield Launch("bfloat16, 32, 64 features, causal", _both(torch.bfloat16, 32, features=64))
    yield Launch("float16, 128, 64 features, causal", _both(torch.float16, 128, features=64))
    for size, features in ((64, 64), (128, 128), (128, 256)):
        yield Launch(f"bfloat16, {size}, {features} features, one token", _step(size, features), tensor_cores=False)
    yield Launch("bfloat16, 128, 128 features, one token, shared keys", _step(128, 128, 2), tensor_cores=False)


def _both(
    dtype: torch.dtype, size: int, *, features: int = 0, causal: bool = True, masked: bool = False, window: bool = False
) -> Callable[[], None]:
    def run() -> None:
        wide = torch.float32 if features and dtype == torch.float16 else dtype
        q = torch.empty(2, 1024, 4, features or size, dtype=wide).transpose(1, 2)
        v = torch.empty(2, 1024, 4, size, dtype=dtype).transpose(1, 2)
        mask = torch.ones(2, 1024, dtype=torch.uint8) if masked else None
        made = "given" if features else "elu"
        outputs = linear.linear_forward(q, q, v, mask, causal, False, made, 1.0, 1e-6)
        grad_inverse = outputs[1] if window else None
        linear.linear_backward(v, grad_inverse, *outputs, q, q, v, mask, causal, made, 1.0)

    return run


def _step(size: int, features: int, shared: int = 1) -> Callable[[], None]:
    def run() -> None:
        q, v = (torch.empty(2, 4, 1, n, dtype=torch.bfloat16) for n in (features, size))
        made, k, v = "elu" if features == size else "given", q[:, ::shared], v[:, ::shared]
        linear_step(q, k, v, None, torch.zeros(2, 4 // shared, features, size + 1), made, 1.0, 1e-6)

    return run
