"""Replace the attention of a pretrained transformer and measure the change in quality and speed.

    import approx

    model = transformers.AutoModelForSequenceClassification.from_pretrained("…")
    receipt = approx.convert(model, approx.Plan.of("improved-clustered", clusters=25))
    model.save_pretrained("converted")

Importing this package registers the converted families with transformers' auto classes, so that converted folders load
without a trust flag. It imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from approx.errors import ApproxError
from approx.registration import register_when_asked
from approx.version import __version__

if TYPE_CHECKING:
    from approx.api import (
        Plan,
        bench,
        convert,
        evaluate,
        export,
        fast_products,
        finetune,
        generate,
        inspect,
        load,
        look,
        lra,
        predict,
        push,
        recommend,
        report,
        revert,
        search,
        verify,
    )

__all__ = ["ApproxError", "Plan", "__version__", "bench", "convert", "evaluate", "export", "fast_products", "finetune"]
__all__ += ["generate", "inspect", "load", "look", "lra", "predict", "push"]
__all__ += ["recommend", "report", "revert", "search", "verify"]
__dir__ = __all__.copy  # what an interactive session offers, loaded or not
register_when_asked()


def __getattr__(name: str) -> Any:
    # Loaded on demand, because torch and transformers are slow to import.
    if name not in __all__:
        raise AttributeError(f"module 'approx' has no attribute '{name}'")
    return getattr(importlib.import_module("approx.api"), name)
