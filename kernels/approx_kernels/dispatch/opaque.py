"""Attention as one operator that rebuilds the mechanism from a text and runs it; `one_operator` decides when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import with_autograd

_kinds: dict[str, type[nn.Module]] = {}


def name_kind(kind: type[nn.Module]) -> None:
    """Register a module class, so that `attend` can rebuild its modules from the text of `told`."""
    _kinds[_name(kind)] = kind


def told(kind: type[nn.Module], arguments: dict[str, Any]) -> str:
    """A module's class and constructor arguments as text, for an operator's arguments."""
    return json.dumps([_name(kind), arguments])


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
    held = dict(zip(names, state, strict=True))
    if not dropout:
        return functional_call(module, held, (q, k, v, key_mask), more)
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else []):
        torch.manual_seed(int(seed))
        return functional_call(module, held, (q, k, v, key_mask), {**more, "dropout": dropout})


@cache
def _made(text: str) -> nn.Module:
    name, arguments = json.loads(text)
    return _kinds[name](**arguments)


def _name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
