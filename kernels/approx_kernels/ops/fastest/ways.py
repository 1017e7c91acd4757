"""The ways to compute exact attention, by name."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx_kernels.gpu.language import HEAD_SIZES, triton
from approx_kernels.ops.exact.compiled import compiled_attention, compiled_few, few_obstacle
from approx_kernels.ops.exact.compiled import obstacle as c_obstacle
from approx_kernels.ops.exact.cpu import batched_attention, chunked_attention
from approx_kernels.ops.exact.lengths import by_lengths
from approx_kernels.ops.exact.reference import exact_attention as fused_attention
from approx_kernels.ops.fastest.varlen import obstacle, packed_attention

# From q, k, v, key_mask and the keywords causal and scale.
Way = Callable[..., Tensor]

DEFAULT = "default SDPA"
COMPILED = "compiled C"
OWN = "own flash"
LIBRARY = "FlashAttention-4 or -3"
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHUNKS = (256, 512)


def ways(device: str, *, padded: bool, few: bool) -> dict[str, Way]:
    """The candidates for the fastest way on a kind of device, the default first.

    Args:
        device: `cpu` or `cuda`.
        padded: Whether there is a mask; this adds ways by lengths, without one.
        few: Whether there are only a few queries, as in decoding.
    """
    plain: dict[str, Way] = {DEFAULT: _default}
    if few:
        # Lengths or chunks cannot help if the weights are only a few rows.
        return plain if device == "cuda" else plain | {"batched products": batched_attention, **_compiled(_few_in_c)}
    if device == "cuda":
        plain |= {f"{name} SDPA": partial(_preferring, back_end=name) for name in BACK_ENDS}
        named = plain | {f"{name} by lengths": partial(_by_lengths, way=way) for name, way in plain.items() if padded}
        own: dict[str, Way] = {} if triton is None else {OWN: _own_flash}
        own[LIBRARY] = _library
        return named | own | ({"varlen": _packed} if padded else {})
    named = dict(plain)
    if padded:
        named[f"{DEFAULT} by lengths"] = partial(_by_lengths, way=_default)
    named |= {f"chunks of {chunk}": partial(_in_chunks, chunk=chunk) for chunk in CHUNKS}
    return named | _compiled(_in_c)


def _compiled(way: Way) -> dict[str, Way]:
    # If C was available during the probe but no longer is, another way replaces it.
    return {} if c_obstacle() else {COMPILED: way}


def _default(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    return fused_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=0.0)


def _preferring(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, back_end: str
) -> Tensor:
    # The others remain as fallbacks: a shape that the chosen one does not support must not fail.
    order = [BACK_ENDS[back_end], *(each for name, each in BACK_ENDS.items() if name != back_end)]
    with sdpa_kernel(order, set_priority=True):
        return _default(q, k, v, key_mask, causal=causal, scale=scale)


def _by_lengths(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, way: Way
) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return way(q, k, v, None, causal=causal, scale=scale)

    return by_lengths(attend, q, k, v, key_mask, causal=causal)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, chunk: int
) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunked_attention(q, k, v, causal=causal, scale=scale, chunk=chunk)

    return by_lengths(attend, q, k, v, key_mask, causal=causal)


def _in_c(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    why = c_obstacle(q)
    if why is not None:
        raise RuntimeError(why)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled_attention(q, k, v, causal=causal, scale=scale)

    return by_lengths(attend, q, k, v, key_mask, causal=causal)


def _few_in_c(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    why = few_obstacle(q, k, v)
    if why is None:
        return compiled_few(q, k, v, key_mask, causal=causal, scale=scale)
    if c_obstacle(q) is not None:
        raise RuntimeError(why)
    # The probed or default way applies to all head sizes, with and without gradients.
    return _default(q, k, v, key_mask, causal=causal, scale=scale)


def _own_flash(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    # A local import, since the flash kernels' fallback imports modules above.
    from approx_kernels.ops.flash.api import flash, flash_obstacle

    if not {q.shape[3], v.shape[3]} <= set(HEAD_SIZES):
        # The probed way applies to all head sizes.
        return _default(q, k, v, key_mask, causal=causal, scale=scale)
    why = flash_obstacle(q, v, 0.0)
    if why is not None:
        raise RuntimeError(why)
    try:
        return flash(q, k, v, key_mask, scale=scale, right=0 if causal else None, impl="triton")[0]
    except RuntimeError:
        raise
    except Exception as error:
        # A GPU that is too small or a broken compiler rules out only this way.
        raise RuntimeError(str(error)) from error


def _library(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    # A local import, as above.
    from approx_kernels.ops.flash.library import INSTALL, library, library_attention, library_obstacle

    if not q.is_cuda or library(torch.cuda.get_device_capability(q.device)) is None:
        raise RuntimeError(f"FlashAttention needs CUDA, and a build for this GPU. {INSTALL}.")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if library_obstacle(q, k, v, None, 0.0) is None:
            return library_attention(q, k, v, causal=causal, scale=scale)
        # The probed way applies to all head sizes and dtypes.
        return _default(q, k, v, None, causal=causal, scale=scale)

    return by_lengths(attend, q, k, v, key_mask, causal=causal)


def _packed(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    why = obstacle(q)
    if why is not None:
        raise RuntimeError(why)
    if key_mask is None:
        key_mask = k.new_ones(k.shape[0], k.shape[2]).bool()
    return packed_attention(q, k, v, key_mask, causal=causal, scale=scale)
