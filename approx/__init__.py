"""Exchange the attention of a pretrained transformer, and learn what it cost and what it gained.

    import approx

    model = transformers.AutoModelForSequenceClassification.from_pretrained("…")
    receipt = approx.convert(model, approx.Plan.of("improved-clustered", clusters=25))
    model.save_pretrained("converted")

Importing this package teaches transformers' auto classes the converted families, so that such folders load without a
trust flag. It imports neither torch nor transformers itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from approx.errors import ApproxError
from approx.registration import register_when_asked
from approx.version import __version__

if TYPE_CHECKING:
    from approx.api import bench, evaluate, inspect
    from approx.checkpoints.checkpoint import load
    from approx.conversion.surgery import convert, revert
    from approx.measuring.products import fast_products
    from approx.planning.plan import Plan
    from approx.publishing.report import write_report as report

_ROOMS = {"Plan": "conversion.plan", "load": "conversion.checkpoint", "report": "publishing.report"}
_ROOMS |= {"fast_products": "pipeline.products"}
_ROOMS |= dict.fromkeys(("convert", "revert"), "conversion.surgery")
_ROOMS |= dict.fromkeys(("bench", "evaluate", "inspect"), "pipeline.stages")
__all__ = ["ApproxError", "Plan", "__version__", "bench", "convert", "evaluate", "fast_products", "inspect"]
__all__ += ["load", "report", "revert"]
__dir__ = __all__.copy  # what an interactive session offers, made or not
register_when_asked()


def __getattr__(name: str) -> Any:
    # Made on demand, so that the import stays light.
    if name not in _ROOMS:
        raise AttributeError(f"module 'approx' has no attribute '{name}'")
    return getattr(importlib.import_module(f"approx.{_ROOMS[name]}"), "write_report" if name == "report" else name)
