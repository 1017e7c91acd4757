"""Real inputs of any length for timing: the texts or recordings of a task, joined and cut to size."""

from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx.tasks.task import Example, Task


def text_inputs(
    task: Task, examples: Sequence[Example], processor: Any, device: torch.device | str
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size and length from the texts of a task.

    The cost of clustering, hashing and top-k depends on the data, so random tokens would not be representative. Rows
    begin and end with the tokenizer's special tokens; short texts are repeated.

    Args:
        task: The task, whose `encode` tokenises an example.
        examples: At least one.
        processor: The tokenizer.
        device: Device of the tensors.

    Returns:
        (batch size B, tokens L) -> `{"input_ids": [B, L]}`.

    Raises:
        ApproxError: if the texts have only special tokens.
    """
    rows = [window["input_ids"] for example in examples for window in task.encode(example, processor)]
    special = set(processor.all_special_ids)
    content = [token for token in chain.from_iterable(rows) if token not in special]
    if not content:
        raise ApproxError(f"The texts of {task.name} have no tokens to time on.", Exit.UNAVAILABLE)
    first = rows[0]
    begin = first[:1] if first[0] in special else []
    end = first[-1:] if first[-1] in special and len(first) > 1 else []

    def make(batch: int, length: int) -> dict[str, Tensor]:
        stream = cycle(content)
        body = max(length - len(begin) - len(end), 0)
        made = [(begin + list(islice(stream, body)) + end)[:length] for _ in range(batch)]
        return {"input_ids": torch.tensor(made, device=device)}

    return make


def sound_inputs(
    task: Task,
    examples: Sequence[Example],
    processor: Any,
    samples: Callable[[int], int],
    device: torch.device | str,
    dtype: torch.dtype,
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size and length from the joined recordings of a task; short ones are repeated.

    Args:
        task: The task, whose `encode` and `collate` make samples of an example.
        examples: At least one.
        processor: A processor with a feature extractor.
        samples: Number of positions -> number of samples.
        device: Device of the tensors.
        dtype: Dtype of the tensors.

    Returns:
        (batch size B, positions L) -> `{"input_values": [B, samples(L)]}`.
    """

    def make(batch: int, length: int) -> dict[str, Tensor]:
        size = samples(length)
        parts, missing = [], batch * size
        for example in cycle(examples):
            parts.append(task.collate(task.encode(example, processor), processor)[task.input_name][0, :missing])
            missing -= parts[-1].numel()
            if not missing:
                break
        return {task.input_name: torch.cat(parts).view(batch, size).to(device, dtype)}

    return make


def image_inputs(
    task: Task, examples: Sequence[Example], processor: Any, device: torch.device | str, dtype: torch.dtype
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size from the images of a task, whose length is fixed.

    Returns:
        (batch size B, ignored) -> `{"pixel_values": [B, channels, height, width]}`.
    """

    def make(batch: int, length: int) -> dict[str, Tensor]:
        chosen = islice(cycle(examples), batch)
        made = task.collate([task.encode(example, processor)[0] for example in chosen], processor)
        return {task.input_name: made[task.input_name].to(device, dtype)}

    return make
