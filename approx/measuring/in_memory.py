"""Describe a loaded model as a checkpoint without a folder, so that it is measured like any other."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from approx.checkpoints import families
from approx.checkpoints.checkpoint import Checkpoint, Source
from approx.checkpoints.integrity import state_sha256
from approx.errors import ApproxError


def in_memory(model: Any, processor: Any) -> Checkpoint:
    """Describe a model, stock or converted, as a checkpoint; the model is not copied.

    Args:
        model: A transformers model.
        processor: Its tokenizer, feature extractor or processor.

    Raises:
        ApproxError: if it is not a transformers model, or there is no processor.
    """
    if not isinstance(model, PreTrainedModel):
        raise ApproxError(
            f"A {type(model).__name__} cannot be measured. Pass the name of a checkpoint, or a model from from_pretrained, "
            "without a wrapper."
        )
    if processor is None:
        raise ApproxError(
            f"A {type(model).__name__} needs its tokenizer or processor. Pass it as 'processor', e.g. "
            "AutoTokenizer.from_pretrained(…)."
        )
    source = Source(
        type(model).__name__,
        # A path that contains no files.
        Path(os.devnull),
        None,
        model.config.to_dict(),
        model.config,
        families.stock_class(type(model)),
        families.is_converted(model),
        processor,
    )
    return Checkpoint(source, model, state_sha256(model))
