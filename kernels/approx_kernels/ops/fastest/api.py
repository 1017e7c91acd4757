"""Exact attention by the fastest implementation, from `approx doctor --probe` or documented defaults."""

from torch import Tensor, nn
from torch.compiler import assume_constant_result

from approx_kernels.dispatch.checked import doubt
from approx_kernels.dispatch.implementation import choose, took
from approx_kernels.dispatch.opaque import attend_opaquely, description, exact_is_one_operator, register_kind
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact.cpu import chunks_obstacle
from approx_kernels.ops.fastest.choice import case_of, chosen
from approx_kernels.ops.fastest.ways import DEFAULT, OWN
from approx_kernels.runtime.pytorch import capturing, in_autocast, needs_pytorch
from approx_kernels.tokens import check_form, check_shapes


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
    """`exact_attention` in a fast way for inputs of this kind (device, dtype, length, few, causal, padded, training).

    Calls measure nothing. If `approx doctor --probe` ran on this machine, the fastest way it measured is used;
    otherwise compiled C for long inputs on CPUs with AVX-512, as in the table `DEFAULTS` in `choice.py`, and PyTorch's
    SDPA for all others, also if the probe favoured flash kernels that have not passed their check on this GPU. With
    dropout, with observed operations (compilers, counters, derivatives) and below 128 keys it is always PyTorch's SDPA.

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
    q, k, v = in_autocast(q, k, v)
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


def layer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """`fastest_attention` of a layer without a mechanism; in a graph one operator, which looks up the fastest way."""
    if exact_is_one_operator(q, scale, dropout):
        # The scale may be symbolic, which text cannot hold; one operator implies the default scale.
        text = _described(q.shape[1], q.shape[3], causal, q.shape[3] ** -0.5)
        return attend_opaquely(q, k, v, key_mask, None, [], text, False, 0.0)
    return fastest_attention(q, k, v, key_mask, causal=causal, scale=scale, dropout=dropout)


@assume_constant_result
def _described(heads: int, head_dim: int, causal: bool, scale: float) -> str:
    return description(_Layer, {"heads": heads, "head_dim": head_dim, "causal": causal, "scale": scale})


class _Layer(nn.Module):
    """A layer without a mechanism, as the operator builds it from text."""

    def __init__(self, heads: int, head_dim: int, causal: bool, scale: float) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal, self.scale = heads, head_dim, causal, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return fastest_attention(q, k, v, key_mask, causal=self.causal, scale=self.scale)

    def flops(self, length: int) -> int:
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * self.heads * pairs * self.head_dim


register_kind(_Layer)
