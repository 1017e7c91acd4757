"""Exchange the attention of a pretrained transformer, and learn what it cost and what it gained.

    import approx

    model = transformers.AutoModelForSequenceClassification.from_pretrained("…")
    receipt = approx.convert(model, approx.Plan.of("improved-clustered", clusters=25))
    model.save_pretrained("converted")

Importing this package teaches transformers' auto classes the converted families, so that such folders load without a
trust flag. It imports neither torch nor transformers itself.
"""

import importlib
from typing import Any

from approx.errors import ApproxError
from approx.registration import register_when_imported
from approx.version import __version__

_FACE = {
    "Plan": "approx.conversion.plan",
    "bench": "approx.pipeline.stages",
    "convert": "approx.conversion.surgery",
    "evaluate": "approx.pipeline.stages",
    "inspect": "approx.pipeline.stages",
    "load": "approx.conversion.checkpoint",
    "report": "approx.publishing.report",
    "revert": "approx.conversion.surgery",
}
__all__ = ["ApproxError", "__version__", *_FACE]  # the names below are made on demand

register_when_imported()


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'approx' has no attribute '{name}'")
    return getattr(importlib.import_module(_FACE[name]), name)
