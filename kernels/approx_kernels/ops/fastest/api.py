"""Exact attention by the fastest implementation, from `approx doctor --probe` or documented defaults."""

import torch
from torch import Tensor

from approx_kernels.dispatch.checked import doubt
from approx_kernels.dispatch.implementation import choose, took
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact.cpu import chunks_obstacle
from approx_kernels.ops.fastest.choice import case_of, chosen
from approx_kernels.ops.fastest.ways import DEFAULT, OWN
from approx_kernels.runtime.custom_op import capturing
from approx_kernels.runtime.observed import needs_pytorch
from approx_kernels.tokens.shapes import check_form, check_shapes


def fastest_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """`exact_attention` in a way that is fast for inputs of this kind (device, dtype, length, few, causal, padded, training).

    Calls measure nothing. If `approx doctor --probe` ran on this machine, the fastest way it measured is used; otherwise
    compiled C for long inputs on CPUs with AVX-512, as in the table `DEFAULTS` in `choice.py`, and PyTorch's SDPA for
    all others, also if the probe favoured flash kernels that have not passed their check on this GPU. With dropout,
    with observed operations (compilers, counters, derivatives) and below 128 keys it is always PyTorch's SDPA.

    Args: as for `exact_attention`, whose implementations `impl` may select.

    Returns:
        [B, H, L, E] in the dtype of q, or in that of autocast.

    Raises:
        ValueError: as `exact_attention`.
    """
    check_shapes(q, k, v, key_mask)
    check_form(scale, dropout, causal=causal)
    ways = {"fastest": None, "fused": None, "cpu": chunks_obstacle(q, dropout), "reference": None}
    run = choose("fastest_attention", impl, ways)
    # The ways call C and read lengths from the mask, which would synchronise; a capture does not allow that.
    if run == "fastest" and (dropout or needs_pytorch(q, k, v) or (key_mask is not None and capturing())):
        run = "auto"
        took("fastest_attention", DEFAULT)
    if run != "fastest":
        return exact_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout, impl=run)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    case = case_of(q, k, key_mask, causal=causal)
    if case is None:
        took("fastest_attention", DEFAULT)
        return exact_attention(q, k, v, key_mask, causal=causal, scale=scale)
    name, way = chosen(case)
    if name == OWN and doubt("flash_attention", q):
        # The probe may have timed other kernels than today's.
        name, way = DEFAULT, exact_attention
    took("fastest_attention", name)
    return way(q, k, v, key_mask, causal=causal, scale=scale)
