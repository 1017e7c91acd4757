"""Attention of PyTorch and others on a GPU, to compare with ours: exact, windows, and linear."""

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx_kernels.ops.flash.library import library, library_attention

BACK_ENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "sdpa math": SDPBackend.MATH,
        "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa flash": SDPBackend.FLASH_ATTENTION,
        "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    }
)
PACKAGES = ("fla", "flash_attn.cute", "flash_attn_interface", "xformers")
# Contenders that must be compiled for each shape.
COMPILED = ("FlexAttention", "FlexAttention, window")
# Compiling takes half a minute, and longer backward, so these are timed only at these tokens, at all tokens of a step.
COMPILED_TRAIN = (2048, 8192)
# Keys in a window before and after the query.
WINDOW, CAUSAL_WINDOW = (128, 128), (512, 0)


class Inputs(NamedTuple):
    """Inputs of attention: q, k and v, [B, H, N, D] with the heads of a token contiguous in memory, possibly requiring
    gradients; the gradient of the output; and the real keys, [B, N] bool, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Tensor | None


# A forward pass, the tensors to differentiate it in, and the gradient of its outputs.
Step = tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor]


class Attention(NamedTuple):
    """A contender.

    Attributes:
        name: Its name on pages.
        role: `base`, `exact` for the other back ends of SDPA, `variant` for one of our mechanisms, or `peer`.
        like: Our contender that computes the same, by its name in `gpu_cases`.
        make: From inputs to a forward pass on them, in [B, H, N, D], or [real tokens, H, D] if packed.
        packed: Whether it has only the real tokens.
    """

    name: str
    role: str
    like: str
    make: Callable[[Inputs], Step]
    packed: bool = False


def peers(causal: bool, padded: bool, compiled: bool) -> Iterator[Attention]:
    """All installed peers with this form; those that cannot run report it when they are built or called.

    `compiled` adds those that must be compiled for each shape.
    """
    for name, back_end in BACK_ENDS.items():
        yield Attention(name, "exact", "sdpa", _scaled(causal, back_end))
    window = "local left=512 right=0" if causal else "local left=128 right=128"
    reach = CAUSAL_WINDOW if causal else WINDOW
    yield Attention("varlen_attn", "peer", "sdpa", _variable((-1, 0) if causal else (-1, -1)), packed=padded)
    if compiled:
        yield Attention(COMPILED[0], "peer", "sdpa", _compiled(causal, None))
    if padded:
        return
    yield Attention("varlen_attn, window", "peer", window, _variable(reach))
    if compiled:
        yield Attention(COMPILED[1], "peer", window, _compiled(causal, reach))
    if torch.cuda.is_available() and library(torch.cuda.get_device_capability()) is not None:
        yield Attention("FlashAttention", "exact", "sdpa", _flash_library(causal))
    if _installed("xformers.ops"):
        yield Attention("xFormers", "peer", "sdpa", _xformers(causal))
    if causal and _installed("fla.ops.linear_attn"):
        for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
            yield Attention(f"fla {name}", "peer", "linear", _fla(name))


def scaled(causal: bool) -> Attention:
    """PyTorch's default SDPA as models call it, the base of all comparisons."""
    return Attention("sdpa", "base", "sdpa", _scaled(causal, None))


def versions() -> dict[str, str | None]:
    """Versions of the optional packages."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = str(getattr(importlib.import_module(name), "__version__", "installed"))
        except Exception:  # a broken package is as good as none
            installed[name] = None
    return installed


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # a broken package is as good as none
        return False
    return True


def _scaled(causal: bool, back_end: SDPBackend | None) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        mask = None if values.mask is None else values.mask[:, None, None, :]

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(values.q, values.k, values.v, attn_mask=mask, is_causal=causal)

        def forced() -> Tensor:
            assert back_end is not None, "it is what is forced"
            with sdpa_kernel(back_end):
                return forward()

        return forward if back_end is None else forced, (values.q, values.k, values.v), values.grad

    return make


def _variable(window: tuple[int, int]) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        from torch.nn.attention.varlen import varlen_attn

        batch, heads, length, _ = values.q.shape

        def attend(rows: Sequence[Tensor], starts: Tensor, longest: int) -> Tensor:
            q, k, v = rows
            out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window)
            assert isinstance(out, Tensor), "nothing besides was asked for"
            return out

        if values.mask is None:
            starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=values.q.device)

            def forward() -> Tensor:
                rows = [x.transpose(1, 2).flatten(0, 1) for x in values[:3]]
                return attend(rows, starts, length).view(batch, length, heads, -1).transpose(1, 2)

            return forward, values[:3], values.grad
        # Only real tokens, with the samples concatenated; packing is not timed.
        *rows, grad = (x.detach().transpose(1, 2)[values.mask] for x in (values.q, values.k, values.v, values.grad))
        leaves = tuple(x.requires_grad_(values.q.requires_grad) for x in rows)
        lengths = values.mask.sum(1)
        starts, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
        return lambda: attend(leaves, starts, longest), leaves, grad

    return make


def _compiled(causal: bool, window: tuple[int, int] | None) -> Callable[[Inputs], Step]:
    compiled_once: dict[str, Any] = {}

    def make(values: Inputs) -> Step:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, _, length, _ = values.q.shape
        lengths = None if values.mask is None else values.mask.sum(1)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # At least one comparison, as the tracer requires.
            allowed = j >= 0
            if lengths is not None:
                allowed = allowed & (j < lengths[b])
            if window is not None:
                allowed = allowed & (j >= i - window[0]) & (j <= i + window[1])
            return allowed & (j <= i) if causal else allowed

        if not compiled_once:
            # One function for all inputs of a shape: the compiler gives up on a function after too many shapes.
            compiled_once["attend"] = torch.compile(flex_attention, dynamic=False)
            compiled_once["mask"] = None
            if causal or window is not None or lengths is not None:
                samples = None if lengths is None else batch
                compiled_once["mask"] = create_block_mask(seen, samples, None, length, length, device=values.q.device)
        return (
            lambda: compiled_once["attend"](values.q, values.k, values.v, block_mask=compiled_once["mask"]),
            values[:3],
            values.grad,
        )

    return make


def _flash_library(causal: bool) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        scale = values.q.shape[3] ** -0.5
        return lambda: library_attention(*values[:3], causal=causal, scale=scale), values[:3], values.grad

    return make


def _xformers(causal: bool) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        ops = importlib.import_module("xformers.ops")
        bias = ops.LowerTriangularMask() if causal else None

        def forward() -> Tensor:
            rows = (x.transpose(1, 2) for x in values[:3])
            return ops.memory_efficient_attention(*rows, attn_bias=bias).transpose(1, 2)

        return forward, values[:3], values.grad

    return make


def _fla(name: str) -> Callable[[Inputs], Step]:
    def make(values: Inputs) -> Step:
        attend = getattr(importlib.import_module("fla.ops.linear_attn"), name)

        def forward() -> Tensor:
            # The feature map is not part of its kernels.
            q, k = (F.elu(x).add(1.0).transpose(1, 2) for x in values[:2])
            return attend(q, k, values.v.transpose(1, 2), normalize=True)[0].transpose(1, 2)

        return forward, values[:3], values.grad

    return make


def rotating(make: Callable[[Inputs], Step], inputs: Sequence[Inputs], train: bool) -> Callable[[], object]:
    """Runs on different inputs at each call, so that they are not in the cache."""
    steps: list[Step] = []
    places = itertools.cycle(range(len(inputs)))

    def call() -> object:
        if not steps:
            steps.extend(make(each) for each in inputs)
        forward, leaves, grad = steps[next(places)]
        out = forward()
        return torch.autograd.grad(out, leaves, grad) if train else out

    return call
