"""How far a converted model's outputs are from those of its base: as a whole, and with one layer converted alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx.checkpoints.history import LayerDivergence
from approx.conversion.calibration import evaluating, exactly, mechanisms
from approx.errors import ApproxError, Exit
from approx.planning.plan import described
from approx.tasks.classification import NUMBER, SEVERAL, kind_of_outputs

_HIDDEN = ("last_hidden_state", "hidden_states")


def divergence(outputs: Any, target_outputs: Any, mask: Tensor | None, *, several: bool = False) -> Tensor:
    """The divergence of outputs from those of the base, per example.

    Args:
        outputs: Outputs of a transformers model.
        target_outputs: Outputs of its base for the same batch.
        mask: True at real tokens, [B, L]; None if all are.
        several: Whether the outputs are over labels that do not exclude each other.

    Returns:
        [B]: for outputs over classes or tokens KL(base ‖ model) in nats, averaged over the tokens of an example and
        added over heads; for several labels that of each, added up; for a single number the squared difference; for
        hidden states the relative error.
    """
    total: Any = 0.0
    for name, target in _compared(target_outputs).items():
        value = getattr(outputs, name)
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


def surrogate(target_outputs: Any, mask: Tensor | None, generator: torch.Generator, *, several: bool = False) -> Tensor:
    """A scalar whose squared gradient is, in expectation, the curvature of the divergence (the Fisher information).

    For outputs over classes it is the loss of a label that is drawn from the model's prediction: the labels of the
    data have almost no gradient once a model has learned them. For hidden states it is a random projection.

    Args:
        target_outputs: Outputs of the base, with gradients.
        mask, several: As for `divergence`.
        generator: On the device of the outputs.

    Returns:
        The sum over the examples.
    """
    total: Any = 0.0
    for name, target in _compared(target_outputs).items():
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
                weights = torch.ones_like(loss) if mask is None or mask.shape != loss.shape else mask.float()
                # The losses of tokens are independent: their variances add up, and the divergence is their mean.
                total = total + (loss * weights / weights.sum(1, keepdim=True).clamp_min(1).sqrt()).sum()
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


def divergence_of_labels(outputs: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ outputs) in nats , summed over labels that do not exclude each other: logits [B, L] -> [B]."""
    least = F.binary_cross_entropy_with_logits(target, target.sigmoid(), reduction="none")
    return (F.binary_cross_entropy_with_logits(outputs, target.sigmoid(), reduction="none") - least).sum(-1)


@torch.no_grad()
def of_layers(
    model: Any,
    batches: Sequence[dict[str, Tensor]],
    teacher: Any = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[LayerDivergence]:
    """Measure how far each converted layer alone moves the outputs, while all others are exact.

    Args:
        model: A converted model; it is not changed.
        batches: Inputs of the model, without targets, on its device.
        teacher: The exact model; by default the model's own weights with exact attention.
        advance: Called with batches done and in all.

    Returns:
        One entry for each converted layer, in their order.

    Raises:
        ApproxError: if a layer makes the outputs infinite, or not a number.
    """
    several = kind_of_outputs(model.config) == SEVERAL
    sites = sorted(model.config.approx["sites"].items(), key=lambda item: item[1]["layer"])
    own = {path: mechanisms(model, [path]) for path, _ in sites}
    sums, count = dict.fromkeys(own, 0.0), 0
    with evaluating(model):
        for number, inputs in enumerate(batches):
            advance(number, len(batches))
            if teacher is None:
                with exactly(model):
                    target = model(**inputs)
            else:
                target = teacher(**inputs)
            mask = inputs.get("attention_mask")
            for path, members in own.items():
                with exactly(model, but=members):
                    apart = divergence(model(**inputs), target, None if mask is None else mask.bool(), several=several)
                # Rounding may leave a divergence of nothing below 0.
                sums[path] += float(apart.double().clamp_min(0).sum())
            count += len(apart)
    found = []
    for path, site in sites:
        names = ", ".join(dict.fromkeys(part.mechanism for part in described(site)))
        if not math.isfinite(sums[path]):
            raise ApproxError(
                f"With only layer {site['layer']} converted ({names}) the outputs are not finite, so layers cannot be "
                "compared. Convert the base again, with other settings of that layer.",
                Exit.VERIFICATION,
            )
        found.append(LayerDivergence(layer=site["layer"], mechanism=names, divergence=sums[path] / count))
    return found


def unit(model: Any) -> str:
    """The unit of divergences of a model's outputs, in words."""
    if model.base_model is model:
        return "relative error of the hidden states"
    return "squared difference" if kind_of_outputs(model.config) == NUMBER else "nats"
