"""Register the converted families with transformers as soon as, and only if, its auto classes are imported."""

import importlib
from types import ModuleType

import wrapt


def register_when_imported() -> None:
    """Register now if transformers' auto classes are there already, else right after their import."""
    wrapt.register_post_import_hook(_register, "transformers.models.auto.modeling_auto")


def _register(module: ModuleType) -> None:
    # Looked up by name, so that importing the package stays free of torch until somebody needs it. It registers as it is
    # imported; where it is itself what imports transformers, it is not complete yet and must not be called.
    importlib.import_module("approx.conversion.families")
