"""Train one mode with transformers' Trainer: its data, losses, trained parameters, validation and order of examples."""

import copy
import hashlib
import json
import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.pytorch_utils import Conv1D

from approx.checkpoints import families
from approx.checkpoints.history import trainings
from approx.conversion import surgery
from approx.conversion.calibration import all_open, evaluating, exactly, mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation import tracking
from approx.finetuning.divergence import divergence_of_labels
from approx.finetuning.options import Distillation, FinetuneStage, Lora
from approx.planning import positions
from approx.planning.plan import described
from approx.progress import Progress
from approx.seam.observe import Call, observe
from approx.tasks import open_task
from approx.tasks.carrying import Carried
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx.tasks.padding import IGNORED, padded_labels
from approx.tasks.task import Encoding, Example, Split, Task
from approx.tasks.text import Text
from approx.version import install
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.runtime.atomic_file import write_whole

_PROJECTIONS = (nn.Linear, Conv1D)


def mechanism_parameters(model: Any) -> list[str]:
    """Names of the mechanisms' parameters: feature maps, spans, mixtures."""
    return [name for name, _ in model.named_parameters() if ".mechanism." in name]


def attention_layers(model: Any, inputs: dict[str, Tensor]) -> dict[str, list[str]]:
    """Find the linear layers around attention, in the order in which they run.

    Args:
        model: Any model that dispatches its attention.
        inputs: A batch on its device.

    Returns:
        `before`: names of the projections to queries, keys and values; `after`: names of the output projections.
    """
    sites: list[nn.Module] = []
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    ran: list[tuple[str, str]] = []

    def enter(call: Call) -> None:
        ran.append(("attention", call.path))
        sites.append(model.base_model.get_submodule(call.path))

    def run(module: nn.Module, args: Any, output: Any) -> None:
        ran.append(("layer", names[module]))

    hooks = [module.register_forward_hook(run) for module in modules.values() if isinstance(module, _PROJECTIONS)]
    training = model.training
    try:
        with observe(model, before=enter), torch.no_grad():
            model.eval()(**inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    layers: dict[str, list[str]] = {"before": [], "after": []}
    for place, (kind, name) in enumerate(ran):
        if kind == "attention":
            site = names[model.base_model.get_submodule(name)]
            # Input projections are children of the attention module; the output projection may be its sibling.
            layers["before"] += [
                layer for what, layer in ran[:place] if what == "layer" and layer.startswith(f"{site}.")
            ]
            layers["after"] += [layer for what, layer in ran[place + 1 : place + 2] if what == "layer"]
    return {kind: list(dict.fromkeys(names)) for kind, names in layers.items()}


def chosen_parameters(model: Any, train: str, inputs: dict[str, Tensor]) -> list[str]:
    """Names of the parameters selected by `train`; the mechanisms' parameters are always included.

    Args:
        model: The model.
        train: `all`, `attention` or `head`.
        inputs: A batch on its device.

    Raises:
        ApproxError: if the model has no head.
    """
    names = [name for name, _ in model.named_parameters()]
    if train == "all":
        # Feature encoders of speech models stay frozen, as in the original fine-tuning.
        return [name for name in names if ".feature_extractor." not in f".{name}"]
    if train == "head":
        chosen = head_parameters(model)
    else:
        layers = attention_layers(model, inputs)
        places = tuple(f"{layer}." for kind in layers.values() for layer in kind)
        chosen = [name for name in names if name.startswith(places)]
    return list(dict.fromkeys([*chosen, *mechanism_parameters(model)]))


def head_parameters(model: Any) -> list[str]:
    """Names of the task head's parameters.

    Raises:
        ApproxError: if the model has no head.
    """
    prefix = f"{model.base_model_prefix}."
    head = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    if model.base_model is model or not head:
        raise ApproxError(
            f"A {type(model).__name__} has no task head to train. Train all, or attention.",
            Exit.UNSUPPORTED,
        )
    return head


def add_adapters(model: Any, options: Lora, inputs: dict[str, Tensor], seed: int) -> list[str]:
    """Add low-rank adapters to linear layers, in place; outputs do not change.

    Source: Hu et al. 2021, LoRA, arXiv 2106.09685, by the package peft.

    Returns:
        Names of the adapters' parameters.

    Raises:
        ApproxError: if peft is not installed, or no layer has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ApproxError(
            f"The mode 'lora' needs the package peft ({error}). Install it: {install('train')}.",
            Exit.MISSING,
        ) from None
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, _PROJECTIONS)}
    targets = options.targets
    if targets is None:
        targets = [name for names in attention_layers(model, inputs).values() for name in names]
    elif not set(targets) <= known:
        wrong = ", ".join(sorted(set(targets) - known))
        raise ApproxError(
            f"The lora targets {wrong} are not linear layers of this model. It has: {', '.join(sorted(known))}."
        )
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only divides by the rank, which works with a float
        lora_dropout=options.dropout,
        target_modules=targets,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    return [name for name, _ in model.named_parameters() if ".lora_" in name]


def remove_adapters(model: Any, *, merge: bool) -> None:
    """Remove adapters, in place; with `merge` the weights take over what they learned."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            if merge:
                module.merge()  # type: ignore[operator]  # typed as an attribute of a module
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())


def check_modes(modes: list[str], model: Any, *, text: bool, projections: bool) -> None:
    """Refuse modes that the model cannot use.

    Raises:
        ApproxError: if a mode cannot be used; the message names an alternative.
    """
    converted = families.is_converted(model)
    if modes[-1] == "lora":
        raise ApproxError(
            "'lora' comes last, so nothing is trained with adapters. Put a mode behind it, e.g. --recover lora,task."
        )
    if len(set(modes)) < len(modes):
        raise ApproxError(f"--recover {','.join(modes)} names a mode twice. Name each once.")
    for mode in ("transfer", "distill"):
        if mode in modes and not converted:
            raise ApproxError(
                f"'{mode}' fits a converted model to exact attention, but this {type(model).__name__} is exact "
                "already. Train it with 'task', 'clm' or 'mlm'.",
                Exit.UNSUPPORTED,
            )
    if "transfer" in modes and not (mechanism_parameters(model) or projections):
        kinds = sorted({part.mechanism for site in model.config.approx["sites"].values() for part in described(site)})
        raise ApproxError(
            f"'transfer' trains the parameters of mechanisms, and {', '.join(kinds)} has none. Use 'distill' or "
            "'task', or let it train the projections (--projections).",
            Exit.UNSUPPORTED,
        )
    for mode in ("clm", "mlm"):
        if mode in modes and not text:
            raise ApproxError(f"'{mode}' continues pre-training on plain text. Give it with --text, without --task.")
    if "task" in modes and text:
        raise ApproxError("'task' needs labels, which plain text has not. Give --task, or use 'clm' or 'mlm'.")


def default_modes(model: Any, *, text: bool, causal: bool, taught: bool) -> list[str]:
    """Default modes: for a converted model attention transfer, if mechanisms have parameters, and distillation.

    Args:
        model: The model.
        text: Whether it is trained on plain text.
        causal: Whether it predicts the next token.
        taught: Whether there is a teacher besides the model's own weights with exact attention, which are the base's
            until they are trained.
    """
    last = ("clm" if causal else "mlm") if text else "task"
    if not families.is_converted(model):
        return [last]
    first = ["transfer"] if mechanism_parameters(model) else []
    return [*first, "distill" if taught or not retrained(model.config.approx) else last]


def retrained(record: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's own weights, not only its mechanisms, were trained since it was converted.

    Args:
        record: The field `approx` of its config.
    """
    return any(step.moved_weights for step in trainings(record))


_TARGETS = ("labels", "start_positions", "end_positions")


class Objective(Protocol):
    """One loss."""

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

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`."""
        return model(**inputs).loss


class Segments:
    """Language modelling of inputs in segments, each with what a task carries from those before, without gradient.

    Source: Dai et al. 2019, Transformer-XL, arXiv 1901.02860.

    Args:
        carried: The model, and what it keeps.
    """

    def __init__(self, carried: Carried) -> None:
        self._carried = carried

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch's targets; see `Objective`."""
        tokens, targets = inputs["input_ids"], inputs["labels"][:, 1:]
        self._carried.forget(model)
        steps = [*self._carried.steps(targets.shape[1])]
        parts = zip(tokens[:, :-1].split(steps, 1), targets.split(steps, 1), strict=True)
        losses = [
            F.cross_entropy(self._carried.read(some).float().transpose(1, 2), wanted, reduction="sum")
            for some, wanted in parts
        ]
        self._carried.forget()
        return torch.stack(losses).sum() / (targets != IGNORED).sum()


class Transfer:
    """Attention transfer: each mechanism against exact attention on the same queries, keys and values.

    The model itself runs exact attention, so each layer learns independently, on the inputs that the base would feed
    it. With `joint` the model runs its mechanisms, and each layer learns on the outputs of the layers before it. Only
    the mechanisms are trained, so no second model is needed and the backward pass keeps no activations of the model.

    Source: Zhang et al. 2024, LoLCATs, arXiv 2410.10254; departs from it in the loss, which is relative to how much the
    target varies from token to token.

    Args:
        joint: Whether later layers receive the outputs of the mechanisms.
        match: `outputs` compares outputs [B, H, L, E]; `weights` compares dense attention weights by their divergence.
        projections: Names of projection parameters to train as well. Targets are then computed with the initial
            weights, and training is joint.
        model: The model, with its initial weights.
    """

    def __init__(self, model: Any, *, joint: bool, match: str, projections: Sequence[str] = ()) -> None:
        self._joint, self._match = joint or bool(projections), match
        if match == "weights" and not all(each.averages for each in mechanisms(model)):
            raise ApproxError(
                "'--match weights' compares attention weights, but a layer with `update: delta` has none that are positive and sum "
                "to 1. Leave the option out, which compares outputs.",
                Exit.UNSUPPORTED,
            )
        parameters = dict(model.named_parameters())
        self._first = {name: parameters[name].detach().clone() for name in projections}

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`: the mean over layers, of the relative squared error or of the divergence in nats."""
        terms: list[Tensor] = []
        inputs = without_targets(inputs)
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
        if not self._joint:
            # The layer itself attended exactly.
            return relative_error(mechanism(q, k, v, call.mask, **tokens), call.output.detach(), real)
        with torch.no_grad():
            exact = fastest_attention(call.q, call.k, call.v, call.mask, causal=mechanism.causal, scale=mechanism.scale)
        return relative_error(call.output, exact, real)


class Distill:
    """Distance from a teacher's outputs (with a temperature), hidden states and attention outputs, and from labels.

    Source: Hinton et al. 2015, arXiv 1503.02531, for the outputs; layers as in Jiao et al. 2020, TinyBERT, arXiv
    1909.10351, with errors relative to how much the teacher's activations vary from token to token.

    Args:
        teacher: The exact model; its parameters are frozen.
        weights: Weights of the parts.
        kept: Keeps the teacher's logits; None computes them in each pass.
    """

    def __init__(self, teacher: Any, weights: Distillation, kept: "KeptLogits | None" = None) -> None:
        self._teacher, self._weights, self.kept = teacher.eval().requires_grad_(False), weights, kept

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `Objective`."""
        unlabelled, weights = without_targets(inputs), self._weights
        if self.kept is not None:
            return self._loss_of_kept(self.kept, model, inputs if weights.labels else unlabelled, unlabelled)
        with torch.no_grad():
            target, target_attention = self._run(self._teacher, self._teacher, unlabelled)
        outputs, attention = self._run(model, inner, inputs if weights.labels else unlabelled)
        mask = unlabelled.get("decoder_attention_mask", unlabelled.get("attention_mask"))
        several = kind_of_outputs(self._teacher.config) == SEVERAL
        compared = [name for name in target if name.endswith("logits")] if weights.logits else []
        terms: list[Tensor] = []
        for name in compared:
            one, other = outputs[name], target[name]
            if name in _PLACES:
                one, other = _without_padding(one, mask), _without_padding(other, mask)
            apart = _distance(one, other, mask, weights.temperature, several=several)
            terms.append(weights.logits * apart / len(compared))
        if weights.hidden:
            layers = list(zip(_hidden(outputs), _hidden(target), strict=True))
            terms += [
                weights.hidden * relative_error(one, other, _fitting(mask, one)) / len(layers) for one, other in layers
            ]
        if weights.attention:
            terms += [
                weights.attention
                * relative_error(call.output, target_attention[path].output, _real(call, mask))
                / len(attention)
                for path, call in attention.items()
            ]
        if weights.labels:
            terms.append(weights.labels * outputs.loss)
        return torch.stack(terms).sum()

    def _loss_of_kept(
        self, kept: "KeptLogits", model: Any, inputs: dict[str, Tensor], unlabelled: dict[str, Tensor]
    ) -> Tensor:
        """The loss against kept logits; it has no other parts than those of outputs and labels."""
        rows = kept.of(self._teacher, unlabelled)
        outputs = model(**inputs)
        terms = [
            self._weights.logits
            * kept.distance(name, outputs[name], [row[name] for row in rows], unlabelled)
            / len(rows[0])
            for name in rows[0]
        ]
        if self._weights.labels:
            terms.append(self._weights.labels * outputs.loss)
        return torch.stack(terms).sum()

    def _run(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Call]]:
        attention: dict[str, Call] = {}

        def keep(call: Call) -> None:
            attention[call.path] = call

        more = {"output_hidden_states": True} if self._weights.hidden else {}
        with observe(inner, keep) if self._weights.attention else nullcontext():
            return model(**inputs, **more), attention


def _hidden(outputs: Any) -> list[Tensor]:
    """What each layer puts out, [B, L, D]; of an encoder and a decoder, all layers of both."""
    if "encoder_hidden_states" in outputs:
        return [*outputs.encoder_hidden_states[1:], *outputs.decoder_hidden_states[1:]]
    return list(outputs.hidden_states[1:])


class KeptLogits:
    """The largest logits of a teacher for each input, which does without it in further passes.

    What is not among the largest counts as one more class, so that the divergence is a lower bound of the whole one, and is
    it where all logits are kept. Each input is computed alone, so that a number does not depend on its batch.

    Args:
        count: Logits that are kept of each place.
        temperature: Their divisor.
        several: Whether outputs are over labels that do not exclude each other; then all are kept.
        most: Bytes to keep at most; inputs beyond are computed in each pass.
    """

    def __init__(self, count: int, temperature: float, *, several: bool, most: float) -> None:
        self._count, self._temperature, self._several, self._most = count, temperature, several, most
        self._rows: dict[bytes, dict[str, _Largest]] = {}
        self._bytes, self._mass, self._places = 0, 0.0, 0

    @property
    def note(self) -> str | None:
        """How much of the teacher's probability is kept; None if nothing is."""
        if not self._places:
            return None
        return (
            f"The {self._count} largest of the teacher's logits were kept for {len(self._rows):,} inputs "
            f"({self._bytes / 1e6:,.1f} MB); they hold {100 * self._mass / self._places:.2f} % of its probability."
        )

    def of(self, teacher: Any, inputs: dict[str, Tensor]) -> list[dict[str, "_Largest"]]:
        """The logits of each row of a batch, by name."""
        ids = inputs["input_ids"]
        real = _real_places(inputs)
        found = []
        for row in range(len(ids)):
            alone = {name: x[row : row + 1] for name, x in inputs.items()}
            alone = {name: x[:, real[row]] if x.shape == ids[row : row + 1].shape else x for name, x in alone.items()}
            key = alone["input_ids"].cpu().numpy().tobytes()
            if (entry := self._rows.get(key)) is None:
                entry = self._computed(teacher, alone)
                size = sum(one.values.nbytes + one.places.nbytes for one in entry.values())
                if self._bytes + size <= self._most:
                    self._rows[key], self._bytes = entry, self._bytes + size
            found.append(entry)
        return found

    @torch.no_grad()
    def _computed(self, teacher: Any, alone: dict[str, Tensor]) -> dict[str, "_Largest"]:
        with torch.autocast(alone["input_ids"].device.type, enabled=False):
            outputs = teacher(**alone)
        made = {}
        for name in outputs:
            if not name.endswith("logits"):
                continue
            logits = outputs[name][0].float() / self._temperature
            if self._several or logits.shape[-1] == 1:
                made[name] = _Largest(logits.cpu(), torch.empty(0, dtype=torch.int32))
                continue
            values, places = logits.log_softmax(-1).topk(min(self._count, logits.shape[-1]))
            mass = values.exp().sum(-1)
            self._mass, self._places = self._mass + float(mass.sum()), self._places + mass.numel()
            made[name] = _Largest(values.cpu(), places.int().cpu())
        return made

    def distance(self, name: str, outputs: Tensor, rows: list["_Largest"], inputs: dict[str, Tensor]) -> Tensor:
        """Divergence of a batch of outputs of this name from kept logits, a scalar, as without keeping them."""
        real, terms = _real_places(inputs), []
        by_token = outputs.dim() == 3 or name in _PLACES
        for row, largest in enumerate(rows):
            one = outputs[row][real[row]] if by_token else outputs[row]
            terms.append(self._apart(one.float() / self._temperature, largest.to(outputs.device)))
        # Tokens weigh the same, however long their inputs are.
        return torch.cat(terms).mean()

    def _apart(self, outputs: Tensor, largest: "_Largest") -> Tensor:
        if self._several:
            return divergence_of_labels(outputs[None], largest.values[None]) * self._temperature**2
        if outputs.shape[-1] == 1:
            return ((outputs - largest.values) * self._temperature).square()
        log_p, p = largest.values, largest.values.exp()
        log_outputs = outputs.log_softmax(-1).gather(-1, largest.places.long())
        apart = (p * (log_p - log_outputs)).sum(-1)
        if p.shape[-1] < outputs.shape[-1]:
            rest, rest_of_outputs = (1 - x.sum(-1) for x in (p, log_outputs.exp()))
            tiny = torch.finfo(torch.float32).eps
            apart = apart + rest.clamp(min=tiny) * (rest.clamp(min=tiny).log() - rest_of_outputs.clamp(min=tiny).log())
        return (apart * self._temperature**2).reshape(-1)


@dataclass(frozen=True)
class _Largest:
    """The largest logits of an input: log-probabilities [..., k] and their places among all; or all logits, as they are."""

    values: Tensor
    places: Tensor

    def to(self, device: torch.device) -> "_Largest":
        return _Largest(self.values.to(device), self.places.to(device))


def _real_places(inputs: dict[str, Tensor]) -> Tensor:
    """True at real tokens, [B, L]."""
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def teacher_of(model: Any) -> Any:
    """Copy a converted model with exact attention; the copy has its own config, which selects the attention."""
    teacher = copy.deepcopy(model)
    surgery.use_exact_attention(teacher)
    return teacher


# A target that is nearly the same at every token has hardly any energy around its mean.
_LEAST_SHARE = 0.01


def relative_error(outputs: Tensor, target: Tensor, real: Tensor | None = None) -> Tensor:
    """Squared error relative to the target's energy around its mean, a scalar.

    The mean is that of each channel over the tokens of the batch. In the last layers of an encoder it holds more than
    half of all energy, so that an error relative to the whole would look small where the tokens are not told apart.

    Args:
        outputs: [B, …, L, E].
        target: Tensor of the same shape.
        real: 1 at tokens that count and 0 elsewhere, broadcastable; None if all count.
    """
    outputs, target = outputs.float(), target.float()
    real = torch.ones_like(target[..., :1]) if real is None else real.expand_as(target[..., :1])
    over = (0, target.dim() - 2)
    counts = _of_all_processes(real.sum(over, keepdim=True))
    mean = _of_all_processes((target * real).sum(over, keepdim=True)) / counts.clamp(
        min=torch.finfo(torch.float32).tiny
    )
    around, whole = _of_all_processes(torch.stack([(x.square() * real).sum() for x in (target - mean, target)]))
    energy = torch.maximum(around, _LEAST_SHARE * whole).clamp(min=torch.finfo(torch.float32).tiny)
    return ((outputs - target).square() * real).sum() / energy


def _of_all_processes(part: Tensor) -> Tensor:
    """The mean over processes, so that a loss does not depend on how a batch is shared; in validation each has its own."""
    if not (torch.is_grad_enabled() and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return part
    part = part.detach().clone()
    torch.distributed.all_reduce(part)
    return part / torch.distributed.get_world_size()


def without_targets(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the model reads it, without labels."""
    return {name: x for name, x in inputs.items() if name not in _TARGETS}


def _real(call: Call, mask: Tensor | None = None) -> Tensor | None:
    """Real queries, [B, 1, L, 1]; None if all are, or it is not known.

    Args:
        call: The call.
        mask: The model's own mask, [B, L], for calls whose mask is another: that of an exact layer may have 4 dimensions.
    """
    for real in (call.mask, mask):
        if real is not None and real.shape == (call.q.shape[0], call.q.shape[2]):
            return real[:, None, :, None].float()
    return None


def _weights(call: Call) -> Tensor:
    """Exact attention weights, [B, H, L, S]."""
    mechanism = call.mechanism
    assert mechanism is not None
    with torch.no_grad():
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        scores = call.q.float() @ k.float().transpose(2, 3) * mechanism.scale
        if mechanism.causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[:, None, None], float("-inf"))
        return scores.softmax(-1).nan_to_num()


def _divergence(outputs: Tensor, target: Tensor, real: Tensor | None) -> Tensor:
    """Mean divergence of weights [B, H, L, S] from the target over real queries, in nats."""
    tiny = 1e-6
    apart = (target * (target.clamp(min=tiny).log() - outputs.float().clamp(min=tiny).log())).sum(-1, keepdim=True)
    if real is None:
        return apart.mean()
    return (apart * real).sum() / (real.sum() * apart.shape[1])


# Logits over the places of an input, [B, L], not over classes.
_PLACES = ("start_logits", "end_logits")


def _without_padding(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits over places, without probability at padding: the model gives it some, which no answer can use."""
    if mask is None or mask.shape != logits.shape:
        return logits
    return logits.float().masked_fill(mask == 0, -1e9)


def _distance(outputs: Tensor, target: Tensor, mask: Tensor | None, temperature: float, *, several: bool) -> Tensor:
    """Divergence of outputs over the last dimension, or of each of `several` labels; squared error if it has size 1."""
    if several:
        return divergence_of_labels(outputs.float() / temperature, target.float() / temperature).mean() * temperature**2
    if target.shape[-1] == 1:
        return F.mse_loss(outputs.float(), target.float())
    log_outputs, log_target = (F.log_softmax(x.float() / temperature, -1) for x in (outputs, target))
    apart = (log_target.exp() * (log_target - log_outputs)).sum(-1) * temperature**2
    # Outputs of single tokens, [B, L, V].
    if mask is not None and mask.shape == apart.shape:
        return (apart * mask).sum() / mask.sum()
    return apart.mean()


def _fitting(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """A mask for hidden states [B, L, D]; None if their positions are not tokens, as for speech."""
    if mask is None or mask.shape != hidden.shape[:2]:
        return None
    return mask[:, :, None].float()


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One mode with its settings.

    Attributes:
        mode: Name of the mode.
        objective: The loss.
        trained: Names of the trained parameters.
        steps: Maximum number of steps.
        batch_size: Inputs per step, over all processes.
        accumulate: Forward passes per step.
        learning_rate: Highest learning rate.
        mechanism_learning_rate: Highest learning rate of the mechanisms' parameters.
        seconds: Time limit; infinite for none.
        evaluate_every: Steps between validations; None for as many as take a tenth of the time limit.
        warm_up: Share of what will run, steps or time, during which the rate rises.
        schedule: Name of transformers' schedule after that.
        weight_decay: Decay of the base's matrices.
        patience: Validations without improvement after which the mode ends; None for no limit.
        penalty: Weight of the mechanisms' penalty; above 0 the last step is kept, since a penalty is worth a loss of score.
        recompute: Whether to recompute layers in the backward pass.
        bfloat16: Whether the forward pass runs under autocast.
        report_to: Additional reporting of the Trainer.
        seed: Seed of the order of examples and of dropout.
    """

    mode: str
    objective: Objective
    trained: list[str]
    steps: int
    batch_size: int
    accumulate: int = 1
    learning_rate: float
    mechanism_learning_rate: float
    seconds: float = math.inf
    evaluate_every: int | None = None
    warm_up: float
    schedule: str = "cosine"
    weight_decay: float
    patience: int | None = None
    penalty: float = 0.0
    recompute: bool = False
    bfloat16: bool = False
    report_to: str | None = None
    seed: int


@dataclass
class Measure:
    """The measure that chooses the best step.

    Attributes:
        name: Name of a metric, or `loss`.
        lower_is_better: Whether smaller values are better.
        value: Measures the held-out examples; None if the model has no score.
        enough: Value at which training ends; None for no budget.
        about_labels: What the last measurement shows about the order of the model's labels, in sentences.
    """

    name: str
    lower_is_better: bool
    value: Callable[[], float] | None
    enough: float | None = None
    about_labels: list[str] = field(default_factory=list)

    def suffices(self, value: float) -> bool:
        """Return whether a value is within the budget."""
        if self.enough is None:
            return False
        return value <= self.enough if self.lower_is_better else value >= self.enough


@dataclass
class Outcome:
    """The outcome of one mode.

    Attributes:
        mode: Name of the mode.
        steps: Number of steps.
        best_step: Step whose weights were kept; 0 if none was better than the weights before the first. With a penalty the last.
        parameters: Number of trained parameters.
        tokens: Number of training tokens.
        seconds: Time, including interrupted attempts.
        measure: Name of the measure that chose the best step.
        curve: Step, loss, learning rate and, at validations, the value of the measure; from step 0, before the first.
        ended: Reason for the end: `steps`, `time`, `patience` or `budget`.
    """

    mode: str
    steps: int
    best_step: int
    parameters: int
    tokens: int
    seconds: float
    measure: str
    curve: list[dict[str, float]]
    ended: str


# Most validations of a mode after the first, and the share of its time that all of them take.
MOST_VALIDATIONS, VALIDATING = 10, 0.1


class _WatchState(BaseModel):
    """What a checkpoint stores besides the Trainer's files; earlier versions stored no hashes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    seconds: float
    tokens: int
    files: dict[str, str] = {}


class Watch(TrainerCallback):
    """Tracks time and tokens, redraws random features, reports progress, and stops training."""

    def __init__(self, trainer: Any, progress: Progress) -> None:
        self._trainer, self._progress = trainer, progress
        self._began, self._before, self.tokens = time.monotonic(), 0.0, 0
        self.stopped, self.ended, self.share_before = False, "steps", 0.0
        self._loss = self._validation = float("nan")
        # Validations within a time limit, and the share of the mode that is done.
        self._validations, self._share, self._reserved = MOST_VALIDATIONS, 0.0, 0.0

    def seconds(self) -> float:
        """Training time so far, including interrupted attempts."""
        return self._before + time.monotonic() - self._began

    def share_of_time(self) -> float:
        """Used share of the time budget, but for the last validation; 0 without a budget."""
        return self.seconds() / (self._trainer.phase.seconds - self._reserved)

    def count(self, inputs: dict[str, Tensor]) -> None:
        """Count the tokens of a batch."""
        main = next((x for name, x in inputs.items() if name.startswith("input_")), None)
        mask = inputs.get("attention_mask")
        counted = mask.sum().item() if mask is not None else 0 if main is None else main.shape[:2].numel()
        self.tokens += int(counted) // self._trainer.data.task.input_per_token * self._trainer.args.world_size

    def state_text(self, files: dict[str, str]) -> str:
        """State to store in a checkpoint, with the hashes of other files in it."""
        return _WatchState(seconds=self.seconds(), tokens=self.tokens, files=files).model_dump_json()

    def take(self, text: bytes, files: dict[str, str]) -> None:
        """Restore the state of a checkpoint, whose files have these hashes.

        Raises:
            ValueError: if it or one of the files is damaged.
        """
        stored = _WatchState.model_validate_json(text)
        if changed := [name for name, digest in stored.files.items() if files.get(name) != digest]:
            raise ValueError(f"{', '.join(changed)} was changed since it was written")
        self._before, self.tokens, self._began = stored.seconds, stored.tokens, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate the weights that a mode starts with; or find the best checkpoint, wherever the folder is now."""
        self._share = self.share_of_time()
        if not state.global_step:
            self._validate_start(state)
        if not state.best_global_step:
            return
        best = Path(args.output_dir, f"checkpoint-{state.best_global_step}")
        if not best.is_dir():
            raise ApproxError(
                f"{best}, which has the best weights so far, is missing. Start over with --force instead of --resume.",
                Exit.UNAVAILABLE,
            )
        state.best_model_checkpoint = str(best)

    def _validate_start(self, state: Any) -> None:
        trainer, began = self._trainer, time.monotonic()
        self._validation = trainer.measure.value()
        took = time.monotonic() - began
        trainer.log({f"eval_{trainer.measure.name}": self._validation})
        if math.isfinite(self._validation):
            # Only what is better than this counts as better.
            state.best_metric = self._validation
        if math.isfinite(trainer.phase.seconds):
            # The first is one of them.
            affordable = int(VALIDATING * trainer.phase.seconds / max(took, 1e-9)) - 1
            self._validations = min(max(affordable, 1), MOST_VALIDATIONS)
            self._reserved = min(took, VALIDATING * trainer.phase.seconds)
        self._share = self.share_before = self.share_of_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        """Store the loss for the progress line."""
        self._loss = logs.get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Redraw random features, report progress, and stop on a signal or at the time limit."""
        inner = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if hasattr(inner, "step_attention"):
            inner.step_attention(state.global_step)
        self._say(state)
        if self._trainer.phase.evaluate_every is None:
            before, self._share = self._share, max(state.global_step / state.max_steps, self.share_of_time())
            if self._agreed(int(self._share * self._validations) > int(before * self._validations)):
                control.should_evaluate = control.should_save = True
        late = self.share_of_time() >= 1.0
        if self._agreed(late or self.stopped):
            control.should_training_stop = control.should_save = True
            if late and not self.stopped:
                self.ended = "time"
                control.should_evaluate = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """Stop if the budget is met."""
        self._validation = metrics[f"eval_{self._trainer.measure.name}"]
        if self._trainer.measure.suffices(self._validation):
            self.ended = "budget"
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record early stopping as the reason."""
        if self.ended == "steps" and state.global_step < state.max_steps:
            self.ended = "patience"

    def _agreed(self, stop: bool) -> bool:
        """Return whether any process wants to stop."""
        return bool(self._trainer.accelerator.reduce(torch.tensor(float(stop), device=self._trainer.args.device)) > 0)

    def _say(self, state: Any) -> None:
        phase = self._trainer.phase
        rate = self._trainer._get_learning_rate()
        share = max(state.global_step / phase.steps, self.share_of_time())
        left = self.seconds() * (1 - share) / share
        figures = {"loss": f"{self._loss:.4g}", f"held-out {self._trainer.measure.name}": f"{self._validation:.4g}"}
        parts = [f"{name} {value}" for name, value in figures.items() if value != "nan"]
        parts += [f"rate {rate:.1e}", f"{self.tokens / self.seconds():,.0f} tokens/s", f"{_duration(left)} left"]
        self._progress(" | ".join([phase.mode, *parts]), state.global_step, phase.steps)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def signals(watch: Watch) -> Iterator[None]:
    """End training after the current step on Ctrl-C or SIGTERM; a second signal ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if watch.stopped:
            raise KeyboardInterrupt
        watch.stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)


# Rows are sorted by length within this many batches, so that the inputs of a batch have similar lengths.
_SORTED_TOGETHER = 50


@dataclass(frozen=True)
class TrainingData:
    """Training and held-out examples as one model reads them.

    Attributes:
        task: The task, which encodes examples and gives targets.
        split: Training examples.
        held_out: Examples that choose the best step.
        rows: Example and window of each training input.
        encodings: Training inputs, without padding.
        labelled: Whether batches carry targets.
        limit: Maximum number of tokens of an input; None for no limit.
        processor: Tokenizer or feature extractor.
        config: Config of the model.
        used: Number of held-out examples that are used, since more would take too long; None for all.
        imitation: What the decoder of a model with one reads in `transfer` and `distill`; None for other models.
    """

    task: Task
    split: Split
    held_out: Split
    rows: list[tuple[int, int]]
    encodings: list[Encoding]
    labelled: bool
    limit: int | None
    processor: Any
    config: Any
    used: int | None = None
    imitation: "Imitation | None" = None

    @property
    def validated(self) -> Split:
        """The held-out examples that are used, from all parts of their list."""
        examples = self.held_out.examples
        count = min(self.used or len(examples), len(examples))
        chosen = [examples[number * len(examples) // count] for number in range(count)]
        return replace(self.held_out, examples=chosen)

    @property
    def sha256(self) -> str:
        """Hash of the examples and of the choice of held-out ones."""
        return hashlib.sha256(f"{_sha256(self.split.examples)} {_sha256(self.held_out.examples)}".encode()).hexdigest()

    def batch(self, rows: Sequence[int], passed: int) -> dict[str, Tensor]:
        """A batch of inputs as tensors, [B, L], with their targets; each pass hides other tokens for `mlm`."""
        examples, encodings = [], []
        for row in rows:
            number, window = self.rows[row]
            example, encoding = self.split.examples[number], self.encodings[row]
            if passed and self.task.draws:
                example = replace(example, id=f"{example.id}, pass {passed}")
                encoding = self.task.encode(example, self.processor, self.limit)[window]
            examples.append(example)
            encodings.append(encoding)
        made = self.task.collate(encodings, self.processor)
        if self.labelled:
            made |= self.task.targets(examples, encodings, self.processor, self.config)
        return made if self.imitation is None else self.imitation.of(made)

    def tokens(self, row: int) -> int:
        """Number of tokens of an input."""
        return self.task.tokens(self.encodings[row])


class Imitation:
    """What the decoder reads in `transfer` and `distill`: the transcript, or without one what the exact model writes.

    Source: Kim and Rush 2016, "Sequence-Level Knowledge Distillation", arXiv 1606.07947; Gandhi et al. 2023, Distil-Whisper,
    arXiv 2311.00430.

    Args:
        teacher: The exact model, which writes; each input once.
        task: The task, which says how the model writes.
        processor: Feature extractor and tokenizer.
    """

    def __init__(self, teacher: Any, task: Task, processor: Any) -> None:
        self.teacher, self._task, self._processor = teacher.eval(), task, processor
        self._written: dict[bytes, list[int]] = {}

    @torch.no_grad()
    def of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with `decoder_input_ids` and `decoder_attention_mask`, [B, S]."""
        labels = batch["labels"] if "labels" in batch else padded_labels(self._rows(batch))
        config, real = self.teacher.config, labels != IGNORED
        # As transformers' models shift targets.
        read = labels.masked_fill(~real, config.pad_token_id).roll(1, -1)
        read[:, 0] = config.decoder_start_token_id
        return {**batch, "decoder_input_ids": read, "decoder_attention_mask": real.long()}

    def _rows(self, batch: dict[str, Tensor]) -> list[list[int]]:
        features = batch[self.teacher.main_input_name]
        keys = [hashlib.sha256(row.numpy().tobytes()).digest() for row in features]
        if new := [row for row, key in enumerate(keys) if key not in self._written]:
            some = {name: x[new].to(self.teacher.device) for name, x in batch.items()}
            some = {name: x.to(self.teacher.dtype) if x.is_floating_point() else x for name, x in some.items()}
            made, end = self._task.imitated(self.teacher, some, self._processor), self.teacher.config.eos_token_id
            for row, tokens in zip(new, made["labels"].tolist(), strict=True):
                # A model that writes nothing writes its end.
                self._written[keys[row]] = [token for token in tokens if token != IGNORED] or [end]
        return [self._written[key] for key in keys]


class Schedule(Dataset[tuple[int, int]]):
    """The order of inputs: (row, pass) by position, the same for any number of processes.

    Args:
        data: Training data.
        batch_size: Inputs per step.
        steps: Number of steps.
        seed: Seed of the order.
    """

    def __init__(self, data: TrainingData, batch_size: int, steps: int, seed: int) -> None:
        self._lengths = np.array([data.tokens(row) for row in range(len(data.rows))])
        self._batch, self._steps, self._seed = batch_size, steps, seed
        self._pass, self._order = 0, self._shuffled(0)

    def __len__(self) -> int:
        return self._batch * self._steps

    def __getitem__(self, place: int) -> tuple[int, int]:
        passed, within = divmod(place, steps_of_pass(len(self._lengths), self._batch) * self._batch)
        if passed != self._pass:
            self._pass, self._order = passed, self._shuffled(passed)
        return int(self._order[within]), passed

    def _shuffled(self, passed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        random = np.random.default_rng([self._seed, passed])
        rows, size = random.permutation(len(self._lengths)), self._batch
        if len(rows) < size:
            return np.resize(rows, size)
        # The remaining rows are likely to be taken in the next pass.
        rows = rows[: len(rows) // size * size]
        chunk = size * _SORTED_TOGETHER
        chunks = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
        ordered = np.concatenate([part[np.argsort(self._lengths[part], kind="stable")] for part in chunks])
        batches = ordered.reshape(-1, size)
        return batches[random.permutation(len(batches))].reshape(-1)


def steps_of_pass(rows: int, batch_size: int) -> int:
    """Steps of one pass over the inputs."""
    return max(rows // batch_size, 1)


def read_data(options: FinetuneStage, model: Any, processor: Any, *, labelled: bool, language: str) -> TrainingData:
    """Read the training examples that the options name.

    Args:
        options: Options of the training.
        model: The model to train.
        processor: Its tokenizer or feature extractor.
        labelled: Whether any mode needs targets.
        language: `clm` or `mlm`: how text is predicted.

    Raises:
        ApproxError: if there is neither a task nor text, or both, the task does not fit the model, or fewer than two
            examples are left.
    """
    if (options.task is None) == (options.text is None):
        found = "neither was given" if options.task is None else "both were given"
        raise ApproxError(f"Training needs examples: give either a task (--task) or text files (--text); {found}.")
    limit = _limit(model, options.length)
    if options.text is not None:
        task = _task_of_texts(language, limit or _USUAL_TOKENS)
    else:
        task = _task_of(options)
        if task.head.is_of(type(model)):
            task.adopt(model.config)
    most = options.most_examples
    split = _split_of(task, options, most)
    if labelled:
        task.check(model)
        split = task.labelled(split)
    elif task.input_name != model.main_input_name and not task.writes(model):
        raise ApproxError(
            f"{task.name} makes {task.input_name}, but a {type(model).__name__} takes {model.main_input_name}. Train "
            "it on a task for its kind of input.",
            Exit.UNSUPPORTED,
        )
    if options.pack:
        packed = _packed(task, split, processor, limit or _USUAL_TOKENS)
        while options.streaming and options.limit is None and split.subset and most and len(packed.examples) < most:
            # As many texts as fill the inputs that the steps take.
            texts = math.ceil(1.05 * most * len(split.examples) / len(packed.examples))
            split = _split_of(task, options, texts)
            packed = _packed(task, split, processor, limit or _USUAL_TOKENS)
        split = packed
    split = task.at_least(split, processor, options.min_length, limit)
    trained, held_out = _held_out(task, split, options.validation, options.seed)
    rows, encodings = [], []
    for number, example in enumerate(trained):
        for window, encoding in enumerate(task.encode(example, processor, limit)):
            if task.tokens(encoding):
                rows.append((number, window))
                encodings.append(encoding)
    if not rows:
        raise ApproxError(f"{task.name}: no training example has any tokens.", Exit.UNAVAILABLE)
    return TrainingData(
        task=task,
        split=replace(split, examples=trained),
        held_out=replace(split, examples=held_out),
        rows=rows,
        encodings=encodings,
        labelled=labelled,
        limit=limit,
        processor=processor,
        config=model.config,
    )


def _limit(model: Any, length: int | None) -> int | None:
    most = positions.limit(model.config)
    if length is not None and most is not None and length > most:
        raise ApproxError(
            f"--length is {length} tokens, but the model takes {most} positions. Convert it with "
            f"--max-length {length} first."
        )
    return length or most


def _task_of(options: FinetuneStage) -> Task:
    assert options.task is not None  # the callers read text themselves
    task = open_task(options.task, **options.settings)
    _refuse_reported(task, options)
    return task


def _split_of(task: Task, options: FinetuneStage, most: int | None) -> Split:
    """The first examples that the options name, at most so many."""
    if options.text is None:
        data = None if options.data is None else Path(options.data)
        return task.load(data, options.split, most, streaming=options.streaming)
    splits = [task.load(Path(file), None, most) for file in options.text]
    examples = [example for split in splits for example in split.examples]
    if options.streaming:
        # Every stretch carries its text, which is tokenised whole.
        last = {id(one.inputs.get("text")): one.inputs for one in examples}
        cut = {number: one["text"][: one["end"]] for number, one in last.items() if "text" in one}
        examples = [
            replace(one, inputs={**one.inputs, "text": cut[id(one.inputs["text"])]}) if "text" in one.inputs else one
            for one in examples
        ]
    subset = any(split.subset for split in splits) or (most is not None and most < len(examples))
    return replace(splits[0], examples=examples[:most], subset=subset)


def _task_of_texts(language: str, length: int) -> Task:
    # A window of English has about four characters per token.
    stretch = 4 * length
    if language == "mlm":
        return open_task("mlm", window=length, stretch=stretch)
    return open_task("lm", window=length, stride=length - 1, stretch=stretch)


# Of a model whose positions have no limit.
_USUAL_TOKENS = 512


def _packed(task: Task, split: Split, processor: Any, length: int) -> Split:
    """Examples of short texts in their order, joined up to a length in tokens; each text ends with the end token."""
    if not isinstance(task, Text):
        raise ApproxError(
            f"--pack joins texts for language modelling, and {task.name} has examples of its own. Leave it out."
        )
    end = processor.eos_token or processor.sep_token
    if end is None:
        raise ApproxError(
            "--pack puts the tokenizer's end token between texts, and this one has none. Leave it out, or use a tokenizer "
            "with an eos_token or sep_token."
        )
    room = length - (processor.bos_token_id is not None if task.name == "lm" else processor.num_special_tokens_to_add())
    packs: list[Example] = []
    texts: list[str] = []
    free, name = 0, ""

    def close() -> None:
        if whole := "".join(texts):
            packs.append(Example(name, {"text": whole, "start": 0, "end": len(whole)}, len(whole.encode())))
            texts.clear()

    for example in split.examples:
        text, begin, stop = task.written(example, processor)
        # A long text may be several examples.
        piece = text[begin:stop] + (end if stop == len(text) else "")
        tokens = len(processor(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if tokens > free:
            close()
            free, name = room, example.id
        if tokens > room:
            # It fills inputs by itself.
            packs.append(replace(example, group=None))
            free = 0
        else:
            texts.append(piece)
            free -= tokens
    close()
    return replace(split, examples=packs)


def _refuse_reported(task: Task, options: FinetuneStage) -> None:
    """Refuse to train on a split used for reported scores, unless a setting selects a part of it."""
    if options.split == "train" or (task.part_setting is not None and task.part_setting in options.settings):
        return
    raise ApproxError(
        f"{task.name} would be trained on its split '{options.split}', which scores are reported on. Train on 'train', "
        "or choose examples by the task's settings (such as the articles of squad) and evaluate on others.",
        Exit.REFUSED,
    )


def _held_out(task: Task, split: Split, count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Split off the examples that choose the best step: whole groups, at most a tenth; of a text, its end."""
    examples = split.examples
    if len(examples) < 2:
        raise ApproxError(
            f"{task.name}: {len(examples)} training example. At least two are needed, one of them to choose the best "
            "step.",
            Exit.UNAVAILABLE,
        )
    count = max(1, min(count, len(examples) // 10))
    if isinstance(task, Text) and all(example.group is None for example in examples):
        return examples[:-count], examples[-count:]
    groups: dict[tuple[str, str], list[int]] = {}
    for number, example in enumerate(examples):
        groups.setdefault(example.unit, []).append(number)
    names = sorted(groups)
    chosen: set[int] = set()
    for place in np.random.default_rng(seed).permutation(len(names)):
        chosen.update(groups[names[place]])
        if len(chosen) >= count:
            break
    trained = [example for number, example in enumerate(examples) if number not in chosen]
    held_out = [example for number, example in enumerate(examples) if number in chosen]
    if not trained:
        raise ApproxError(
            f"{task.name}: its {len(examples)} training examples are of {len(names)} {task.groups.by}, so that none "
            f"can be held out to choose the best step. Give examples of more {task.groups.by}.",
            Exit.UNAVAILABLE,
        )
    return trained, held_out


def digest_of(options: FinetuneStage) -> str:
    """Hash all examples that the options name, for keys of stages.

    Raises:
        ApproxError: if there are none.
    """
    if options.text is not None:
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in options.text)).hexdigest()
    return _sha256(_split_of(_task_of(options), options, options.most_examples).examples)


def overlap(options: FinetuneStage, evaluated: Sequence[Example]) -> int:
    """Count the evaluation examples that are also training examples."""
    if options.task is None:
        return 0
    split = _split_of(_task_of(options), options, options.most_examples)
    trained = {_example_hash(example) for example in split.examples}
    return sum(_example_hash(example) in trained for example in evaluated)


def _example_hash(example: Example) -> str:
    inputs = {name: str(value) for name, value in example.brief.items()}
    return json.dumps([str(example.label), inputs], sort_keys=True)


def _sha256(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, _example_hash(example)]).encode())
    return digest.hexdigest()


def tensors_to(device: torch.device, batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Move a batch to a device; floats (sounds) get the dtype of the model."""
    return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in batch.items()}


_COMPLETE = "complete.json"
# Bytes of a file that is hashed.
_SMALL = 1_000_000
_NUMBERED = re.compile(r"checkpoint-[0-9]{1,15}").fullmatch


class Interrupted(KeyboardInterrupt):
    """Training was interrupted; the state after the last step is stored."""


def train(
    model: Any, phase: Phase, data: TrainingData, measure: Measure, folder: Path, *, resume: bool, progress: Progress
) -> Outcome:
    """Train a model in place; it ends with the weights of the best step, which may be those that it began with.

    Args:
        model: The model; the Trainer moves it to its device.
        phase: The mode.
        data: Training data.
        measure: The measure that chooses the best step.
        folder: Folder for the checkpoints of this mode.
        resume: Whether to continue from the last complete checkpoint in the folder, if any.
        progress: Called with the current activity, steps done and total steps.

    Raises:
        ApproxError: if the loss is not finite, the processes cannot share a batch, or the disk does not take a
            checkpoint.
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint of the last step is in the folder.
    """
    # Also where a training is resumed: its checkpoint is read later.
    start = changeable(model, phase.trained)
    trainer = _Trainer(model, phase, data, measure, folder, progress)
    last = last_complete(folder) if resume else None
    for stale in folder.glob("checkpoint-*") if trainer.args.should_save else ():
        if last is None or not (stale / _COMPLETE).is_file():
            shutil.rmtree(stale)
    try:
        with signals(trainer.watch), disk_errors(folder), _damage_reported(trainer, last):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    finally:
        # Otherwise the forward pass would stay under autocast.
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        vars(model).pop("forward", None)
        if phase.recompute:
            _recomputing(model, "disable")()
    if trainer.watch.stopped:
        raise Interrupted
    outcome = trainer.outcome()
    if not outcome.best_step:
        model.load_state_dict(start, strict=False)
    return outcome


@contextmanager
def dropout(model: Any, share: float | None) -> Iterator[None]:
    """Set the dropout of a model inside the context, but not that of adapters; None leaves it as it is."""
    before: list[tuple[nn.Module, str, float]] = []
    for name, module in [] if share is None else model.named_modules():
        if ".lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            before.append((module, "p", module.p))
        # Many attention modules hold a number, which they pass on.
        before += [(module, key, x) for key, x in vars(module).items() if "dropout" in key and type(x) in (int, float)]
    try:
        for module, key, _ in before:
            setattr(module, key, share)
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)


def changeable(model: Any, trained: Sequence[str]) -> dict[str, Tensor]:
    """Copies, in main memory, of the parameters that are trained and of the buffers, which mechanisms may redraw."""
    fixed = {name for name, _ in model.named_parameters()} - set(trained)
    return {name: x.detach().cpu().clone() for name, x in model.state_dict().items() if name not in fixed}


@contextmanager
def _damage_reported(trainer: "_Trainer", last: Path | None) -> Iterator[None]:
    """Report a checkpoint that cannot be read; which errors the libraries raise for its files is not specified."""
    try:
        yield
    except (ApproxError, Interrupted):
        raise
    except Exception as error:
        if last is None or trainer.begun:
            raise
        raise ApproxError(
            f"{last} is damaged: {type(error).__name__}: {' '.join(str(error).split())[:200]}. Delete it to continue "
            "from the one before, or start over with --force instead of --resume.",
            Exit.UNAVAILABLE,
        ) from error


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Report a checkpoint that cannot be written, and the state that is still there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        last = last_complete(folder)
        state = f"; the state after step {_step(last)} is kept" if last else ""
        raise ApproxError(
            f"A checkpoint could not be written to {folder}: {getattr(error, 'strerror', None) or error}{state}. Free "
            "space, then continue with --resume.",
            Exit.UNAVAILABLE,
        ) from None


def last_complete(folder: Path) -> Path | None:
    """The latest complete checkpoint; None if there is none."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / _COMPLETE).is_file() and _NUMBERED(path.name)]
    return max(whole, key=_step, default=None)


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Hashes of the small files of a checkpoint, the state of the training; tensors may be many gigabytes."""
    small = (path for path in checkpoint.iterdir() if path.is_file() and path.stat().st_size <= _SMALL)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small if path.name != _COMPLETE}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


# Steps of a whole schedule, and those in which it decays where it is stable before.
_WHOLE, _DECAYING = 1000, 200


def _decay(schedule: str) -> Callable[[float], float]:
    """A schedule of transformers as a function of the share of what runs, from 0 to 1."""
    made = get_scheduler(
        schedule,
        torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=0,
        num_training_steps=_WHOLE,
        scheduler_specific_kwargs={"num_decay_steps": _DECAYING, "decay_type": "linear"}
        if schedule == "warmup_stable_decay"
        else {},
    )
    (of_step,) = made.lr_lambdas  # type: ignore[union-attr]  # the other kind is of another kind of optimizer
    return lambda share: of_step(_WHOLE * share)


class _Trainer(Trainer):
    def __init__(
        self, model: Any, phase: Phase, data: TrainingData, measure: Measure, folder: Path, progress: Progress
    ) -> None:
        self.phase, self.data, self.measure = phase, data, measure
        self.trained: Any = model
        self.watch = Watch(self, progress)
        self.begun = False
        self._decay = _decay(phase.schedule)
        chosen = set(phase.trained)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        if phase.recompute:
            # Observing attention requires the non-reentrant variant.
            _recomputing(model, "enable")({"use_reentrant": False})
        arguments = _arguments(model, phase, measure, folder)
        self.schedule = schedule = Schedule(data, phase.batch_size, phase.steps, phase.seed)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=schedule,
            eval_dataset=schedule,
            data_collator=self._collated,
            callbacks=[self.watch, *([EarlyStoppingCallback(phase.patience)] if phase.patience else [])],
        )
        if phase.report_to == "tensorboard":
            # By default its files are among the checkpoints, which do not stay.
            self.remove_callback(TensorBoardCallback)
            name = f"{folder.parent.name.removesuffix('.training')}-{folder.name}"
            leads = self.is_world_process_zero()
            self.add_callback(TensorBoardCallback(tracking.writer(tracking.event_folder(name)) if leads else None))
        self.remove_callback(PrinterCallback)
        # Losses are batch means over equally large batches, so the Trainer may average them (transformers#47688).
        self.model_accepts_loss_kwargs = False

    def _collated(self, places: list[tuple[int, int]]) -> dict[str, Tensor]:
        return self.data.batch([row for row, _ in places], places[0][1])

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # The schedule is the order.
        return SequentialSampler(self.schedule)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # All of a checkpoint was read.
        self.begun = True
        inner = self.accelerator.unwrap_model(model)
        loss = self.phase.objective.loss(model, inner, inputs)
        if self.phase.penalty:
            loss = loss + self.phase.penalty * inner.attention_penalty().to(loss.device)
        if not loss.requires_grad:
            raise ApproxError(
                f"Nothing that '{self.phase.mode}' trains changes its loss: the mechanisms are exact on inputs this "
                "short, with the spans they have. Use longer inputs (--min-length), a --penalty above 0 for spans, or "
                "another mode.",
                Exit.UNSUPPORTED,
            )
        if not torch.isfinite(loss):
            last = last_complete(Path(str(self.args.output_dir)))
            state = "nothing was saved yet" if last is None else f"the state after step {_step(last)} is kept in {last}"
            raise ApproxError(
                f"The loss of '{self.phase.mode}' is {float(loss)} at step {self.state.global_step + 1}; {state}. "
                "Lower --learning-rate, or look for damaged examples.",
                Exit.VERIFICATION,
            )
        self.watch.count(inputs)
        return loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with a separate rate for mechanisms' parameters; only matrices of the base have weight decay."""
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, parameter in (self.trained if model is None else model).named_parameters():
            if parameter.requires_grad:
                of_mechanism = ".mechanism." in name
                rate = self.phase.mechanism_learning_rate if of_mechanism else self.phase.learning_rate
                decay = 0.0 if of_mechanism or parameter.dim() < 2 else self.phase.weight_decay
                groups.setdefault((rate, decay), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": part, "lr": rate, "weight_decay": decay} for (rate, decay), part in groups.items()]
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up, then a schedule up to the last step or the time limit, whichever comes first."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._rate)
        return self.lr_scheduler

    def _rate(self, step: int) -> float:
        done = max(step / self.phase.steps, self.watch.share_of_time())
        # At the end of this step; the first validation is no part of a warm-up.
        risen = max((step + 1) / self.phase.steps, self.watch.share_of_time() - self.watch.share_before)
        warm = min(1.0, risen / self.phase.warm_up) if self.phase.warm_up else 1.0
        return warm * self._decay(min(done, 1.0))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Validate with our measure instead of a loss over an evaluation dataset."""
        assert self.measure.value is not None  # each mode has a loss at least
        value = self.measure.value()
        metrics = {f"eval_{self.measure.name}": value}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # Written last, so an incomplete checkpoint lacks it.
            write_whole(folder / _COMPLETE, self.watch.state_text(_hashes(folder)))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is not None:
            self.watch.take((Path(checkpoint) / _COMPLETE).read_bytes(), _hashes(Path(checkpoint)))
        super()._load_optimizer_and_scheduler(checkpoint)

    def outcome(self) -> Outcome:
        history = self.state.log_history
        curve: dict[int, dict[str, float]] = {}
        for entry in history:
            named = {"loss": "loss", "learning_rate": "learning_rate", f"eval_{self.measure.name}": "validation"}
            figures = {ours: float(entry[theirs]) for theirs, ours in named.items() if theirs in entry}
            if figures:
                step = int(entry["step"])
                curve.setdefault(step, {"step": step}).update(figures)
        # Earlier versions did not validate the start.
        last = 0 if "validation" in curve.get(0, {}) else self.state.global_step
        best = self.state.global_step if self.phase.penalty else self.state.best_global_step or last
        parameters = sum(p.numel() for name, p in self.trained.named_parameters() if name in set(self.phase.trained))
        return Outcome(
            mode=self.phase.mode,
            steps=self.state.global_step,
            best_step=best,
            parameters=parameters,
            tokens=self.watch.tokens,
            seconds=round(self.watch.seconds(), 1),
            measure=self.measure.name,
            curve=list(curve.values()),
            ended=self.watch.ended,
        )


def _recomputing(model: Any, what: str) -> Any:
    """Transformers' method to enable or disable recomputation; newer versions have a new name for it."""
    newer = getattr(model, f"activation_checkpointing_{what}", None)
    return newer or getattr(model, f"gradient_checkpointing_{what}")


def _arguments(model: Any, phase: Phase, measure: Measure, folder: Path) -> TrainingArguments:
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        gradient_accumulation_steps=phase.accumulate,
        # Of dropout; the schedule has the order.
        seed=phase.seed,
        use_cpu=model.device.type != "cuda",
        bf16=phase.bfloat16,
        logging_steps=max(1, phase.steps // 100),
        eval_strategy="steps",
        eval_steps=phase.evaluate_every or phase.steps,
        save_steps=phase.evaluate_every or phase.steps,
        # The best and the last.
        save_total_limit=2,
        # The score of held-out examples would always prefer the longest spans to those that a penalty asks for.
        load_best_model_at_end=not phase.penalty,
        metric_for_best_model=f"eval_{measure.name}",
        greater_is_better=not measure.lower_is_better,
        # A second bar would be drawn into our line of progress.
        disable_tqdm=True,
        # The other processes would otherwise be more talkative than the first.
        log_level_replica="passive",
        project=tracking.PROJECT,
        # The name for no tracker.
        report_to=phase.report_to or "none",
        # The loss of transfer is no output of the model, so every parameter would be found unused.
        ddp_find_unused_parameters=phase.mode != "transfer",
    )
    shares = made.world_size * phase.accumulate
    if phase.batch_size % shares:
        raise ApproxError(
            f"A step has {phase.batch_size} inputs, which {made.world_size} processes with {phase.accumulate} forward "
            f"passes each cannot share evenly. Give a --batch-size that is a multiple of {shares}."
        )
    made.per_device_train_batch_size = phase.batch_size // shares
    return made
