"""The kernels of Performer attention on what makes the compiler do something else."""

from collections.abc import Callable, Iterator

import torch

from approx_kernels.ops.performer.triton_launches import Launches, empty
from bench.offline import Launch


def launches() -> Iterator[Launch]:
    """Both forms of each dtype and size of heads, and what else is compiled differently; forward and backward."""
    half = torch.bfloat16
    yield Launch("bfloat16, 64", _both(half, 64, causal=False))
    for size in (64, 80, 128):
        yield Launch(f"bfloat16, {size}, causal, key mask", _both(half, size, masked=True))
    yield Launch("bfloat16, 128", _both(half, 128, causal=False))
    for causal, told in ((False, ""), (True, ", causal")):
        yield Launch(f"bfloat16, 64{told}, rows and weights of each head", _both(half, 64, causal=causal, own=True))
    yield Launch("bfloat16, 64, causal, relu", _both(half, 64, kernel="relu"))
    yield Launch("bfloat16, 64, causal, values of 32, 100 features", _both(half, 64, values=32, features=100))
    for size in (64, 128):
        for causal, told in ((False, ""), (True, ", causal")):
            yield Launch(f"float16, {size}{told}", _both(torch.float16, size, causal=causal))
            full = _both(torch.float32, size, causal=causal)
            yield Launch(f"float32, {size}{told}", full, tensor_cores=False)
    for causal, told in ((False, ""), (True, ", causal")):
        yield Launch(f"sums carried on, bfloat16, 64{told}", _without_products(half, 64, causal), tensor_cores=False)
    yield Launch(
        "sums carried on, float32, 128, causal", _without_products(torch.float32, 128, True), tensor_cores=False
    )


def _both(
    dtype: torch.dtype,
    size: int,
    *,
    values: int | None = None,
    features: int = 256,
    causal: bool = True,
    kernel: str = "softmax",
    masked: bool = False,
    own: bool = False,
) -> Callable[[], None]:
    def run() -> None:
        q, v, launches = _given(dtype, size, values or size, features, causal, kernel, masked, own)
        sums = launches.empty_sums(q)
        tops, share = (empty(q, *sums[1].shape[2:]) if kernel == "softmax" else None), empty(q, 1024)
        kept = share, share, torch.zeros(2, 4, 16, dtype=torch.int64)
        c = v if dtype == torch.bfloat16 else v.float()
        launches.sum_rows(q, v, launches.key_mask, None, None, tops, *sums, 0)
        launches.outputs((*sums, tops), v, kept)
        launches.query_gradients((*sums, tops), c, share, kept, q)
        launches.sum_rows(q, c, None, share, share, tops, *sums, 0)
        launches.key_gradients(sums, tops, c, kept, share, q, v)

    return run


def _without_products(dtype: torch.dtype, size: int, causal: bool) -> Callable[[], None]:
    def run() -> None:
        q, v, launches = _given(dtype, size, size, 256, causal, "softmax", True)
        *_, tops = launches.key_sums()
        c, share = launches.shares(v, v, empty(q, 1024))
        launches.query_sums(tops, c, share, share)

    return run


def _given(
    dtype: torch.dtype,
    size: int,
    values: int,
    features: int,
    causal: bool,
    kernel: str,
    masked: bool,
    own: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Launches]:
    q, v = (torch.zeros(2, 1024, 4, n, dtype=dtype).transpose(1, 2) for n in (size, values))
    mask = torch.ones(2, 1024, dtype=torch.uint8) if masked else None
    rows, offsets = (
        (torch.zeros(4, features, size), torch.zeros(4, features)) if own else (torch.zeros(features, size), None)
    )
    return q, v, Launches(q, q, v, rows, offsets, mask, causal, kernel, 0.125)
