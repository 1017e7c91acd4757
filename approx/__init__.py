"""Replace the attention of a pretrained transformer, and measure what that costs and gains.

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
    from approx.api import Plan, bench, convert, evaluate, fast_products, finetune, inspect, load, report, revert

__all__ = ["ApproxError", "Plan", "__version__", "bench", "convert", "evaluate", "fast_products", "finetune"]
__all__ += ["inspect", "load", "report", "revert"]
__dir__ = __all__.copy  # what an interactive session offers, loaded or not
register_when_asked()


def __getattr__(name: str) -> Any:
    # Loaded on demand, so that the import stays light.
    if name not in __all__:
        raise AttributeError(f"module 'approx' has no attribute '{name}'")
    return getattr(importlib.import_module("approx.api"), name)
