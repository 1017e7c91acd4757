"""The flash kernels on what makes the compiler do something else."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from approx_kernels.ops.flash import triton as flash
from bench.offline import Launch

# Of all dtypes and head sizes, by what their names add.
FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "": {},
        ", key mask": {"masked": True},
        ", key mask, block list": {"masked": True, "listed": True},
        ", key mask, largest score apart": {"masked": True, "apart": True},
        ", key mask and spans": {"masked": True, "ramp": 32},
    }
)


def launches() -> Iterator[Launch]:
    """Windows, key masks, packed samples, spans, block lists, and wide heads; forward and backward."""
    for dtype in (torch.bfloat16, torch.float32):
        told, cores = str(dtype).removeprefix("torch."), dtype != torch.float32
        for size in (64, 128):
            for form, given in FORMS.items():
                yield Launch(f"{told}, {size}{form}", _both(dtype, size, **given), cores)
        yield Launch(f"{told}, 64, lengths", _both(dtype, 64, packed=True), cores)
        yield Launch(f"{told}, 64, block list", _both(dtype, 64, listed=True), cores)
        for size in (16, 32, 80, 96):
            for form in ("", ", key mask"):
                yield Launch(f"{told}, {size}{form}", _both(dtype, size, **FORMS[form]), cores)
    for size in (64, 128):
        for form in ("", ", key mask"):
            yield Launch(f"bfloat16, {size}{form}, shared keys", _both(torch.bfloat16, size, **FORMS[form], shared=2))


def _both(
    dtype: torch.dtype,
    size: int,
    *,
    masked: bool = False,
    packed: bool = False,
    ramp: int = 0,
    listed: bool = False,
    apart: bool = False,
    shared: int = 1,
) -> Callable[[], None]:
    def run() -> None:
        batch = 1 if packed else 2
        x, lse = torch.empty(batch, 256, 4, size, dtype=dtype).transpose(1, 2), torch.empty(batch, 4, 256)
        k = x[:, ::shared]
        bounds = torch.zeros(2, 5, dtype=torch.int32) if masked or packed else None
        mask = torch.ones(2, 256, dtype=torch.uint8) if masked else None
        entries = torch.zeros(9, dtype=torch.int32)
        half = entries.view(1, 3, 3), entries, entries
        blocks = [*half, *half, torch.zeros(1, 64, dtype=torch.int64)] if listed else []
        spans = torch.ones(4) if ramp else None
        given = bounds, mask, spans, blocks, flash.ENDLESS, 0, ramp, 0.125, 128 * packed
        place = flash.flash_forward(x, k, k, *given, apart)[3]
        flash.flash_backward(x, lse, lse if apart else None, x, lse, place, x, k, k, *given)

    return run
