"""Change the seeds of a converted model temporarily, as if its plan had named other seeds."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.history import conversion
from approx.conversion.calibration import calibrate, mechanisms
from approx.conversion.calibration_inputs import calibration_batch
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject
from approx.evaluation.prediction_cache import fingerprint


def reseeding(opened: Checkpoint, subject: Subject) -> Callable[[int], AbstractContextManager[Subject]] | None:
    """A context manager that raises all seeds of a converted checkpoint; None if nothing in it is random.

    Mechanisms that are fitted to a calibration batch start from random state, so they are fitted again. Afterwards all
    tensors and seeds are restored.

    Args:
        opened: The checkpoint.
        subject: The checkpoint as a subject of an evaluation.

    Raises:
        ApproxError: if mechanisms were fitted to the user's own text, which a checkpoint does not store.
    """
    if not opened.source.converted:
        return None
    model = opened.model
    # Only mechanisms with random state have a seed.
    drawing: list[Any] = [mechanism for mechanism in mechanisms(model) if hasattr(mechanism, "redraw")]
    if not drawing:
        return None
    fitted = any(mechanism.needs_calibration for mechanism in drawing)
    step = conversion(model.config.approx)
    if fitted and (step is None or step.calibration is not None):
        text = step.calibration if step else None
        raise ApproxError(
            f"The mechanisms of {subject.name} were fitted to {text.name if text else 'inputs'}, which the checkpoint does not "
            "store, so they cannot be fitted with other seeds. Leave out --seeds, or convert without --calibrate.",
            Exit.UNSUPPORTED,
        )

    @contextmanager
    def reseeded(raised: int) -> Iterator[Subject]:
        seeds = [mechanism.seed for mechanism in drawing]
        kept = [{name: value.clone() for name, value in mechanism.state_dict().items()} for mechanism in drawing]
        try:
            with torch.no_grad():
                for mechanism, seed in zip(drawing, seeds, strict=True):
                    mechanism.redraw(seed + raised)
            if fitted and step is not None:
                calibrate(model, calibration_batch(opened.source, model, step.calibration_length).inputs, drawing)
            identity = None if subject.identity is None else fingerprint(subject.identity, "seed", raised)
            yield replace(subject, name=f"{subject.name}, seed + {raised}", identity=identity, reseeded=None)
        finally:
            for mechanism, seed, state in zip(drawing, seeds, kept, strict=True):
                mechanism.seed = seed
                mechanism.load_state_dict(state)

    return reseeded
