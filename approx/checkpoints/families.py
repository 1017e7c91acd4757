"""Converted counterparts of stock config and model classes, and their registration with transformers' auto classes."""

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

from approx.checkpoints import bundle
from approx.errors import ApproxError, Exit, shown
from approx.mechanisms import BUILT_IN, MECHANISMS
from approx.seam.dispatch import parts, refuse_unknown
from approx.seam.internals import auto_classes, register_model
from approx.seam.model import ApproxModel

# Families that load without a trust flag once `approx` is imported; others load through `approx.load` or with trust.
FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "electra",
    "modernbert",
    "gpt2",
    "llama",
    "wav2vec2",
    "hubert",
    "vit",
    "whisper",
)


class _LocalModel(ApproxModel):
    """Converted models of this process, which write their code: transformers copies only that of remote classes."""

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save as transformers does, with the model's code next to the weights.

        Raises:
            ApproxError: if a mechanism was added at run time, so that the folder could not be loaded.
        """
        refuse_added(_used(self.config), bundle_kernels=self.config.approx.get("bundle_kernels", False))
        self.config.auto_map = bundle.auto_map(stock_class(type(self.config)), stock_class(type(self)))
        # Code of the base that transformers' `pipeline` would run.
        vars(self.config).pop("custom_pipelines", None)
        super().save_pretrained(save_directory, is_main_process, **kwargs)

    def _write_code(self, folder: Path) -> None:
        write_code(folder, self.config, stock_class(type(self)))


@functools.cache
def config_class(stock: type) -> type:
    """Converted counterpart of a stock config class."""
    body = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} of a converted checkpoint; the field `approx` says what was replaced.",
        "__annotations__": {"approx": dict | None},
        "model_type": f"approx_{stock.model_type}",  # type: ignore[attr-defined]  # every config class has it
        "approx": None,
    }
    return _published(bundle.config_class_name(stock), (stock,), body)


@functools.cache
def model_class(stock: type) -> type:
    """Converted counterpart of a stock model class."""
    body = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} with replaced attention.",
        "config_class": config_class(stock.config_class),  # type: ignore[attr-defined]  # every model class has it
    }
    return _published(bundle.model_class_name(stock), (_LocalModel, stock), body)


def _published(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """A class that pickle and the auto classes find under its name in this module."""
    made = type(bases[-1])(name, bases, body)
    globals()[name] = made
    return made


def stock_class(converted: type) -> type:
    """Stock class of a converted config or model class; a stock class is returned unchanged."""
    return next(kind for kind in converted.__mro__ if kind.__module__.startswith("transformers."))


def auto_class(stock: type) -> str:
    """Name of the auto class of a stock model class; `AutoModel` if none is registered for it."""
    family = stock.config_class.model_type  # type: ignore[attr-defined]  # every model class has it
    return next((auto for auto, name in auto_classes(family).items() if name == stock.__name__), "AutoModel")


def stock_config(config: Any) -> Any:
    """A copy of a config as an instance of its family's stock class."""
    config = copy.deepcopy(config)
    make_stock(config)
    return config


def make_stock(config: Any) -> None:
    """Turn a converted config into one of its stock class, in place, without the fields that conversion added."""
    change_class(config, stock_class(type(config)))
    for name in ("approx", "auto_map"):
        vars(config).pop(name, None)


def change_class(config: Any, kind: type) -> None:
    """Change the class of a config in place, since all submodules of a model share the object.

    Its `model_type` stays the stock one, which parts of transformers read; saving reads the class.
    """
    config.__class__ = kind
    config.model_type = stock_class(kind).model_type  # type: ignore[attr-defined]  # every config class has it


def is_converted(model_or_config: Any) -> bool:
    """Whether a model or config is converted, by this process or by the code in a folder."""
    config = getattr(model_or_config, "config", model_or_config)
    return getattr(type(config), "model_type", "").startswith("approx_")


def register() -> None:
    """Register the converted families with transformers' auto classes, so that folders load without a trust flag."""
    for family in FAMILIES:
        stock_config = transformers.CONFIG_MAPPING[family]
        register_family(stock_config)


def register_family(stock_config: type) -> None:
    """Register the converted counterparts of one family."""
    family = stock_config.model_type  # type: ignore[attr-defined]  # every config class has it
    converted = config_class(stock_config)
    transformers.AutoConfig.register(f"approx_{family}", converted, exist_ok=True)
    for auto, name in auto_classes(family).items():
        stock = getattr(transformers, name)
        # transformers may name a class of another family, such as a retriever on top of Qwen2.
        if stock.config_class is stock_config:
            register_model(auto, converted, model_class(stock))


# Importing this module registers the families: `import approx` arranges it, and unpickling a converted model imports
# it.
register()


def write_code(folder: Path, config: Any, stock: type) -> None:
    """Write the code of a converted checkpoint into a folder.

    Args:
        folder: The folder.
        config: The converted config.
        stock: The stock class of the model.
    """
    used = _used(config)
    kernels = config.approx.get("bundle_kernels", False)
    bundle.write_code(folder, stock_class(type(config)), stock, used, kernels=kernels, packages=outside(config))


def outside(config: Any) -> dict[str, str]:
    """Mechanism of another package -> that package as pip takes it, for those that a converted config uses."""
    every = [part for site in config.approx["sites"].values() for part in parts(site)]
    used = {part["mechanism"]: part for part in every if part["mechanism"] not in BUILT_IN}
    return {name: str(part.get("package")) for name, part in sorted(used.items())}


def refuse_added(mechanisms: Iterable[str], *, bundle_kernels: bool) -> None:
    """Refuse mechanisms that nobody could load again from a folder.

    Args:
        mechanisms: Their names.
        bundle_kernels: Whether the folder is to include the C and Triton of its mechanisms.

    Raises:
        ApproxError: naming those that were added to the registry at run time, or that are of another package while the
            folder is to include their code.
    """
    names = sorted(set(mechanisms))
    if bundle_kernels and (of_others := [name for name in names if MECHANISMS.origin(name)]):
        raise ApproxError(
            f"--bundle-kernels cannot carry the code of {', '.join(map(repr, of_others))}, which is in another package. "
            "Leave it out: whoever loads the folder installs that package.",
            Exit.UNSUPPORTED,
        )
    if added := [
        name for name in names if MECHANISMS.get(name) is not BUILT_IN.get(name) and MECHANISMS.origin(name) is None
    ]:
        raise ApproxError(
            f"The code of {', '.join(map(repr, added))} cannot be saved with a model, because it was added to "
            "MECHANISMS at run time, so the folder could not be loaded. Measure such a model in memory, or install the "
            "mechanism as a package with an entry point (see CONTRIBUTING.md).",
            Exit.UNSUPPORTED,
        )


def _used(config: Any) -> set[str]:
    """Names of the mechanisms of a converted config."""
    every = [part for site in config.approx["sites"].values() for part in parts(site)]
    for part in every:
        if "package" in part:
            refuse_unknown(part)
        if part["mechanism"] not in MECHANISMS:
            raise ApproxError(
                f"config.json names the mechanism {shown(part['mechanism'])}, which this version of approx does not "
                "have. Convert the base again, or use the version that converted it.",
                Exit.UNAVAILABLE,
            )
    return {part["mechanism"] for part in every}
