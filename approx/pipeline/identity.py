"""What the outputs of a model depend on, as one hash: weights, plan, dtype, and the code that computes them."""

import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from approx.conversion.checkpoint import Checkpoint
from approx.evaluation.ledger import fingerprint


def identity(opened: Checkpoint) -> str:
    """Hash everything that the outputs of a checkpoint, as it was opened, depend on.

    The config stands for the plan too: it holds every mechanism with its settings and seed; what was drawn or calibrated
    lies among the weights.
    """
    model: Any = opened.model
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    versions = (torch.__version__, transformers.__version__, code())
    return fingerprint(type(model).__name__, opened.weights_sha256, config, str(model.dtype), versions)


@functools.cache
def code() -> str:
    """Hash the sources of this package, so that nothing computed by other code is taken for its own."""
    found = hashlib.sha256()
    for package in ("approx", "approx_kernels"):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations if spec else None) or ():
            for path in sorted(Path(place).rglob("*.py")):
                found.update(path.relative_to(place).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
