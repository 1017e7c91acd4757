"""Attention as one operator: for observers who cannot follow shapes and branches that depend on the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_compiling, is_dynamo_compiling, is_exporting

from approx_kernels.cpu.compile import DTYPES, compiler_obstacle
from approx_kernels.dispatch.opaque import attend, attend_backward
from approx_kernels.runtime.observed import Observer, observed, unreadable


def is_one_operator(q: Tensor, *, whole: bool, runs_c: bool) -> bool:
    """Whether attention to these queries must be one operator.

    Args:
        q: Queries, [B, H, L, D].
        whole: Whether every step can be followed.
        runs_c: Whether it runs in C on a CPU, which is faster than what a compiler makes of the steps; an export has these.
    """
    who = observed(q)
    if who is None or who is Observer.TRANSFORM:
        return who is not None
    faster = runs_c and is_compiling() and not is_exporting() and q.device.type == "cpu" and q.dtype in DTYPES
    return unreadable(q) and (not whole or (faster and _has_c()))


def exact_is_one_operator(q: Tensor, scale: float, dropout: float) -> bool:
    """Whether exact attention of these queries must be one operator: in a graph nothing else looks up the fastest way.

    Its gradient computes it again, dropout leaves but one way, and its text holds no scale but the usual one.
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
    """What `module(q, k, v, key_mask, dropout=…, tokens=…)` gives, by an operator that a compiler takes as a whole.

    The backward pass computes it again and takes its gradient, with the same random draws.

    Args:
        module: Any module of that form; its state is what the operator is given, so that it may change and be learned.
            None for one that has no state, in evaluation mode.
        text: What `told` says of it.
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
    # Autocast, which may leave them in several dtypes, is over when the operator runs.
    k, v = k.to(q.dtype), v.to(q.dtype)
    if observed(q) is Observer.TRANSFORM:
        return _Transformed.apply(text, training, dropout, q, k, v, key_mask, tokens, *state)[0]  # pyright: ignore[reportOptionalSubscript]  # what forward returns
    return attend(q, k, v, key_mask, tokens, state, text, training, dropout)[0]


class _Transformed(torch.autograd.Function):
    """`attend` for the transforms of torch.func, which do not take the gradient of a registered operator."""

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
                f"Attention with dropout {dropout} runs under vmap with randomness={info.randomness!r}; allowed is "
                "'different'. Ask for it, or call eval() on the model."
            )
        how = text, training, dropout
        size, given = info.batch_size, list(zip(tensors, dims[3:], strict=True))
        # Samples do not depend on each other, so further ones go where there are some; but they share one state.
        if all(dim is None for _, dim in given[5:]):
            out, seed = _Transformed.apply(*how, *(_folded(*each, size) for each in given[:5]), *tensors[5:])  # pyright: ignore[reportGeneralTypeIssues]  # what forward returns
            return (out.unflatten(0, (size, -1)), seed), (0, None)
        found = [_Transformed.apply(*how, *(_one(*each, number) for each in given)) for number in range(size)]
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0, 0)  # pyright: ignore[reportArgumentType]  # what forward returns


class _Gradients(torch.autograd.Function):
    """`attend_backward` for the transforms of torch.func."""

    @staticmethod
    def forward(text: str, training: bool, dropout: float, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        grad, seed, q, k, v, key_mask, tokens, *state = tensors
        return tuple(attend_backward(grad, seed, q, k, v, key_mask, tokens, state, text, training, dropout))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "Attention as one operator has no second derivative. Take it without torch.func, with impl='reference'."
        )

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], text: str, training: bool, dropout: float, *tensors: Any) -> Any:
        # The gradient of the state is that of each sample alone.
        given = list(zip(tensors, dims[3:], strict=True))
        found = [
            _Gradients.apply(text, training, dropout, *(_one(*each, number) for each in given))
            for number in range(info.batch_size)
        ]
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0,) * len(found[0])  # pyright: ignore[reportArgumentType]  # what forward returns


def _folded(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor whose mapped dimension became a part of its first."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _one(x: Tensor | None, dim: int | None, number: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, number)
