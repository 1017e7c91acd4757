"""Reversible residual blocks: training in which activations take as much memory at any depth.

Each block is y1 = x1 + f(x2), y2 = x2 + g(y1), so its inputs follow from its outputs, x2 = y2 - g(y1) and x1 = y1 - f(x2), and
only the outputs of the last block are kept for the backward pass.

Source: Kitaev, Kaiser, Levskaya, 2020, Reformer, arXiv 2001.04451; Gomez et al., 2017, The Reversible Residual Network, arXiv
1707.04585.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Block(NamedTuple):
    """The two functions of a reversible block, and the parameters that each of them uses."""

    f: Callable[[Tensor], Tensor]
    g: Callable[[Tensor], Tensor]
    of_f: tuple[nn.Parameter, ...]
    of_g: tuple[nn.Parameter, ...]


class _Reversible(torch.autograd.Function):
    """All blocks as one function, whose backward computes inputs again, block by block."""

    @staticmethod
    def forward(ctx: Any, blocks: Sequence[Block], first: Tensor, second: Tensor, *parameters: Tensor) -> Any:
        first, second = plain(blocks, first, second)
        ctx.blocks, ctx.parameters = blocks, parameters
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first, second = ctx.saved_tensors
        of_first, of_second = gradients
        found: dict[Tensor, Tensor] = {}
        for block in reversed(ctx.blocks):
            out, of_input = _gradients(block.g, first, block.of_g, of_second, found)
            second, of_first = second - out, of_first + of_input
            out, of_input = _gradients(block.f, second, block.of_f, of_first, found)
            first, of_second = first - out, of_second + of_input
        return None, of_first, of_second, *(found.get(parameter) for parameter in ctx.parameters)


def _gradients(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: tuple[nn.Parameter, ...],
    of_out: Tensor,
    found: dict[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """What a function returns for x and the gradient of x; those of the parameters are added to `found`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = function(x)
        used = [parameter for parameter in parameters if parameter.requires_grad]
        of_x, *of_parameters = torch.autograd.grad(out, [x, *used], of_out, allow_unused=True)
    for parameter, gradient in zip(used, of_parameters, strict=True):
        if gradient is not None:
            found[parameter] = found[parameter] + gradient if parameter in found else gradient
    return out.detach(), torch.zeros_like(x) if of_x is None else of_x


def plain(blocks: Iterable[Block], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The same blocks by ordinary autograd, which keeps the activations of all of them."""
    for block in blocks:
        first = first + block.f(second)
        second = second + block.g(first)
    return first, second


def reversible(blocks: Sequence[Block], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Run the blocks and keep only their last outputs for the backward pass, whose gradients are those of `plain`.

    The functions must give the same output for the same input each time, so without dropout.

    Args:
        blocks: At least one.
        first: The first half of the residual stream, any shape.
        second: The second half, of the same shape.
    """
    parameters = dict.fromkeys(each for block in blocks for each in (*block.of_f, *block.of_g))
    return _Reversible.apply(blocks, first, second, *parameters)


def gpt2_blocks(model: Any) -> list[Block]:
    """The attention and the MLP of each layer of a GPT-2, converted or not, as the two functions of a block.

    Raises:
        ValueError: if the model has dropout and is in training mode.
    """
    if any(isinstance(each, nn.Dropout) and each.p and each.training for each in model.modules()):
        raise ValueError("Dropout differs when a block is computed again; set it to 0.")
    return [_block(layer) for layer in model.transformer.h]


def _block(layer: Any) -> Block:
    return Block(
        lambda x: layer.attn(layer.ln_1(x))[0],
        lambda x: layer.mlp(layer.ln_2(x)),
        (*layer.ln_1.parameters(), *layer.attn.parameters()),
        (*layer.ln_2.parameters(), *layer.mlp.parameters()),
    )


def logits(model: Any, ids: Tensor, run: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """The logits of a GPT-2 with two halves of the residual stream, which begin as the embeddings and end as their mean.

    Args:
        model: A GPT2LMHeadModel, converted or not.
        ids: Token ids, [B, L].
        run: `reversible` or `plain`.

    Returns:
        [B, L, vocabulary].
    """
    body = model.transformer
    x = body.wte(ids) + body.wpe(torch.arange(ids.shape[1], device=ids.device))
    first, second = run(gpt2_blocks(model), x, x)
    return model.lm_head(body.ln_f((first + second) / 2))


class Held:
    """Bytes of the tensors that autograd keeps for a backward pass: now and at most. Parameters do not count.

    Attributes:
        bytes: Now.
        peak: At most, until now.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = self.peak = 0
        self._uncounted = {each.untyped_storage().data_ptr() for each in parameters}
        self._users: dict[int, int] = {}

    def take(self, kept: "_Kept") -> None:
        """Count a tensor, whose storage others may share, until it is released."""
        storage = kept.tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._uncounted:
            return
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        weakref.finalize(kept, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self.bytes -= size


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def held_by_autograd(parameters: Iterable[Tensor]) -> Iterator[Held]:
    """Count what autograd keeps within the context, by its hooks of saved tensors."""
    held = Held(parameters)

    def pack(tensor: Tensor) -> _Kept:
        held.take(kept := _Kept(tensor))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield held
