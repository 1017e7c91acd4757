"""The ways to compute exact attention, by name, among which a probe chooses."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx_kernels.exact.compiled import compiled_attention, compiled_few, few_obstacle
from approx_kernels.exact.compiled import obstacle as c_obstacle
from approx_kernels.exact.cpu import batched_attention, chunked_attention
from approx_kernels.exact.fused import fused_attention
from approx_kernels.exact.lengths import by_lengths
from approx_kernels.exact.varlen import obstacle, packed_attention

# From q, k, v, key_mask and the keywords causal and scale.
Way = Callable[..., Tensor]

DEFAULT = "default SDPA"
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHUNKS = (256, 512)


def ways(device: str, *, padded: bool, few: bool) -> dict[str, Way]:
    """The ways that may be the fastest on a kind of device, the default first.

    Args:
        device: `cpu` or `cuda`.
        padded: Whether there is a mask; then there are ways without any, by lengths.
        few: Whether there are only a few queries, as in decoding.
    """
    plain: dict[str, Way] = {DEFAULT: _default}
    if few:
        # Nothing to gain from lengths or chunks where the weights are a few rows.
        return plain if device == "cuda" else plain | {"batched products": batched_attention, "compiled C": _few_in_c}
    if device == "cuda":
        plain |= {f"{name} SDPA": partial(_preferring, back_end=name) for name in BACK_ENDS}
        found = plain | {f"{name} by lengths": partial(_by_lengths, way=way) for name, way in plain.items() if padded}
        return found | ({"varlen": _packed} if padded else {})
    found = dict(plain)
    if padded:
        found[f"{DEFAULT} by lengths"] = partial(_by_lengths, way=_default)
    found |= {f"chunks of {chunk}": partial(_in_chunks, chunk=chunk) for chunk in CHUNKS}
    return found | {"compiled C": _in_c}


def _default(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    return fused_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=0.0)


def _preferring(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float, back_end: str
) -> Tensor:
    # The others stay behind it: a shape that it does not take must not fail for the choice of another.
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
    if why is not None:
        raise RuntimeError(why)
    return compiled_few(q, k, v, key_mask, causal=causal, scale=scale)


def _packed(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    why = obstacle(q)
    if why is not None:
        raise RuntimeError(why)
    if key_mask is None:
        key_mask = k.new_ones(k.shape[0], k.shape[2]).bool()
    return packed_attention(q, k, v, key_mask, causal=causal, scale=scale)
