"""The kernels of exact top-k attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.ops.topk.triton_launches import Launches
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Products of each dtype and head size, what one query gathers, and the choice from rows held whole and in part."""
    half, whole = torch.bfloat16, torch.float32
    for size in (64, 80, 128):
        yield Launch(f"products, bfloat16, {size}", _products(half, size))
    yield Launch("products, float16, 64", _products(torch.float16, 64))
    for size in (64, 128):
        yield Launch(f"products, float32, {size}", _products(whole, size), tensor_cores=False)
    for dtype, size in ((half, 64), (half, 80), (half, 128), (whole, 64), (whole, 128)):
        yield Launch(f"one query, {str(dtype)[6:]}, {size}", _one_query(dtype, size), tensor_cores=False)
    yield Launch("bits", _bits, tensor_cores=False)
    for keys in (256, 4096, 16384):
        yield Launch(f"choice from {keys} keys", _choice(keys, None), tensor_cores=False)
        mask = torch.ones(2, keys, dtype=torch.uint8)
        yield Launch(f"choice from {keys} keys, key mask", _choice(keys, mask), tensor_cores=False)


def _products(dtype: torch.dtype, size: int) -> Callable[[], None]:
    """What has products."""

    def run() -> None:
        x, launches, line = _given(dtype, size, 256)
        launches.scores(torch.empty(8, 256, 256), 0)
        launches.key_gradients(x, line, line, torch.zeros(2, 4, 256, 8, dtype=torch.int32), x, x)

    return run


def _one_query(dtype: torch.dtype, size: int) -> Callable[[], None]:
    """What each program does for one query."""

    def run() -> None:
        x, launches, line = _given(dtype, size, 256)
        top = torch.zeros(2, 4, 256, 32, dtype=torch.int32)
        launches.outputs(top, top.float(), x, line)
        launches.query_gradients(x, top, line, line, x)

    return run


def _bits() -> None:
    _given(torch.bfloat16, 64, 256)[1].marks(torch.zeros(2, 4, 256, 32, dtype=torch.int32))


def _choice(keys: int, mask: torch.Tensor | None) -> Callable[[], None]:
    def run() -> None:
        _, launches, line = _given(torch.bfloat16, 64, keys)
        launches.select(torch.empty(8, 1, keys), 0, mask, line.int(), line)

    return run


def _given(dtype: torch.dtype, size: int, length: int) -> tuple[torch.Tensor, Launches, torch.Tensor]:
    x = torch.empty(2, length, 4, size, dtype=dtype).transpose(1, 2)
    return x, Launches(x, x, x, 32, True, 0.125), torch.empty(2, 4, length)
