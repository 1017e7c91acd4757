"""Exact softmax attention: materialised (the oracle), through PyTorch's fused kernels, or the fastest way there is."""

import torch
from torch import Tensor

from approx_kernels.checked import doubt
from approx_kernels.custom_op import capturing
from approx_kernels.exact.choice import case_of, chosen
from approx_kernels.exact.cpu import chunked_attention
from approx_kernels.exact.fused import fused_attention
from approx_kernels.exact.lengths import by_lengths
from approx_kernels.exact.reference import dense_attention
from approx_kernels.exact.ways import DEFAULT, OWN
from approx_kernels.implementation import choose, took
from approx_kernels.observed import needs_pytorch
from approx_kernels.shapes import check_shapes

CHUNK = 256


def exact_attention(
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
    """Softmax attention, `o_i = sum_j softmax_j(scale q_i.k_j) v_j`, in O(L S D).

    With `causal`, query i stands at position S - L + i and sees the keys up to there. A query without any
    allowed key gives 0.

    Source: Vaswani et al., 2017, Attention Is All You Need, arXiv 1706.03762; departs from it in nothing.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores.
        dropout: Probability with which an attention weight is dropped.
        impl: `auto` is PyTorch's SDPA as it is; `reference` materialises the weights in float32 at least; `cpu` multiplies
            matrices a chunk of queries at a time.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or the implementation asked for cannot run.
    """
    check_shapes(q, k, v, key_mask)
    run = choose("exact_attention", impl, {"fused": None, "cpu": _cpu_obstacle(q, dropout), "reference": None})
    if run == "cpu":

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chunked_attention(q, k, v, causal=causal, scale=scale, chunk=CHUNK)

        return by_lengths(attend, q, k, v, key_mask, causal=causal)
    attend_all = dense_attention if run == "reference" else fused_attention
    return attend_all(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)


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

    Nothing is measured. Where `approx doctor --probe` ran on this machine, the way is the fastest that it found; elsewhere it
    is compiled C for long inputs on CPUs with AVX-512, as the table `DEFAULTS` in `choice.py` says, and PyTorch's SDPA
    otherwise, also where a probe found flash kernels the fastest that have not passed their check on this GPU. With dropout,
    where the operations are observed (compilers, counters, derivatives) and below 128 keys it is always PyTorch's SDPA.

    Args: as for `exact_attention`, whose implementations may be asked for by `impl`.

    Returns:
        [B, H, L, E] in the dtype of q, or in that of autocast.

    Raises:
        ValueError: as `exact_attention`.
    """
    check_shapes(q, k, v, key_mask)
    run = choose("fastest_attention", impl, {"fastest": None, "cpu": _cpu_obstacle(q, dropout), "reference": None})
    # The ways call C and read lengths from the mask, for which nobody may wait while launches are captured.
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
        # What a probe timed may have been other kernels than those of today.
        name, way = DEFAULT, exact_attention
    took("fastest_attention", name)
    return way(q, k, v, key_mask, causal=causal, scale=scale)


def _cpu_obstacle(q: Tensor, dropout: float) -> str | None:
    if q.device.type != "cpu":
        return f"the tensors are on the {q.device.type}. Move them to the cpu, or ask for 'auto'."
    if q.dtype == torch.float16:
        return "the tensors are float16, whose products in chunks take many times as long. Convert them, or ask for 'auto'."
    return f"it has no dropout, and {dropout} was asked for. Ask for 'auto'." if dropout else needs_pytorch(q)
