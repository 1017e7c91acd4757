"""PyTorch's fused attention, with support for forward-mode differentiation."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from approx_kernels.runtime.observed import Observer, observed


def sdpa(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the same arguments.

    Under forward-mode differentiation it uses the math backend, since the fused kernels have no such derivative.
    """
    if observed() is not Observer.TANGENTS:
        return F.scaled_dot_product_attention(q, k, v, **settings)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **settings)
