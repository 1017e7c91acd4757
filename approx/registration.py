"""Register the converted families with transformers when somebody first asks its auto classes for a checkpoint."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


def register_when_asked() -> None:
    """Make the first `AutoConfig.from_pretrained` register the converted families; every auto class goes through it.

    Not sooner: transformers imports its auto classes in the middle of importing a model family, which is no time to import
    other families.
    """
    wrapt.register_post_import_hook(_watch, "transformers.models.auto.configuration_auto")


def _watch(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "AutoConfig.from_pretrained", _register_first)


def _register_first(wrapped: Callable[..., Any], instance: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Looked up by name, so that importing the package stays free of torch until somebody needs it; it registers as it is
    # imported, and importing it again costs nothing.
    importlib.import_module("approx.checkpoints.families")
    return wrapped(*args, **kwargs)
