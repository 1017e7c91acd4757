"""Estimate time and memory of a training from trial steps of each mode, which are no larger than fits into half the memory."""

import time
from typing import Any

import torch

from approx.evaluation.memory import available_bytes, peak_mb
from approx.finetuning import data, parameters
from approx.finetuning.options import FinetuneStage
from approx.finetuning.phase import Phase
from approx.finetuning.preparation import Preparation, with_adapters

# AdamW's two averages, in float32; the trial step measures the gradients.
_BYTES_OF_TRAINED = 8


def estimate(model: Any, phase: Phase, prepared: Preparation, options: FinetuneStage) -> dict[str, Any]:
    """Estimate time and memory of a mode from trial steps; the model is not changed.

    The first step has one of the longest inputs. A step of a whole batch follows only if it would take at most half of the
    available memory; otherwise the steps have as many inputs as would, and time and memory grow in proportion.

    Args:
        model: The model.
        phase: The mode.
        prepared: The prepared training, with its examples.
        options: Options of the training, with the size of adapters.

    Returns:
        `mode`, `steps`, `batch_size`, `learning_rate`, `trained` and `parameters` (how many numbers), `seconds` (at most the
        time budget) and `memory_mb` (megabytes, 1e6 bytes).
    """
    rows = sorted(range(len(prepared.data.rows)), key=prepared.data.tokens)
    count = phase.batch_size // phase.accumulate
    count, device = min(count, len(rows)), torch.device(model.device)

    def step(chosen: list[int]) -> None:
        inputs = data.tensors_to(model.device, prepared.data.batch(chosen, 0), model.dtype)
        phase.objective.loss(model, model, inputs).backward()
        model.zero_grad(set_to_none=True)

    adapted = phase.mode in prepared.adapted
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if adapted:
        phase = with_adapters(model, phase, prepared, options)
    named, training = dict(model.named_parameters()), model.training
    trained = sum(named[name].numel() for name in phase.trained)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in named.values())
    try:
        for name, parameter in named.items():
            parameter.requires_grad_(name in set(phase.trained))
        model.train()

        def peak(inputs: int) -> float:
            return peak_mb(lambda: step(rows[-inputs:]), device)

        # Memory is measured on the longest inputs, time on those of median length.
        needed = first = peak(1)
        tried = 1
        if count > 1:
            needed = peak(2)
            # The gradients are in the first already.
            more = max(needed - first, 1e-6)
            room = int((available_bytes(device) / 2e6 - first) / more) + 1
            tried = min(count, max(room, 2))
            needed = peak(tried) if tried == count else first + more * (count - 1)
        middle = max(len(rows) // 2 - tried // 2, 0)
        usual = rows[middle : middle + tried]
        step(usual)
        began = time.perf_counter()
        step(usual)
        each = (time.perf_counter() - began) * count / tried
    finally:
        model.train(training)
        if adapted:
            parameters.remove_adapters(model, merge=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
    seconds = each * phase.accumulate * phase.steps
    return {
        "mode": phase.mode,
        "steps": phase.steps,
        "batch_size": phase.batch_size,
        "learning_rate": phase.own_learning_rate if phase.mode == "transfer" else phase.learning_rate,
        "trained": trained,
        "parameters": numbers,
        "seconds": min(seconds, phase.seconds or seconds),
        "memory_mb": round(needed + (weights + _BYTES_OF_TRAINED * trained) / 1e6, 1),
    }
