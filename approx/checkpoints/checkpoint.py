"""Open a stock or converted checkpoint from a folder or the hub; reject those that would silently load wrongly."""

import hashlib
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from approx.checkpoints import adapters, families, hub, integrity
from approx.checkpoints.foreign import refuse_kernels
from approx.checkpoints.tokenizers import try_out
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.example_inputs import example_inputs
from approx.seam.manifest import check_seal, sha256
from approx.seam.transformers_internals import backbone_of

EMBEDDED = "quickstart"
# For readers only.
_CARD = "README.md"
# Tokens of an example, and the most missing tensors for which one is computed.
_EXAMPLE, _MOST_ASKED = 16, 16


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
        adapter: The adapter that is merged into its weights as they are loaded; None without one.
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
    adapter: adapters.Adapter | None = None


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        source: Where it came from.
        model: The model, in evaluation mode.
        weights_sha256: Hash of the weight files that were loaded, in order, and of the files of a merged adapter.
        notes: Messages for the user, e.g. about a newly initialised task head.
    """

    source: Source
    model: Any
    weights_sha256: str
    notes: list[str] = field(default_factory=list)


def locate(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    merge_adapter: bool = False,
) -> Source:
    """Find a checkpoint and read its config.

    Args:
        name: A folder, a model id of the hub, or `quickstart`, the model that comes with this package.
        revision: Branch, tag or commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        allow_pickle: Whether pickled weights are downloaded too.
        merge_adapter: Whether an adapter beside the weights, or one whose folder is given, is merged when they are loaded.

    Raises:
        ApproxError: if it does not exist, its family is not supported, or it holds an adapter that is not to be merged.
    """
    folder, commit = _folder(str(name), revision, offline, allow_pickle)
    integrity.refuse_leaving_links(folder)
    if (found := adapters.find(folder)) is not None:
        alone = not (folder / "config.json").is_file()
        if not merge_adapter:
            adapters.refuse(str(name), found, alone=alone)
        adapters.refuse_unmergeable(found, allow_pickle=allow_pickle)
        folder = _base_of(found, offline, allow_pickle) if alone else folder
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
    stock = _stock_class(str(name), raw, config, converted)
    return Source(str(name), folder, commit, raw, config, stock, converted, adapter=found)


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
    edited: Iterable[str] = (),
    merge_adapter: bool = False,
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
        merge_adapter: Whether an adapter beside the weights, or one whose folder is given, is merged into them.

    Raises:
        ApproxError: if anything is missing, damaged or unsupported.
    """
    source = locate(name, revision=revision, offline=offline, allow_pickle=allow_pickle, merge_adapter=merge_adapter)
    refuse_unquantisable(source)
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
            # Only the files that are hashed are loaded: an adapter is merged below, or was refused.
            adapter_kwargs={"subfolder": os.devnull},
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
    brought: set[str] = set()
    if source.adapter is not None:
        model, brought = adapters.merge(model, source.adapter)
    notes = _check_keys(source, model, {**info, "missing_keys": {*info["missing_keys"]} - brought})
    if (unused := integrity.unused_weights(source.folder, files)) is not None:
        notes.append(unused)
    if source.adapter is not None:
        files = [*files, *source.adapter.files]
        notes.append(f"The {source.adapter.kind} adapter in {source.adapter.folder} was merged into the weights.")
    if not source.converted and source.raw.get("auto_map"):
        notes.append(
            f"config.json names code of its own for this model; it is not run: the model is transformers' {model_class.__name__}."
        )
    integrity.refuse_non_finite(model.state_dict().items(), str(source.folder))
    return Checkpoint(source, model.eval().to(device), _digest(files), notes)


def refuse_unquantisable(source: Source) -> None:
    """Refuse a quantised checkpoint that cannot be opened here, before weights are read.

    Raises:
        ApproxError: if its package or hardware is missing, or the method is unknown.
    """
    quantised = source.raw.get("quantization_config")
    if not quantised:
        return
    told = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else "an unnamed method"
    remedy = "or give the checkpoint from which it was quantised."
    try:
        quantizer = AutoHfQuantizer.from_config(quantised, pre_quantized=True)
        quantizer.validate_environment(device_map=None, dtype=None, weights_only=True)
    except (ImportError, RuntimeError) as error:
        raise ApproxError(
            f"{source.name} is quantised ({told}), which this installation cannot open: {_short(error)}. Install what is "
            f"missing, {remedy}",
            Exit.MISSING,
        ) from None
    except Exception as error:
        raise ApproxError(
            f"{source.name} is quantised ({told}), which transformers {transformers.__version__} cannot open: {_short(error)}. "
            f"Correct its config, {remedy}",
            Exit.UNSUPPORTED,
        ) from None


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


def _base_of(found: adapters.Adapter, offline: bool, allow_pickle: bool) -> Path:
    """The folder of the checkpoint that an adapter was trained on.

    Raises:
        ApproxError: if its config does not name it, it cannot be reached, or it holds an adapter itself.
    """
    if found.base is None:
        raise ApproxError(
            f"The adapter in {found.folder} does not name its base in {integrity.ADAPTER}. Copy its files beside the weights of "
            "its base.",
            Exit.UNAVAILABLE,
        )
    revision = None if Path(found.base).is_dir() else found.revision
    try:
        base, _ = _folder(found.base, revision, offline, allow_pickle)
    except ApproxError as error:
        raise ApproxError(
            f"The base of the adapter in {found.folder} cannot be opened: {error}", error.exit_code
        ) from None
    integrity.refuse_leaving_links(base)
    if adapters.find(base) is not None:
        raise ApproxError(
            f"The base of the adapter in {found.folder}, {found.base}, holds an adapter itself. Merge that one first.",
            Exit.REFUSED,
        )
    return base


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
    unread = _unread(model, backbone) if backbone else set()
    missing, backbone = ([key for key in keys if key not in unread] for keys in (missing, backbone))
    if backbone:
        more = f" and {len(backbone) - 3} more" if len(backbone) > 3 else ""
        raise ApproxError(
            f"{source.folder} lacks tensors of its {source.stock_class.__name__}: {', '.join(backbone[:3])}{more}. Its weights "
            "are incomplete or of another family than its config; transformers would have initialised these at random.",
            Exit.UNAVAILABLE,
        )
    notes = []
    if unread:
        notes.append(f"{', '.join(sorted(unread)[:4])} not in the checkpoint: set to 0, since only training reads it.")
    if missing:
        notes.append(
            f"{', '.join(missing[:4])} not in the checkpoint: newly initialised; train this task head before using its output."
        )
    surplus = sorted(key for key in info["unexpected_keys"] if key.startswith(prefix) and "pooler" not in key)
    if surplus:
        notes.append(f"{len(surplus)} tensors do not belong to this model and were ignored, e.g. {surplus[0]}.")
    return notes


def _unread(model: Any, missing: Iterable[str]) -> set[str]:
    """Those of the missing tensors that only training reads, such as the embedding of masked frames; they are set to 0.

    If a missing tensor full of NaN leaves the outputs of an example finite, inference does not read it. Experts are read by
    some inputs only, so one example says nothing of them. Counters of batches are whole numbers, which cannot be NaN.
    """
    tensors = model.state_dict()
    unread = {name for name in missing if name.endswith("num_batches_tracked")}
    asked = [name for name in missing if tensors[name].is_floating_point() and "expert" not in name]
    for name in asked if len(asked) <= _MOST_ASKED else ():
        before = tensors[name].clone()
        tensors[name].fill_(torch.nan)
        if _is_finite(model):
            unread.add(name)
        tensors[name].copy_(before)
    for name in unread:
        tensors[name].zero_()
    return unread


def _is_finite(model: Any) -> bool:
    """Whether a model has finite outputs on an example."""
    length = min(_EXAMPLE, positions.limit(model.config) or _EXAMPLE)
    with torch.inference_mode():
        out = model.eval()(**example_inputs(model, length, device=model.device))
    return all(bool(x.isfinite().all()) for x in out.to_tuple() if isinstance(x, torch.Tensor))


def _digest(files: list[Path]) -> str:
    if len(files) == 1:
        return sha256(files[0])
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."
