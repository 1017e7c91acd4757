"""Attention as one operator, for observers that cannot follow shapes and branches that depend on values.

The operator builds the mechanism again from a text and runs it. Registered operators have no gradients under the
transforms of torch.func, so there an `autograd.Function` with a rule for vmap calls it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_dynamo_compiling, is_exporting
from torch.func import functional_call

from approx_kernels.cpu.compile import DTYPES, compiler_obstacle
from approx_kernels.runtime.custom_op import custom_op, refuse_derivative
from approx_kernels.runtime.pytorch import UNREADABLE, Observer, observed, with_autograd

_kinds: dict[str, type[nn.Module]] = {}


def register_kind(kind: type[nn.Module]) -> None:
    """Register a module class, so that the operator can build its modules from their `description`."""
    _kinds[_name(kind)] = kind


def description(kind: type[nn.Module], arguments: dict[str, Any]) -> str:
    """A module's class and constructor arguments as text, for an operator's arguments."""
    return json.dumps([_name(kind), arguments])


@assume_constant_result
def described(mechanism: Any) -> str:
    """The description of a mechanism, whose class it registers."""
    kind = type(mechanism)
    register_kind(kind)
    form = {name: getattr(mechanism, name) for name in ("heads", "head_dim", "causal", "scale")}
    return description(kind, form | mechanism.settings)


def attend_as_one_operator(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    tokens: Tensor | None = None,
    **notes: Any,
) -> Tensor | None:
    """`Mechanism.as_one_operator` in this package: the output, [B, H, L, E], or None if the steps can be followed."""
    who = observed(q)
    if who is None:
        return None
    if who is not Observer.TRANSFORM:
        # C is faster than compiled steps; an export has the steps.
        in_c = who is Observer.COMPILER and not is_exporting() and mechanism.runs_c and q.device.type == "cpu"
        whole = mechanism.compiles == "whole" or (is_exporting() and mechanism.always_exact)
        traced = whole and not (in_c and q.dtype in DTYPES and _has_c())
        if traced or who not in UNREADABLE:
            return None
    state = [*dict(mechanism.named_parameters()).values(), *dict(mechanism.named_buffers()).values()]
    how = described(mechanism), mechanism.training, dropout
    return attend_opaquely(q, k, v, key_mask, tokens, state, *how)


@assume_constant_result
def _has_c() -> bool:
    return compiler_obstacle() is None


def exact_is_one_operator(q: Tensor, scale: float, dropout: float) -> bool:
    """Whether exact attention of these queries must be one operator: in a graph, only that looks up the fastest way.

    Not with gradients, which would recompute it, nor with dropout, which has only one way, nor with an unusual scale,
    since the operator's text holds only the usual one.
    """
    compiling = is_dynamo_compiling() and not is_exporting() and q.device.type == "cpu"
    wanted = compiling and not dropout and not (torch.is_grad_enabled() and q.requires_grad)
    return wanted and scale == q.shape[3] ** -0.5


def attend_opaquely(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    tokens: Tensor | None,
    state: Sequence[Tensor],
    text: str,
    training: bool,
    dropout: float,
) -> Tensor:
    """The module of a description as one operator that compilers do not trace into.

    The backward pass recomputes the outputs with the same random draws and differentiates them.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool or None.
        tokens: [B, S] or None, for modules that take it.
        state: The module's parameters and buffers, in this order, so that it can change and be learned.
        text: The module's `description`.
        training: Whether the module is in training mode.
        dropout: As the module takes it.

    Returns:
        [B, H, L, E] in the dtype of q.
    """
    # Autocast may leave mixed dtypes, and is not active inside the operator.
    k, v = k.to(q.dtype), v.to(q.dtype)
    if observed(q) is Observer.TRANSFORM:
        return _Attend.apply(text, training, dropout, q, k, v, key_mask, tokens, *state)[0]  # pyright: ignore[reportOptionalSubscript]  # what forward returns
    return attend(q, k, v, key_mask, tokens, state, text, training, dropout)[0]


class _Attend(torch.autograd.Function):
    """`attend` under the transforms of torch.func."""

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
        slopes: Any = _Gradients.apply(*ctx.how, grads[0], seed, *tensors)
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
        if any(dim is not None for dim in dims[8:]):
            return _one_by_one(_Attend, info.batch_size, how, tensors, dims[3:])
        # Samples are independent, so the mapped dimension joins the batch, provided that all share one state.
        folded = [
            x
            if x is None
            else (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(tensors[:5], dims[3:8], strict=True)
        ]
        out, seed = _Attend.apply(*how, *folded, *tensors[5:])  # pyright: ignore[reportGeneralTypeIssues]  # what forward returns
        return (out.unflatten(0, (info.batch_size, -1)), seed), (0, None)


class _Gradients(torch.autograd.Function):
    """`attend_backward` under the transforms of torch.func."""

    @staticmethod
    def forward(text: str, training: bool, dropout: float, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        grad, seed, q, k, v, key_mask, tokens, *state = tensors
        return tuple(attend_backward(grad, seed, q, k, v, key_mask, tokens, state, text, training, dropout))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Only for the message: there is no second derivative."""
        ctx.name = json.loads(inputs[0])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_derivative(f"The gradient of {ctx.name} under torch.func", ctx)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], text: str, training: bool, dropout: float, *tensors: Any) -> Any:
        # Each sample has its own gradient of the state.
        return _one_by_one(_Gradients, info.batch_size, (text, training, dropout), tensors, dims[3:])


def _one_by_one(
    function: type[torch.autograd.Function], count: int, how: Sequence[Any], tensors: Sequence[Any], dims: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The results of a function for each of the mapped samples, and their mapped dimensions."""
    results = [
        function.apply(*how, *(x if dim is None else x.select(dim, one) for x, dim in zip(tensors, dims, strict=True)))
        for one in range(count)
    ]
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))  # pyright: ignore[reportArgumentType]  # what forward returns
    return stacked, (0,) * len(stacked)


def _like(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), torch.empty((), dtype=torch.int64, device="cpu")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_mask, tokens, state, ctx.text, ctx.training, ctx.dropout = inputs
    ctx.given = key_mask is not None, tokens is not None
    ctx.save_for_backward(output[1], q, k, v, *state, *(x for x in (key_mask, tokens) if x is not None))


def _grad(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    seed, q, k, v, *rest = ctx.saved_tensors
    tokens = rest.pop() if ctx.given[1] else None
    key_mask = rest.pop() if ctx.given[0] else None
    slopes = attend_backward(grad, seed, q, k, v, key_mask, tokens, rest, ctx.text, ctx.training, ctx.dropout)
    learned = [slope if x.is_floating_point() else None for slope, x in zip(slopes[3:], rest, strict=True)]
    return *slopes[:3], None, None, learned, None, None, None


def _operations(q: Any, k: Any, v: Any, key_mask: Any, tokens: Any, state: Any, text: str, *_: Any, **__: Any) -> int:
    return q[0] * _made(text).flops(k[2])  # pyright: ignore[reportCallIssue]  # what every mechanism has


@custom_op(_like, flops=_operations, backward=_grad, save=_keep)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    tokens: Tensor | None,
    state: Sequence[Tensor],
    text: str,
    training: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attend, and return the seed of the dropout: a scalar, int64 on the CPU."""
    seed = torch.randint(2**31, (), device="cpu") if dropout else torch.zeros((), dtype=torch.int64, device="cpu")
    # Autograd is off here; counters watch the gradients of modules' inputs, which would never arrive.
    q, k, v = q.detach(), k.detach(), v.detach()
    out = _run(q, k, v, key_mask, tokens, state, text, training, dropout, seed)
    # An operator's result must have the declared strides and must not alias its inputs.
    return out.clone(memory_format=torch.contiguous_format), seed


def _slopes(
    grad: Tensor,
    seed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Any,
    tokens: Any,
    state: Sequence[Tensor],
    *_: Any,
) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, *state)]


def _operations_backward(grad: Any, seed: Any, *given: Any, **more: Any) -> int:
    # The forward pass again, and two products for each one in it.
    return 3 * _operations(*given, **more)


@custom_op(_slopes, flops=_operations_backward)
def attend_backward(
    grad: Tensor,
    seed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    tokens: Tensor | None,
    state: Sequence[Tensor],
    text: str,
    training: bool,
    dropout: float,
) -> list[Tensor]:
    """The gradients of q, k, v and the state; zeros for those without one."""
    # Parameters come first in the state; buffers are not learned.
    learnable = 3 + len(dict(_made(text).named_parameters()))
    inputs = [
        x.detach().requires_grad_(place < learnable and x.is_floating_point())
        for place, x in enumerate((q, k, v, *state))
    ]

    def gradients() -> Sequence[Tensor | None]:
        # Views, since counters that watch the inputs of modules would interfere with these gradients.
        watched = [x.view_as(x) for x in inputs[:3]]
        out = _run(watched[0], watched[1], watched[2], key_mask, tokens, inputs[3:], text, training, dropout, seed)
        learned = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(out, learned, grad, allow_unused=True)

    computed = iter(with_autograd(gradients))
    slopes = [next(computed) if x.requires_grad else None for x in inputs]
    return [
        torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if slope is None
        else slope.clone(memory_format=torch.contiguous_format)
        for x, slope in zip(inputs, slopes, strict=True)
    ]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    tokens: Tensor | None,
    state: Sequence[Tensor],
    text: str,
    training: bool,
    dropout: float,
    seed: Tensor,
) -> Tensor:
    module = _made(text).train(training)
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    more = {} if tokens is None else {"tokens": tokens}
    tensors = dict(zip(names, state, strict=True))
    if not dropout:
        return functional_call(module, tensors, (q, k, v, key_mask), more)
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else []):
        torch.manual_seed(int(seed))
        return functional_call(module, tensors, (q, k, v, key_mask), {**more, "dropout": dropout})


@cache
def _made(text: str) -> nn.Module:
    name, arguments = json.loads(text)
    return _kinds[name](**arguments)


def _name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
