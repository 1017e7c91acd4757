"""Attention as one operator, for observers that cannot handle shapes and branches that depend on values."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_compiling, is_dynamo_compiling, is_exporting

from approx_kernels.cpu.compile import DTYPES, compiler_obstacle
from approx_kernels.dispatch.opaque import attend, attend_backward
from approx_kernels.runtime.pytorch import Observer, observed, unreadable


def is_one_operator(q: Tensor, *, whole: bool, runs_c: bool) -> bool:
    """Whether attention to these queries must be one operator.

    Args:
        q: Queries, [B, H, L, D].
        whole: Whether every step can be traced.
        runs_c: Whether it runs in C on a CPU, which is faster than the compiled steps; an export traces the steps.
    """
    who = observed(q)
    if who is None or who is Observer.TRANSFORM:
        return who is not None
    faster = runs_c and is_compiling() and not is_exporting() and q.device.type == "cpu" and q.dtype in DTYPES
    return unreadable(q) and (not whole or (faster and _has_c()))


def exact_is_one_operator(q: Tensor, scale: float, dropout: float) -> bool:
    """Whether exact attention of these queries must be one operator: in a graph, only that looks up the fastest way.

    Not with gradients, which would recompute it, nor with dropout, which has only one way, nor with an unusual scale,
    since the operator's text holds only the usual one.
    """
    compiling = is_dynamo_compiling() and not is_exporting() and q.device.type == "cpu"
    wanted = compiling and not dropout and not (torch.is_grad_enabled() and q.requires_grad)
    return wanted and scale == q.shape[3] ** -0.5


@assume_constant_result
def _has_c() -> bool:
    return compiler_obstacle() is None


def attend_opaquely(
    module: nn.Module | None,
    text: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    dropout: float,
    tokens: Tensor | None,
) -> Tensor:
    """`module(q, k, v, key_mask, dropout=…, tokens=…)` as one operator that compilers do not trace into.

    The backward pass recomputes the outputs with the same random draws and differentiates them.

    Args:
        module: A module with that signature; its state is an input of the operator, so it can change and be learned. None
            for a module without state, in evaluation mode.
        text: The module's description from `told`.
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool or None.
        dropout: As the module takes it.
        tokens: [B, S] or None, for modules that take it.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    state = (
        [] if module is None else [*dict(module.named_parameters()).values(), *dict(module.named_buffers()).values()]
    )
    training = module is not None and module.training
    # Autocast may leave mixed dtypes, and is not active inside the operator.
    k, v = k.to(q.dtype), v.to(q.dtype)
    if observed(q) is Observer.TRANSFORM:
        return _Transformed.apply(text, training, dropout, q, k, v, key_mask, tokens, *state)[0]  # pyright: ignore[reportOptionalSubscript]  # what forward returns
    return attend(q, k, v, key_mask, tokens, state, text, training, dropout)[0]


class _Transformed(torch.autograd.Function):
    """`attend` for the transforms of torch.func, which do not support gradients of registered operators."""

    @staticmethod
    def forward(text: str, training: bool, dropout: float, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        q, k, v, key_mask, tokens, *state = tensors
        return attend(q, k, v, key_mask, tokens, state, text, training, dropout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.how, tensors = inputs[:3], inputs[3:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        seed, *tensors = ctx.saved_tensors
        slopes = _Gradients.apply(*ctx.how, grads[0], seed, *tensors)
        assert slopes is not None
        learned = [slope if x.is_floating_point() else None for slope, x in zip(slopes[3:], tensors[5:], strict=True)]
        return None, None, None, *slopes[:3], None, None, *learned

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], text: str, training: bool, dropout: float, *tensors: Any) -> Any:
        if dropout and info.randomness != "different":
            raise RuntimeError(
                f"Attention with dropout {dropout} runs under vmap with randomness={info.randomness!r}; only 'different' is "
                "supported. Set it, or call eval() on the model."
            )
        how = text, training, dropout
        size, given = info.batch_size, list(zip(tensors, dims[3:], strict=True))
        # Samples are independent, so the mapped dimension joins the batch, provided that all share one state.
        if all(dim is None for _, dim in given[5:]):
            out, seed = _Transformed.apply(*how, *(_folded(*each, size) for each in given[:5]), *tensors[5:])  # pyright: ignore[reportGeneralTypeIssues]  # what forward returns
            return (out.unflatten(0, (size, -1)), seed), (0, None)
        results = [_Transformed.apply(*how, *(_one(*each, number) for each in given)) for number in range(size)]
        return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0, 0)  # pyright: ignore[reportArgumentType]  # what forward returns


class _Gradients(torch.autograd.Function):
    """`attend_backward` for the transforms of torch.func."""

    @staticmethod
    def forward(text: str, training: bool, dropout: float, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        grad, seed, q, k, v, key_mask, tokens, *state = tensors
        return tuple(attend_backward(grad, seed, q, k, v, key_mask, tokens, state, text, training, dropout))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Only for a message: there is no second derivative."""
        ctx.text = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{json.loads(ctx.text)[0]} as one operator has no second derivative. Take it without torch.func, in plain "
            "PyTorch: inside `approx_kernels.dispatch.implementation.implementation('reference')` and "
            "`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
        )

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], text: str, training: bool, dropout: float, *tensors: Any) -> Any:
        # Each sample has its own gradient of the state.
        given = list(zip(tensors, dims[3:], strict=True))
        results = [
            _Gradients.apply(text, training, dropout, *(_one(*each, number) for each in given))
            for number in range(info.batch_size)
        ]
        return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0,) * len(results[0])  # pyright: ignore[reportArgumentType]  # what forward returns


def _folded(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with its mapped dimension merged into the first."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _one(x: Tensor | None, dim: int | None, number: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, number)
