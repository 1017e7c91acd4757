"""How far the outputs of a model are from those of its base, and the gradient that predicts it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx.finetuning.objectives import divergence_of_labels

_HIDDEN = ("last_hidden_state", "hidden_states")


def divergence(given: Any, due: Any, mask: Tensor | None, *, several: bool = False) -> Tensor:
    """The divergence of outputs from those of the base, per example.

    Args:
        given: Outputs of a transformers model.
        due: Outputs of its base for the same batch.
        mask: True at real tokens, [B, L]; None if all are.
        several: Whether the outputs are over labels that do not exclude each other.

    Returns:
        [B]: for outputs over classes or tokens KL(base ‖ model) in nats, averaged over the tokens of an example and added
        over heads; for several labels that of each, added up; for a single number the squared difference; for hidden states the relative error.
    """
    total: Any = 0.0
    for name, target in _compared(due).items():
        value = getattr(given, name)
        if name in _HIDDEN:
            apart, size = ((value - target).float() * _rows(mask, target), target.float() * _rows(mask, target))
            total = total + apart.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1).clamp_min(1e-20)
        elif several:
            total = total + divergence_of_labels(value.float(), target.float())
        elif target.shape[-1] == 1:
            total = total + (value - target).float().square().flatten(1).mean(1)
        else:
            log_value, log_target = (_log_softmax(x, mask) for x in (value, target))
            # Masked places are -inf in both.
            apart = log_target.exp() * (log_target - log_value).nan_to_num(0.0, 0.0, 0.0)
            total = total + _mean(apart.sum(-1), mask)
    return total


def surrogate(due: Any, mask: Tensor | None, generator: torch.Generator, *, several: bool = False) -> Tensor:
    """A scalar whose squared gradient is, in expectation, the curvature of the divergence (the Fisher information).

    For outputs over classes it is the loss of a label that is drawn from the model's own prediction: the labels of the data
    have almost no gradient once a model has learned them. For hidden states it is a random projection.

    Args:
        due: Outputs of the base, with gradients.
        mask, several: As for `divergence`.
        generator: On the device of the outputs.

    Returns:
        The sum over the examples.
    """
    total: Any = 0.0
    for name, target in _compared(due).items():
        if several and name not in _HIDDEN:
            drawn = torch.bernoulli(target.detach().float().sigmoid(), generator=generator)
            total = total + F.binary_cross_entropy_with_logits(target.float(), drawn, reduction="sum")
        elif name in _HIDDEN or target.shape[-1] == 1:
            noise = torch.randn(target.shape, generator=generator, device=target.device)
            size = (target.detach().float() * _rows(mask, target)).flatten(1).norm(dim=1) if name in _HIDDEN else None
            projected = (target.float() * noise * _rows(mask, target)).flatten(1).sum(1)
            total = total + (projected if size is None else projected / size.clamp_min(1e-20)).sum()
        else:
            logs = _log_softmax(target, mask)
            rows = logs.detach().exp().flatten(0, -2)
            drawn = torch.multinomial(rows, 1, generator=generator).view(*logs.shape[:-1], 1)
            loss = -logs.gather(-1, drawn).squeeze(-1)
            if loss.dim() == 1:
                total = total + loss.sum()
            else:
                kept = torch.ones_like(loss) if mask is None or mask.shape != loss.shape else mask.float()
                # The losses of tokens are independent: their variances add up, and the divergence is their mean.
                total = total + (loss * kept / kept.sum(1, keepdim=True).clamp_min(1).sqrt()).sum()
    return total


def _compared(outputs: Any) -> dict[str, Tensor]:
    """The outputs to compare, by name: logits, or else the hidden states."""
    found = {name: value for name, value in outputs.items() if "logits" in name and isinstance(value, Tensor)}
    return found or {"last_hidden_state": outputs["last_hidden_state"]}


def _log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    # Logits over the tokens of the input, as of an answer's ends, [B, L].
    if mask is not None and mask.shape == logits.shape:
        logits = logits.masked_fill(~mask.bool(), float("-inf"))
    return F.log_softmax(logits.float(), -1)


def _rows(mask: Tensor | None, value: Tensor) -> Tensor:
    if mask is None or value.dim() != 3 or mask.shape != value.shape[:2]:
        return torch.ones((), device=value.device)
    return mask[:, :, None].float()


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the tokens of each example, [B]."""
    if values.dim() == 1:
        return values
    if mask is None or mask.shape != values.shape:
        return values.flatten(1).mean(1)
    return (values * mask).sum(1) / mask.sum(1).clamp_min(1)
