"""Open a stock or converted checkpoint from a folder or the hub; reject those that would silently load wrongly."""

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from approx.checkpoints import families, hub, integrity
from approx.checkpoints.foreign import refuse_kernels
from approx.checkpoints.tokenizers import try_out
from approx.errors import ApproxError, Exit
from approx.seam.manifest import check_seal, sha256
from approx.seam.transformers_internals import backbone_of

EMBEDDED = "quickstart"
# For readers only.
_CARD = "README.md"


@dataclass
class Source:
    """A checkpoint's location and config; its weights are not read.

    Attributes:
        name: As the user gave it.
        folder: The local folder.
        revision: Commit on the hub, or None for a local folder.
        raw: The raw config.
        config: The transformers config.
        stock_class: The stock class of the model.
        converted: Whether it is a converted checkpoint.
        reader: The processor of a model that exists only in memory; None if it is in the folder.
    """

    name: str
    folder: Path
    revision: str | None
    raw: dict[str, Any]
    config: Any
    stock_class: type
    converted: bool
    reader: Any = None


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        source: Where it came from.
        model: The model, in evaluation mode.
        weights_sha256: Hash of its weight files, in order.
        notes: Messages for the user, e.g. about a newly initialised task head.
    """

    source: Source
    model: Any
    weights_sha256: str
    notes: list[str] = field(default_factory=list)


def locate(
    name: str | Path, *, revision: str | None = None, offline: bool = False, allow_pickle: bool = False
) -> Source:
    """Find a checkpoint and read its config.

    Args:
        name: A folder, a model id of the hub, or `quickstart`, the model that comes with this package.
        revision: Branch, tag or commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        allow_pickle: Whether pickled weights are downloaded too.

    Raises:
        ApproxError: if it does not exist, or its family is not supported.
    """
    folder, commit = _folder(str(name), revision, offline, allow_pickle)
    integrity.refuse_leaving_links(folder)
    raw = integrity.read_config(folder)
    converted = raw["model_type"].startswith("approx_")
    family = raw["model_type"].removeprefix("approx_")
    if family not in CONFIG_MAPPING:
        raise ApproxError(
            f"transformers {transformers.__version__} does not know the model type '{raw['model_type']}' of {name}. "
            f"Supported families: {', '.join(families.FAMILIES)}.",
            Exit.UNSUPPORTED,
        )
    integrity.refuse_half_converted(folder, raw)
    refuse_kernels(raw, folder / "config.json")
    stock_config = CONFIG_MAPPING[family]
    if converted:
        families.register_family(stock_config)
    config_class = families.config_class(stock_config) if converted else stock_config
    try:
        config = config_class.from_pretrained(folder)
    except Exception as error:
        raise ApproxError(
            f"{folder / 'config.json'} does not describe a {family} model: {_short(error)}",
            Exit.UNAVAILABLE,
        ) from error
    return Source(str(name), folder, commit, raw, config, _stock_class(str(name), raw, config, converted), converted)


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
    edited: Iterable[str] = (),
) -> Checkpoint:
    """Load a checkpoint, stock or converted, and check its files, its keys and its numbers.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        revision: Branch, tag or commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        allow_pickle: Whether pickled weights are accepted.
        dtype: `auto` for the config's, or the name of a torch dtype.
        device: Device of the model.
        edited: Names of files of a converted folder that may differ from its manifest; its card always may.

    Raises:
        ApproxError: if anything is missing, damaged or unsupported.
    """
    source = locate(name, revision=revision, offline=offline, allow_pickle=allow_pickle)
    files = integrity.weight_files(source.folder, allow_pickle=allow_pickle)
    if source.converted:
        check_seal(source.folder, but=[_CARD, *edited])
    model_class = families.model_class(source.stock_class) if source.converted else source.stock_class
    try:
        model, info = model_class.from_pretrained(  # type: ignore[attr-defined]  # every PreTrainedModel has it
            source.folder,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=files[0].suffix == ".safetensors",
            ignore_mismatched_sizes=True,  # `_check_keys` reports them by name
        )
    except ApproxError:
        raise
    except pickle.UnpicklingError as error:
        raise ApproxError(
            f"{files[0]} was not loaded: it is a pickle that is damaged or holds more than tensors. Get the checkpoint as "
            "safetensors.",
            Exit.UNAVAILABLE,
        ) from error
    except Exception as error:
        raise ApproxError(
            f"{source.folder} could not be loaded as {source.stock_class.__name__}: {_short(error)}", Exit.UNAVAILABLE
        ) from error
    notes = _check_keys(source, model, info)
    if not source.converted and source.raw.get("auto_map"):
        notes.append(
            f"config.json names code of its own for this model; it is not run: the model is transformers' {model_class.__name__}."
        )
    integrity.refuse_non_finite(model.state_dict().items(), str(source.folder))
    return Checkpoint(source, model.eval().to(device), _digest(files), notes)


def processor(source: Source) -> Any:
    """The tokenizer, feature extractor or processor of a checkpoint.

    Raises:
        ApproxError: if there is none.
    """
    if source.reader is not None:
        return source.reader
    return _processor(source.folder, source.stock_class, None if source.converted else source.config)


def processor_of(name: str | Path, model_class: type, *, offline: bool = False) -> Any:
    """The tokenizer, feature extractor or processor in a folder, which needs no weights or config.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        model_class: Class of the model that it is for, which says what kind it is.
        offline: Whether to use only local files and the hub's cache.

    Raises:
        ApproxError: if there is none.
    """
    return _processor(_folder(str(name), None, offline, False)[0], families.stock_class(model_class), None)


def _processor(folder: Path, stock_class: type, config: Any) -> Any:
    try:
        reader = _from_folder(processor_class(stock_class), folder, config)
        try_out(reader)
    except Exception as error:
        raise ApproxError(
            f"{folder} has no usable tokenizer or feature extractor: {_short(error)}. Copy its files beside the weights.",
            Exit.UNAVAILABLE,
        ) from error
    return reader


def processor_class(model_class: type) -> str:
    """Name of the auto class of the processor for models of a class."""
    return {"input_ids": "AutoTokenizer", "pixel_values": "AutoImageProcessor"}.get(
        model_class.main_input_name,  # type: ignore[attr-defined]  # every PreTrainedModel has it
        "AutoProcessor",
    )


def _from_folder(kind: str, folder: Path, config: Any) -> Any:
    try:
        return getattr(transformers, kind).from_pretrained(
            folder,
            config=config,
            # Without it, transformers asks on a terminal whether to run code of the checkpoint.
            trust_remote_code=False,
        )
    except ImportError:
        if kind != "AutoProcessor":
            raise
        # A speech model with a language model requires packages for decoding; the processor itself does not.
        return transformers.Wav2Vec2Processor.from_pretrained(folder)


def _folder(name: str, revision: str | None, offline: bool, allow_pickle: bool) -> tuple[Path, str | None]:
    if not name:
        raise ApproxError(
            "The name of the checkpoint is empty. Give a folder, or a model id of the hub.", Exit.UNAVAILABLE
        )
    path = Path(name).expanduser()
    try:
        if path.is_dir() and revision is not None:
            raise ApproxError(
                f"--revision {revision} was given, but {name} is a local folder, which has no revisions. Leave one of them out."
            )
        if path.is_dir():
            return path, None
        is_file = path.is_file()
    except OSError as error:
        raise ApproxError(f"{name} cannot be opened: {error.strerror}.", Exit.UNAVAILABLE) from None
    if is_file:
        raise ApproxError(f"{name} is a file; give the folder of the checkpoint.", Exit.UNAVAILABLE)
    if name == EMBEDDED:
        return Path(str(resources.files("approx") / EMBEDDED)), None
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise ApproxError(
            f"{name} does not exist. Give the folder of a checkpoint, or a model id of the hub.", Exit.UNAVAILABLE
        )
    return hub.download(name, revision=revision, offline=offline, allow_pickle=allow_pickle)


def _stock_class(name: str, raw: dict[str, Any], config: Any, converted: bool) -> type:
    named = raw.get("architectures")
    architecture = str(named[0]).removeprefix("Approx" if converted else "") if named and type(named) is list else None
    if architecture is None:
        base: Any = backbone_of(families.stock_class(type(config)))
        if base is None:
            raise ApproxError(
                f"{name} names no architecture in its config, and its family has no default.", Exit.UNSUPPORTED
            )
        return base
    stock = getattr(transformers, architecture, None)
    expected = families.stock_class(type(config))
    if getattr(stock, "config_class", expected) is not expected:
        raise ApproxError(
            f"The config of {name} contradicts itself: model_type '{raw['model_type']}' and architecture '{architecture}' are "
            "of different families. Download it again.",
            Exit.UNAVAILABLE,
        )
    if not isinstance(stock, type) or not hasattr(stock, "main_input_name"):
        raise ApproxError(
            f"The architecture '{architecture}' of {name} is not part of transformers {transformers.__version__}. "
            f"Supported families: {', '.join(families.FAMILIES)}.",
            Exit.UNSUPPORTED,
        )
    return stock


def _check_keys(source: Source, model: Any, info: dict[str, Any]) -> list[str]:
    """Check keys and shapes: transformers silently initialises missing tensors, which is right only for a new task head."""
    mismatched = [f"{key} is {tuple(shape)}, not {tuple(due)}" for key, shape, due in sorted(info["mismatched_keys"])]
    if mismatched:
        more = f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else ""
        raise ApproxError(
            f"{source.folder}: the shapes of the weights do not match the config: {', '.join(mismatched[:3])}{more}. Download "
            "both again.",
            Exit.UNAVAILABLE,
        )
    missing, prefix = sorted(info["missing_keys"]), f"{model.base_model_prefix}."
    bare = model.base_model is model
    backbone = [key for key in missing if (bare or key.startswith(prefix)) and "pooler" not in key]
    if backbone:
        more = f" and {len(backbone) - 3} more" if len(backbone) > 3 else ""
        raise ApproxError(
            f"{source.folder} lacks tensors of its {source.stock_class.__name__}: {', '.join(backbone[:3])}{more}. Its weights "
            "are incomplete or of another family than its config; transformers would have initialised these at random.",
            Exit.UNAVAILABLE,
        )
    notes = []
    if missing:
        notes.append(
            f"{', '.join(missing[:4])} not in the checkpoint: newly initialised; train this task head before using its output."
        )
    surplus = sorted(key for key in info["unexpected_keys"] if key.startswith(prefix) and "pooler" not in key)
    if surplus:
        notes.append(f"{len(surplus)} tensors do not belong to this model and were ignored, e.g. {surplus[0]}.")
    return notes


def _digest(files: list[Path]) -> str:
    if len(files) == 1:
        return sha256(files[0])
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."
