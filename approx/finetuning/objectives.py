"""Training losses: the error of attention, the distance from a teacher, the loss of a task."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from approx.conversion import surgery
from approx.conversion.calibration import all_open, evaluating, exact_below
from approx.finetuning.options import Distillation
from approx.seam.observe import Call, observe
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx_kernels.ops.fastest.api import fastest_attention

# Longer than any input.
_ALWAYS_EXACT = 2**62
_TARGETS = ("labels", "start_positions", "end_positions")


class Objective(Protocol):
    """One loss.

    Attributes:
        labelled: Whether batches must carry targets.
    """

    labelled: bool

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            model: The model to call, possibly wrapped for several processes.
            inner: The transformers model inside.
            inputs: A batch, on the model's device.
        """
        ...


class Supervised:
    """The loss that transformers' models compute from targets: of a task, or of language modelling."""

    labelled = True

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`."""
        return model(**inputs).loss


class Transfer:
    """Attention transfer: each mechanism against exact attention on the same queries, keys and values.

    The model itself runs exact attention, so each layer learns independently, on the inputs that the base would feed it.
    With `joint` the model runs its mechanisms, and each layer learns on the outputs of the layers before it. Only the
    mechanisms are trained, so no second model is needed and the backward pass keeps no activations of the model.

    Source: Zhang et al. 2024, LoLCATs, arXiv 2410.10254; departs from it in the loss, which is relative to the target.

    Args:
        joint: Whether later layers receive the outputs of the mechanisms.
        match: `outputs` compares outputs [B, H, L, E]; `weights` compares dense attention weights by their divergence.
        projections: Names of projection parameters to train as well. Targets are then computed with the initial weights,
            and training is joint.
        model: The model, with its initial weights.
    """

    labelled = False

    def __init__(self, model: Any, *, joint: bool, match: str, projections: Sequence[str] = ()) -> None:
        self._joint, self._match = joint or bool(projections), match
        parameters = dict(model.named_parameters())
        self._first = {name: parameters[name].detach().clone() for name in projections}

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`: the mean over layers, of the relative squared error or of the divergence in nats."""
        terms: list[Tensor] = []
        inputs = _without_targets(inputs)
        with evaluating(inner):
            targets = self._targets(inner, inputs) if self._first else {}

            def compare(call: Call) -> None:
                if call.mechanism is None:
                    return
                target = targets.get(call.path)
                parts = call.members() if target is None else [call]
                terms.extend(term for part in parts if (term := self._term(part, target)) is not None)

            with all_open(inner) if self._joint else exactly(inner), observe(inner, compare):
                model(**inputs)
        return torch.stack(terms).mean()

    def _targets(self, inner: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Exact outputs with the initial weights, by path."""
        outputs: dict[str, Tensor] = {}

        def keep(call: Call) -> None:
            outputs[call.path] = call.output

        with torch.no_grad(), exactly(inner), observe(inner, keep):
            functional_call(inner, {name: x.to(inner.device) for name, x in self._first.items()}, kwargs=inputs)
        return outputs

    def _term(self, call: Call, target: Tensor | None) -> Tensor | None:
        mechanism = call.mechanism
        assert mechanism is not None
        if target is None and not any(parameter.requires_grad for parameter in mechanism.parameters()):
            return None
        real = _real(call)
        if target is not None:
            return relative_error(call.output, target, real)
        q, k, v = (call.q, call.k, call.v) if self._joint else (call.q.detach(), call.k.detach(), call.v.detach())
        tokens = {} if call.tokens is None else {"tokens": call.tokens}
        if self._match == "weights":
            return _divergence(mechanism.weights(q, k, call.mask, **tokens), _weights(call), real)
        with torch.no_grad():
            exact = fastest_attention(call.q, call.k, call.v, call.mask, causal=mechanism.causal, scale=mechanism.scale)
        mine = call.output if self._joint else mechanism(q, k, v, call.mask, **tokens)
        return relative_error(mine, exact, real)


class Distill:
    """Distance from a teacher: outputs with a temperature, hidden states and attention outputs of each layer, and labels.

    Source: Hinton et al. 2015, arXiv 1503.02531, for the outputs; layers as in Jiao et al. 2020, TinyBERT, arXiv 1909.10351,
    with errors relative to the teacher's activations.

    Args:
        teacher: The exact model; its parameters are frozen.
        weights: Weights of the parts.
    """

    def __init__(self, teacher: Any, weights: Distillation) -> None:
        self._teacher, self._weights = teacher.eval().requires_grad_(False), weights
        self.labelled = weights.labels > 0

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`."""
        own, weights = _without_targets(inputs), self._weights
        with torch.no_grad():
            due, due_attention = self._run(self._teacher, self._teacher, own)
        said, attention = self._run(model, inner, inputs if self.labelled else own)
        mask = own.get("attention_mask")
        terms = []
        if weights.logits:
            pairs = [(said[name], due[name]) for name in due if name.endswith("logits")]
            several = kind_of_outputs(self._teacher.config) == SEVERAL
            terms += [
                weights.logits * _distance(one, other, mask, weights.temperature, several=several) / len(pairs)
                for one, other in pairs
            ]
        if weights.hidden:
            layers = list(zip(said.hidden_states[1:], due.hidden_states[1:], strict=True))
            terms += [
                weights.hidden * relative_error(one, other, _fitting(mask, one)) / len(layers) for one, other in layers
            ]
        if weights.attention:
            terms += [
                weights.attention
                * relative_error(call.output, due_attention[path].output, _real(call))
                / len(attention)
                for path, call in attention.items()
            ]
        if self.labelled:
            terms.append(weights.labels * said.loss)
        return torch.stack(terms).sum()

    def _run(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Call]]:
        attention: dict[str, Call] = {}

        def keep(call: Call) -> None:
            attention[call.path] = call

        more = {"output_hidden_states": True} if self._weights.hidden else {}
        with observe(inner, keep) if self._weights.attention else nullcontext():
            return model(**inputs, **more), attention


def teacher_of(model: Any) -> Any:
    """Copy a converted model with exact attention; the copy has its own config, which selects the attention."""
    teacher = copy.deepcopy(model)
    surgery.use_exact_attention(teacher)
    return teacher


def exactly(model: Any) -> AbstractContextManager[None]:
    """Run exact attention in every layer within the context."""
    return exact_below(model, _ALWAYS_EXACT)


def divergence_of_labels(given: Tensor, due: Tensor) -> Tensor:
    """KL(due ‖ given) in nats of labels that do not exclude each other, added up: logits [B, L] -> [B]."""
    least = F.binary_cross_entropy_with_logits(due, due.sigmoid(), reduction="none")
    return (F.binary_cross_entropy_with_logits(given, due.sigmoid(), reduction="none") - least).sum(-1)


def relative_error(given: Tensor, due: Tensor, real: Tensor | None = None) -> Tensor:
    """Squared error relative to the squared target, a scalar.

    Args:
        given: Tensor of any shape.
        due: Target of the same shape.
        real: 1 where an entry counts and 0 elsewhere, broadcastable; None if all count.
    """
    apart, size = (given.float() - due.float()).square(), due.float().square()
    if real is not None:
        apart, size = apart * real, size * real
    return apart.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _without_targets(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name not in _TARGETS}


def _real(call: Call) -> Tensor | None:
    """Real queries, [B, 1, L, 1]."""
    if call.mask is None or call.mask.dim() != 2 or call.mask.shape[1] != call.q.shape[2]:
        return None
    return call.mask[:, None, :, None].float()


def _weights(call: Call) -> Tensor:
    """Exact attention weights, [B, H, L, S]."""
    mechanism = call.mechanism
    assert mechanism is not None
    with torch.no_grad():
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        scores = call.q.float() @ k.float().transpose(2, 3) * mechanism.scale
        if mechanism.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(
                k.shape[2] - call.q.shape[2]
            )
            scores = scores.masked_fill(~seen, float("-inf"))
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[:, None, None], float("-inf"))
        return scores.softmax(-1).nan_to_num()


def _divergence(given: Tensor, due: Tensor, real: Tensor | None) -> Tensor:
    """Mean divergence of weights [B, H, L, S] from the target over real queries, in nats."""
    tiny = 1e-6
    apart = (due * (due.clamp(min=tiny).log() - given.float().clamp(min=tiny).log())).sum(-1, keepdim=True)
    if real is None:
        return apart.mean()
    return (apart * real).sum() / (real.sum() * apart.shape[1]).clamp(min=1)


def _distance(given: Tensor, due: Tensor, mask: Tensor | None, temperature: float, *, several: bool) -> Tensor:
    """Distance of outputs: divergence over the last dimension, or squared error if that has size 1; of `several` labels, of each."""
    if several:
        return divergence_of_labels(given.float() / temperature, due.float() / temperature).mean() * temperature**2
    if due.shape[-1] == 1:
        return F.mse_loss(given.float(), due.float())
    log_given, log_due = (F.log_softmax(x.float() / temperature, -1) for x in (given, due))
    apart = (log_due.exp() * (log_due - log_given)).sum(-1) * temperature**2
    # Only outputs of single tokens, [B, L, V], have padding.
    if apart.dim() == 2 and mask is not None and mask.shape == apart.shape:
        return (apart * mask).sum() / mask.sum().clamp(min=1)
    return apart.mean()


def _fitting(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """A mask for hidden states [B, L, D]; None if their positions are not tokens, as for speech."""
    if mask is None or mask.shape != hidden.shape[:2]:
        return None
    return mask[:, :, None].float()
