"""Register the converted families with transformers when its auto classes first load a checkpoint."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


def register_when_asked() -> None:
    """Make the first `AutoConfig.from_pretrained`, which every auto class calls, register the converted families.

    Registering earlier would import model families while transformers is in the middle of importing one.
    """
    wrapt.register_post_import_hook(_watch, "transformers.models.auto.configuration_auto")


def _watch(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "AutoConfig.from_pretrained", _register_first)


def _register_first(wrapped: Callable[..., Any], instance: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Imported here, so that importing approx does not import torch. The module registers the families on import.
    importlib.import_module("approx.checkpoints.families")
    return wrapped(*args, **kwargs)
