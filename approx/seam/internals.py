"""What depends on the installed packages: all private names of transformers in use, and whose code a converted folder runs."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from uuid import uuid4

import torch
import transformers

_TEMPORARY = "approx_temporary_"


def collects_attentions() -> bool:
    """Whether an output collector, which some families use, requests attention weights; False if there is none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return "attentions" in (_active_collector.get() or {})


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache in the keywords of a call: `cache` from transformers 5.24 on, `past_key_values` before; None without one."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def cache_keyword() -> str:
    """The keyword of a cache in calls and outputs of `generate`: `cache` from transformers 5.24 on, `past_key_values` before."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


@contextmanager
def under_implementation(config: Any, name: str | None) -> Iterator[None]:
    """Let all models of a config dispatch their attention to the named implementation, even if they do not allow it."""
    private = "_attn_implementation_internal"
    # The public property rejects names that it does not know.
    place = private if hasattr(config, private) else "_attn_implementation"
    before = getattr(config, place)
    setattr(config, place, name)
    try:
        yield
    finally:
        setattr(config, place, before)


@contextmanager
def temporary_attention(attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[str]:
    """Register an attention function and its mask function under a unique name, and yield that name.

    Versions without access to the registry keep the entry.
    """
    name = _TEMPORARY + uuid4().hex
    registries = transformers.AttentionInterface, transformers.AttentionMaskInterface
    for registry, function in zip(registries, (attention, mask), strict=True):
        registry.register(name, function)
    try:
        yield name
    finally:
        for registry in registries:
            getattr(registry, "_global_mapping", {}).pop(name, None)


def attends_temporarily(config: Any) -> bool:
    """Whether models of a config dispatch to a function from `temporary_attention`."""
    return (implementation_of(config) or "").startswith(_TEMPORARY)


def implementation_of(config: Any) -> str | None:
    """The name of the attention implementation that models of a config dispatch to."""
    return config._attn_implementation


def can_switch_attention(model_class: type) -> bool:
    """Whether a model class dispatches its attention; True if that is not known in advance."""
    tell = getattr(model_class, "_can_set_attn_implementation", None)
    return tell is None or tell()


def subsampled_length(model: Any) -> Callable[[int], int] | None:
    """Size of an input of sound, in samples or frames -> positions that the model makes of it; None if its family does not tell."""
    names = "_get_feat_extract_output_lengths", "_get_subsampling_output_length"
    tell = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    return None if tell is None else lambda size: int(tell(torch.tensor([size])))


def keep_in_float32(model: Any, names: set[str]) -> None:
    """Keep tensors in float32 when a checkpoint is loaded in 16 bits; older versions load them like all others."""
    model._keep_in_fp32_modules_strict = names


def forget_file_layout(model: Any) -> None:
    """Make a model save in its family's layout, not in that of the files it was loaded from."""
    vars(model).pop("_weight_conversions", None)


def is_compiled_in_place(model: Any) -> bool:
    """Whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


def backbone_of(config_class: type) -> Any:
    """The class that `AutoModel` builds from a stock config class; None if there is none."""
    mapping = getattr(transformers.AutoModel, "_model_mapping", None)
    if mapping is not None:
        return mapping.get(config_class, None)
    name = auto_classes(config_class.model_type).get("AutoModel")  # type: ignore[attr-defined]  # every config class has it
    return None if name is None else getattr(transformers, name, None)


def auto_classes(family: str) -> dict[str, str]:
    """Auto class -> stock class of a family, e.g. `AutoModelForMaskedLM` -> `BertForMaskedLM`."""
    from transformers.models.auto import modeling_auto

    classes = {}
    for auto, kind in vars(modeling_auto).items():
        if not (auto.startswith("AutoModel") and isinstance(kind, type)):
            continue
        names = getattr(getattr(kind, "_model_mapping", None), "_model_mapping", None)
        name = _documented_name(auto, family) if names is None else names.get(family)
        if isinstance(name, str):
            classes[auto] = name
    return classes


def register_model(auto: str, config_class: type, model_class: type) -> None:
    """Register a model class for a config class with an auto class."""
    from transformers.models.auto import modeling_auto

    getattr(modeling_auto, auto).register(config_class, model_class, exist_ok=True)


def _documented_name(auto: str, family: str) -> str | None:
    """The class name by convention, e.g. `BertForMaskedLM` for BERT's `AutoModelForMaskedLM`; None if there is no such class."""
    config = transformers.CONFIG_MAPPING[family].__name__
    name = auto.replace("AutoModel", config.removesuffix("Config"), 1)
    name = f"{name}Model" if auto == "AutoModel" else name
    return name if hasattr(transformers, name) else None


_LOG = logging.getLogger(__name__)
_PLAIN = "This converted model runs its plain PyTorch code, which is slower than the C and Triton of the package approx-attention"
INSTALL = "No package index has it: install it from its repository, in a clone of which `pip install .` does it."


def installed_model(layout: int, version: str, *, required: bool = False) -> Any:
    """The base class of converted models in the installed package `approx-attention`; logs which code runs.

    Args:
        layout: Format of the folder's config.
        version: Version of the package that wrote the folder; older ones may lack its mechanisms, and the next major
            version may compute them differently.
        required: Whether the folder has no code of its own; the caller then reports what is missing.

    Returns:
        `ApproxModel`, or None if no compatible package is installed and the folder's own code has to run.
    """
    try:
        # By name, because transformers treats plain imports as requirements of the folder.
        installed = import_module("approx.version").__version__
        model = import_module("approx.seam.model").ApproxModel
        understood = import_module("approx.seam.dispatch").FORMAT
    except Exception as error:
        # A package that is incompatible with the installed transformers must not prevent loading.
        if required:
            return None
        why = "" if isinstance(error, ModuleNotFoundError) else f", which could not be imported ({error})"
        _LOG.warning("%s%s. %s", _PLAIN, why, INSTALL)
        return None
    written, here = _numbers(version), _numbers(installed)
    if understood == layout and written <= here < (written[0] + 1,):
        _LOG.info("This converted model runs the code of the installed package approx-attention %s.", installed)
        return model
    if required:
        return None
    wanted = f"format {layout} and at least {version}, below {written[0] + 1}.0. {INSTALL}"
    _LOG.warning("%s: %s with format %s is installed, and this folder needs %s", _PLAIN, installed, understood, wanted)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
