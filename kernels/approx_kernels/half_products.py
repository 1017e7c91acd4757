"""Matrix products and convolutions of 16 bits on a CPU that has no instructions for them.

There PyTorch computes them many times slower than those of float32. Computed in float32 and rounded once they are as
exact and nearly as fast. A probe decides whether, and for how many rows.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from approx_kernels.findings import Finding, clock, crowded, find
from approx_kernels.products import FEATURES, ROWS, worth

DTYPES = (torch.bfloat16, torch.float16)
# Rows and weights that are float32 at a time: enough for the full speed of a product, and little beside a model.
_BLOCK_ROWS, _BLOCK_WEIGHTS = 512, 1 << 22
_REPEATS = 2


@contextlib.contextmanager
def half_products(rows: int, device: torch.device | str, dtype: torch.dtype) -> Iterator[bool]:
    """Compute products and convolutions of 16 bits in float32 for as long as the context lasts, if it is worth it.

    Holds for `linear`, `addmm`, `matmul` and its kin, `conv1d` and `conv2d`, called in this thread, with gradients; under
    autocast and inside of compiled graphs nothing is done. Yields whether it holds.

    Args:
        rows: Rows of the products, such as the tokens of a call; few of them lose.
        device: Where they are computed.
        dtype: What in.
    """
    if is_compiling() or not _worth_it(rows, torch.device(device), dtype):
        yield False
        return
    with _InFloat32():
        yield True


def asked(dtype: torch.dtype) -> str:
    """What the finding is about."""
    return f"{str(dtype).removeprefix('torch.')} products"


def worth_rows(dtype: torch.dtype) -> int | None:
    """From how many rows on it is worth it on this machine; None if never. Measured once a machine."""
    return find("cpu", asked(dtype), lambda: measure(dtype))["rows"]


def measure(dtype: torch.dtype) -> Finding:
    """Compare products of a layer in float32 with PyTorch's own.

    Returns:
        `rows`, from which on it is worth it, or None, and `gains`, how many times faster it is, by rows.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(FEATURES[1], FEATURES[0], generator=generator).to(dtype)
    gains = {}
    with clock() as now, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for rows in ROWS:
            x = torch.randn(rows, FEATURES[0], generator=generator).to(dtype)
            took = [(_seconds(F.linear, x, weight, now), _seconds(_linear, x, weight, now)) for _ in range(_REPEATS)]
            plain, wide = (min(each) for each in zip(*took, strict=True))
            gains[rows] = plain / wide
    return {"rows": worth(gains), "gains": {str(rows): round(gain, 2) for rows, gain in gains.items()}} | (
        {"crowded": True} if crowded() else {}
    )


class _InFloat32(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_FLOAT32 and not is_compiling() and not torch.is_autocast_enabled("cpu"):
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            dtype = tensors[0].dtype if tensors else None
            if dtype in DTYPES and all(_plain(each, dtype) for each in tensors):
                return _IN_FLOAT32[func](func, *args, **kwargs)
        return func(*args, **kwargs)


def _plain(x: Tensor, dtype: torch.dtype | None) -> bool:
    # Other kinds of tensors have products of their own.
    return type(x) in (Tensor, nn.Parameter) and x.dtype == dtype and x.device.type == "cpu"


def _as_linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2 or input.shape[-1:] != weight.shape[1:] or not weight.numel():
        return func(input, weight, bias)
    return _Linear.apply(input, weight, bias)  # type: ignore[return-value]  # apply has no types


def _as_addmm(func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor:
    # The projections of GPT-2; another use than as a layer is left to PyTorch.
    if more or input.shape != mat2.shape[1:] or mat1.shape[1:] != mat2.shape[:1] or not mat2.numel():
        return func(input, mat1, mat2, **more)
    return _Linear.apply(mat1, mat2.t(), input)  # type: ignore[return-value]  # apply has no types


def _widened(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    dtype = next(each.dtype for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    widen = lambda each: each.float() if isinstance(each, Tensor) else each  # noqa: E731  # said twice below
    return func(*map(widen, args), **{name: widen(each) for name, each in kwargs.items()}).to(dtype)


_IN_FLOAT32: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _as_linear,
    torch.addmm: _as_addmm,
    **dict.fromkeys(
        (
            *(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm),
            *(Tensor.__matmul__, F.conv1d, F.conv2d),
        ),
        _widened,
    ),
}


class _Linear(torch.autograd.Function):
    """A layer that keeps its input and weights as they are, and widens them by blocks, backward too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # one gradient comes in
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            _linear(grad, weight.t(), None) if for_x else None,
            _linear(flat.t(), x.flatten(0, -2).t(), None) if for_weight else None,
            flat.sum(0, dtype=torch.float32).to(grad.dtype) if for_bias else None,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in float32, rounded once; x [..., I], weight [O, I], bias [O]. Returns [..., O]."""
    flat = x.reshape(-1, x.shape[-1])
    made = x.new_empty(len(flat), len(weight))
    step = max(_BLOCK_WEIGHTS // max(weight.shape[1], 1), 64)
    for row in range(0, len(flat), _BLOCK_ROWS):
        rows = flat[row : row + _BLOCK_ROWS].float()
        for column in range(0, len(weight), step):
            columns = slice(column, column + step)
            wide = None if bias is None else bias[columns].float()
            made[row : row + _BLOCK_ROWS, columns] = F.linear(rows, weight[columns].float(), wide)
    return made.view(*x.shape[:-1], len(weight))


def _worth_it(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype not in DTYPES or rows < ROWS[0] or torch.is_autocast_enabled("cpu"):
        return False
    least = worth_rows(dtype)
    return least is not None and rows >= least


def _seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, now: Callable[[], float]) -> float:
    begun = now()
    product(x, weight)
    return now() - begun
