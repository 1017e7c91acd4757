"""Closeness to an exact result, with a tolerance measured on a reference."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_close(name: str, actual: Tensor, reference: Tensor, exact64: Tensor, factor: float = 2.0) -> None:
    """Assert that a result is about as close to the exact one as a plain computation in its dtype is.

    Args:
        name: What is compared, for the message.
        actual: The result under test.
        reference: The same computed plainly, in the dtype of `actual`.
        exact64: The same computed in float64.
        factor: How many times the reference's error is allowed.
    """
    assert actual.dtype == reference.dtype, f"{name}: {actual.dtype}, the reference is {reference.dtype}"
    assert actual.shape == reference.shape == exact64.shape, f"{name}: shapes differ"
    assert exact64.dtype == torch.float64, f"{name}: the exact result is {exact64.dtype}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error, budget = error_and_budget(actual, reference, exact64, factor)
    assert error <= budget, f"{name}: error {error:.2e} exceeds its budget {budget:.2e}"


def error_and_budget(actual: Tensor, reference: Tensor, exact64: Tensor, factor: float) -> tuple[float, float]:
    """The error of a result, and what it may be: root mean squares relative to the exact result.

    The budget is `factor` times the reference's own error, and at least `factor` roundings of the dtype, so that a
    lucky reference asks for nothing impossible.
    """
    size = exact64.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    error, rounding = (((x.double() - exact64).square().mean().sqrt() / size).item() for x in (actual, reference))
    return error, factor * max(rounding, torch.finfo(actual.dtype).eps)


def with_float64(
    attend: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor, dtype: torch.dtype, impl: str = "cpu"
) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """The output and the gradients, each by an implementation, by the reference, and by the reference in float64.

    Args:
        attend: Called with q, k, v and `impl`.
        tensors: What it is called with, rounded to `dtype`.
        grad: The gradient of the output.
        dtype: Of the first two.
        impl: The implementation under test.

    Returns:
        Names and tensors, as `assert_close` takes them.
    """
    results = []
    for way, wide in ((impl, dtype), ("reference", dtype), ("reference", torch.float64)):
        inputs = [x.detach().to(dtype).to(wide).requires_grad_() for x in tensors]
        out = attend(*inputs, impl=way)
        slopes = torch.autograd.grad(out, inputs, grad.to(dtype).to(wide), materialize_grads=True, allow_unused=True)
        results.append((out, *slopes))
    return list(zip(("out", "dq", "dk", "dv"), *results, strict=True))


def at_real_queries(out: Tensor, key_mask: Tensor | None) -> Tensor:
    """Outputs [B, H, L, E] with 0 at padded queries, whose outputs have no meaning; unchanged if L differs from S."""
    if key_mask is None or out.shape[2] != key_mask.shape[1]:
        return out
    return out.masked_fill(~key_mask[:, None, :, None], 0.0)


def equal_and_falling_scores(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of 8 numbers, [1, 2, n, 8], such that C's lists of the largest scores come close to their end.

    Even queries score all keys alike, so that every key is a candidate; odd ones score the first keys highest, so that
    what is written past the list before theirs would spoil the best they have.
    """
    k = torch.zeros(1, 2, keys, 8)
    k[..., 0], k[..., 1] = 1.0, torch.linspace(4, 0, keys)
    # The other numbers part the queries, but score nothing.
    q = torch.randn(1, 2, queries, 8)
    q[..., :2] = 0.0
    q[:, :, ::2, 0] = q[:, :, 1::2, 1] = 1.0
    return q, k, torch.randn(1, 2, keys, 8)
