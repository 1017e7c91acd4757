"""Describe a loaded model as a checkpoint without a folder, so that it is measured like any other."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from approx.checkpoints import families
from approx.checkpoints.checkpoint import Checkpoint, Source, processor_of
from approx.checkpoints.integrity import state_sha256
from approx.errors import ApproxError
from approx.evaluation.prediction_cache import fingerprint


def in_memory(model: Any, processor: Any, *, offline: bool = False, reads: bool = True) -> Checkpoint:
    """Describe a model, stock or converted, as a checkpoint; the model is not copied.

    Args:
        model: A transformers model.
        processor: Its tokenizer, feature extractor or processor, or the name of a folder or hub model that has one.
        offline: Whether to use only local files and the hub's cache.
        reads: Whether the model will read texts, sounds or images, which takes a processor.

    Raises:
        ApproxError: if it is not a transformers model, or the processor is missing, or something else.
    """
    if not isinstance(model, PreTrainedModel):
        raise ApproxError(
            f"A {type(model).__name__} cannot be measured. Pass the name of a checkpoint, or a model from from_pretrained, "
            "without a wrapper."
        )
    if processor is None and reads:
        raise ApproxError(
            f"A {type(model).__name__} needs its tokenizer or processor. Pass it as 'processor', e.g. "
            "AutoTokenizer.from_pretrained(…), or the folder that holds it."
        )
    if isinstance(processor, str | os.PathLike):
        processor = processor_of(os.fspath(processor), type(model), offline=offline)
    elif processor is not None and not callable(processor):
        raise ApproxError(
            f"'processor' is of type {type(processor).__name__}; a tokenizer, a processor or the name of a folder is needed. "
            "Pass e.g. AutoTokenizer.from_pretrained(…)."
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
    weights = state_sha256(model)
    if (adapters := getattr(model, "peft_config", None)) is not None:
        # How strongly an adapter acts is in its config alone, and which one acts in the model.
        about = {name: one.to_dict() for name, one in adapters.items()}
        weights = fingerprint(weights, about, model.active_adapters())
    return Checkpoint(source, model, weights)
