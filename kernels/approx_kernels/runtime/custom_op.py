"""Register kernels as PyTorch operators, so that compilers, CUDA graphs and FLOP counters can see them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import flop_counter

from approx_kernels.runtime.pytorch import Observer, observed


class Operator:
    """A function with a registered custom operator, which is called instead when autograd or an observer needs it."""

    def __init__(self, function: Callable[..., Any], operator: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.operator = function, operator

    def __call__(self, *args: Any) -> Any:
        """Call the function or its operator.

        Raises:
            NotImplementedError: under forward-mode differentiation, since the operator would lose the tangents.
        """
        tensors = list(_tensors(args))
        who = observed(*tensors)
        if who is Observer.TANGENTS:
            raise NotImplementedError(
                f"{self.function.__name__} has no forward-mode derivative. Ask for impl='reference', or take reverse mode."
            )
        # Dispatching the operator takes as long as a small kernel.
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
    """Register a function that launches kernels as a PyTorch operator, which `torch.compile` treats as opaque.

    The operator is called `<module>::<function>`, with `_` for the dots of the module. A converted folder has the
    module under its own name, so the package and any number of folders have separate operators in one process;
    reloading a module replaces its own.

    Args:
        fake: From the same arguments to empty outputs of the right shapes, dtypes and strides; also used for fake
            tensors.
        flops: Formula for `torch.utils.flop_counter`: from the shapes of the tensors, the other arguments unchanged and
            the keyword `out_shape` to FLOPs, a multiply-add counting as 2. None if nothing is multiplied, or for C on a
            CPU, which does not run under a counter: that sees plain PyTorch instead. Backward passes of C calls that
                ran
            before the counter started are not counted.
        backward: As in `torch.library.register_autograd`: from the context and the gradients of all outputs to those of
            all arguments. It calls another such operator. None if there is no gradient: to ask for it is a
                RuntimeError.
        save: Stores in the context what `backward` needs, from the keywords `inputs` and `output`.
        mutates: Arguments that the function writes to.

    Returns:
        A decorator for the function, whose arguments and results must be annotated. No result may be a view of an
        argument.
    """

    def registered(function: Callable[..., Any]) -> Operator:
        namespace = re.sub(r"[^A-Za-z0-9_]", _spelled, function.__module__.replace(".", "_"))
        name = function.__name__.lstrip("_")
        op = torch.library.custom_op(f"{namespace}::{name}", function, mutates_args=mutates)
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=save)
        elif not mutates:
            op.register_autograd(functools.partial(refuse_derivative, f"The result of {function.__module__}.{name}"))
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


def refuse_derivative(of: str, ctx: Any, *grads: Any) -> NoReturn:
    """The backward pass of an operator without one; `of` names what has none.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{of} cannot be differentiated, and create_graph=True asks for it. Take second derivatives in plain "
        "PyTorch: inside `approx_kernels.dispatch.implementation.implementation('reference')` and "
        "`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
    )


def _spelled(character: re.Match[str]) -> str:
    return f"_{ord(character[0]):x}_"
