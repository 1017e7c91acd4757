"""Matrix products and convolutions of 16 bits on a CPU that has no instructions for them.

There PyTorch computes them many times slower than those of float32, those of some layouts a hundred times. Computed in
float32 and rounded once they are as exact and nearly as fast. A probe decides whether, by the layout and the number of rows.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from approx_kernels.findings import Finding, clock, crowded, find
from approx_kernels.products import worth

DTYPES = (torch.bfloat16, torch.float16)
# How the weights of a layer lie in memory: most models have the first, GPT-2 the second, and products of activations too.
BY_OUTPUT, BY_INPUT = "weights [out, in]", "weights [in, out]"
# The rows that are tried, with weights of so many features in and out.
ROWS, _FEATURES = (1, 8, 64, 512), 768
# Rows and weights that are float32 at a time: enough for the full speed of a product, and little beside a model.
_BLOCK_ROWS, _BLOCK_WEIGHTS = 512, 1 << 22
_REPEATS = 2

Least = Mapping[str, int | None]
"""From how many rows on it is worth it, by layout; None if never."""


@contextlib.contextmanager
def half_products(
    rows: int, device: torch.device | str, dtype: torch.dtype, *, layouts: Collection[str]
) -> Iterator[bool]:
    """Compute products and convolutions of 16 bits in float32 for as long as the context lasts, if it is worth it.

    Holds for `linear`, `addmm`, `matmul` and its kin, `conv1d` and `conv2d`, called in this thread, with gradients; in
    compiled graphs too; under autocast nothing is done. Yields whether it holds.

    Args:
        rows: Rows of the products, such as the tokens of a call; few of them may lose.
        device: Where they are computed.
        dtype: What in.
        layouts: How the weights of the layers lie. Whether it holds is decided by these, for looking at every call costs
            time; when it does, each product is decided by its own.
    """
    if torch.device(device).type != "cpu" or dtype not in DTYPES or torch.is_autocast_enabled("cpu"):
        yield False
        return
    least = least_rows(dtype)
    if not any(_enough(rows, least, layout) for layout in layouts):
        yield False
        return
    with _InFloat32(least):
        yield True


def asked(dtype: torch.dtype) -> str:
    """What the finding is about."""
    return f"{str(dtype).removeprefix('torch.')} products"


@assume_constant_result
def least_rows(dtype: torch.dtype) -> Least:
    """From how many rows on it is worth it on this machine. Measured once a machine."""
    never = {"rows": dict.fromkeys((BY_OUTPUT, BY_INPUT))}
    return find("cpu", asked(dtype), lambda: measure(dtype), otherwise=never)["rows"]


def measure(dtype: torch.dtype) -> Finding:
    """Compare products of a layer in float32 with PyTorch's own.

    Returns:
        By layout `rows`, from which on it is worth it, or None, and `gains`, how many times faster it is, by rows.
    """
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(_FEATURES, _FEATURES, generator=generator).to(dtype)
    found: Finding = {"rows": {}, "gains": {}}
    with clock() as now, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for layout, weight in ((BY_OUTPUT, square), (BY_INPUT, square.t())):
            gains = {}
            for rows in ROWS:
                x = torch.randn(rows, _FEATURES, generator=generator).to(dtype)
                took = [[_seconds(way, x, weight, now) for way in (F.linear, _linear)] for _ in range(_REPEATS)]
                plain, wide = (min(each) for each in zip(*took, strict=True))
                gains[rows] = plain / wide
            found["rows"][layout] = worth(gains)
            found["gains"][layout] = {str(rows): round(gain, 2) for rows, gain in gains.items()}
    return found | ({"crowded": True} if crowded() else {})


def _enough(rows: int, least: Least, layout: str) -> bool:
    needed = least[layout]
    return needed is not None and rows >= needed


class _InFloat32(TorchFunctionMode):
    def __init__(self, least: Least) -> None:
        super().__init__()
        self.least = least

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_FLOAT32 and not torch.is_autocast_enabled("cpu"):
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            dtype = tensors[0].dtype if tensors else None
            if dtype in DTYPES and all(_plain(each, dtype) for each in tensors):
                return _IN_FLOAT32[func](self.least, func, *args, **kwargs)
        return func(*args, **kwargs)


def _plain(x: Tensor, dtype: torch.dtype | None) -> bool:
    # Other kinds of tensors have products of their own.
    return type(x) in (Tensor, nn.Parameter) and x.dtype == dtype and x.device.type == "cpu"


def _as_linear(least: Least, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:] and weight.numel()
    layout = BY_OUTPUT if weight.is_contiguous() else BY_INPUT
    if not fits or not _enough(input.numel() // weight.shape[1], least, layout):
        return func(input, weight, bias)
    return _Linear.apply(input, weight, bias)


def _as_addmm(least: Least, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor:
    # The projections of GPT-2; another use than as a layer is left to PyTorch.
    fits = not more and input.shape == mat2.shape[1:] and mat1.shape[1:] == mat2.shape[:1] and mat2.numel()
    layout = BY_OUTPUT if mat2.t().is_contiguous() else BY_INPUT
    if not fits or not _enough(len(mat1), least, layout):
        return func(input, mat1, mat2, **more)
    return _Linear.apply(mat1, mat2.t(), input)


def _as_matmul(least: Least, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    rows = input.numel() // max(input.shape[-1], 1) if input.dim() else 0
    if kwargs.get("out") is not None or not _enough(rows, least, BY_INPUT):
        return func(input, *args, **kwargs)
    return _widened(func, input, *args, **kwargs)


def _as_convolution(least: Least, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    # It has a product for every position, and is slower still.
    return func(*args, **kwargs) if least[BY_INPUT] is None else _widened(func, *args, **kwargs)


def _widened(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    dtype = next(each.dtype for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    wide = {name: _wide(each) for name, each in kwargs.items()}
    return func(*map(_wide, args), **wide).to(dtype)


def _wide(given: Any) -> Any:
    return given.float() if isinstance(given, Tensor) else given


_PRODUCTS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
_IN_FLOAT32: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _as_linear,
    torch.addmm: _as_addmm,
    **dict.fromkeys(_PRODUCTS, _as_matmul),
    **dict.fromkeys((F.conv1d, F.conv2d), _as_convolution),
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            _linear(grad, weight.t(), None) if for_x else None,
            _linear(flat.t(), rows.t(), None) if for_weight else None,
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


def _seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, now: Callable[[], float]) -> float:
    begun = now()
    product(x, weight)
    return now() - begun
