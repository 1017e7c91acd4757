"""Kernels as operators of PyTorch: what compilers, CUDA graphs and counters of operations can see."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from approx_kernels.runtime.observed import Observer, observed


class Operator:
    """A function with a registered operator, which is called instead where autograd or an observer needs to see one."""

    def __init__(self, function: Callable[..., Any], operator: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.operator = function, operator

    def __call__(self, *args: Any) -> Any:
        """What the function returns.

        Raises:
            NotImplementedError: under forward-mode differentiation, where the operator would lose the tangents.
        """
        tensors = list(_tensors(args))
        who = observed(*tensors)
        if who is Observer.TANGENTS:
            raise NotImplementedError(
                f"{self.function.__name__} has no forward-mode derivative. Ask for impl='reference', or take reverse mode."
            )
        # The way through the operator takes the time of a small kernel.
        learning = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        return (self.function if who is None and not learning else self.operator)(*args)


def custom_op(
    fake: Callable[..., Any],
    *,
    flops: Callable[..., int] | None = None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function that launches kernels an operator of PyTorch, which `torch.compile` takes as a whole.

    The operator is called `<module>::<function>`, dots of the module written as `_`. A converted folder carries the module
    under a name of its own, so the package and any number of folders each have their own operator in one process;
    a module that is read again replaces its own.

    Args:
        fake: From the same arguments to empty outputs of the right shapes, dtypes and strides; also used for fake tensors.
        flops: From the shapes of the tensors, and the other arguments as they are, to multiply-adds counted as 2;
            it also gets the keyword `out_shape`. For `torch.utils.flop_counter`. None where nothing is multiplied, and
            where no counter looks: C on a CPU refuses to run under one, which sees plain PyTorch instead. What ran in C
            before there was a counter has a backward pass that is not counted.
        backward: As in `torch.library.register_autograd`: from the context and the gradients of all outputs to those of
            all arguments. It calls another such operator. None where there is no gradient.
        save: Keeps in the context what `backward` needs, from the keywords `inputs` and `output`.
        mutates: Arguments that the function writes to.

    Returns:
        What makes the operator of the function, whose arguments and results must be annotated. No result may be a view of
        an argument.
    """

    def registered(function: Callable[..., Any]) -> Operator:
        namespace = re.sub(r"[^A-Za-z0-9_]", _spelled, function.__module__.replace(".", "_"))
        name = function.__name__.lstrip("_")
        op = torch.library.custom_op(f"{namespace}::{name}", function, mutates_args=mutates)
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=save)
        packet = getattr(getattr(torch.ops, namespace), name)
        flop_counter.flop_registry.pop(packet, None)
        if flops is not None:
            flop_counter.register_flop_formula(packet)(flops)
        return Operator(function, op)

    return registered


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def capturing() -> bool:
    """Whether launches go into a CUDA graph; what they read must stay, and nobody may wait for the device."""
    # Without CUDA PyTorch has no answer.
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


def _spelled(found: re.Match[str]) -> str:
    return f"_{ord(found[0]):x}_"
