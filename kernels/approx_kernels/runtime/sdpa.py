"""PyTorch's fused attention, in the form that whoever differentiates it needs."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx_kernels.runtime.observed import Observer, observed


def sdpa(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, whose arguments it takes.

    Under forward-mode differentiation it is that of the plain steps, as PyTorch's kernels have no such derivative.
    """
    if observed() is not Observer.TANGENTS:
        return F.scaled_dot_product_attention(q, k, v, **settings)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **settings)
