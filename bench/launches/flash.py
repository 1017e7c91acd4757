"""The flash kernels on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.flash import triton as flash
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Windows, key masks, packed samples, spans, block lists, and wide heads; forward and backward."""
    for size in (64, 128):
        yield Launch(f"bfloat16, {size}", _both(torch.bfloat16, size))
        yield Launch(f"bfloat16, {size}, key mask", _both(torch.bfloat16, size, masked=True))
        yield Launch(f"bfloat16, {size}, key mask, block list", _both(torch.bfloat16, size, masked=True, listed=True))
        yield Launch(
            f"bfloat16, {size}, key mask, largest score apart", _both(torch.bfloat16, size, masked=True, apart=True)
        )
        yield Launch(f"bfloat16, {size}, key mask and spans", _both(torch.bfloat16, size, masked=True, ramp=32))
    yield Launch("bfloat16, 64, lengths", _both(torch.bfloat16, 64, packed=True))
    yield Launch("bfloat16, 64, block list", _both(torch.bfloat16, 64, listed=True))
    yield Launch("bfloat16, 80, key mask", _both(torch.bfloat16, 80, masked=True))
    # Wider heads of true float32, whose products are written out one by one, still spill: right, but slow.
    yield Launch("float32, 32", _both(torch.float32, 32), tensor_cores=False)
    yield Launch("float32, 32, block list", _both(torch.float32, 32, listed=True), tensor_cores=False)


def _both(
    dtype: torch.dtype,
    size: int,
    *,
    masked: bool = False,
    packed: bool = False,
    ramp: int = 0,
    listed: bool = False,
    apart: bool = False,
) -> Callable[[], None]:
    def run() -> None:
        batch = 1 if packed else 2
        x, lse = torch.empty(batch, 256, 4, size, dtype=dtype).transpose(1, 2), torch.empty(batch, 4, 256)
        bounds = torch.zeros(2, 5, dtype=torch.int32) if masked or packed else None
        mask = torch.ones(2, 256, dtype=torch.uint8) if masked else None
        entries = torch.zeros(9, dtype=torch.int32)
        half = entries.view(1, 3, 3), entries, entries
        blocks = [*half, *half, torch.zeros(1, 64, dtype=torch.int64)] if listed else []
        spans = torch.ones(4) if ramp else None
        given = bounds, mask, spans, blocks, flash.ENDLESS, 0, ramp, 0.125, 128 * packed
        place = flash.flash_forward(x, x, x, *given, apart)[3]
        flash.flash_backward(x, lse, lse if apart else None, x, lse, place, x, x, x, *given)

    return run
