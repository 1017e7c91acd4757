"""Open any checkpoint, stock or converted, from a folder or the hub, and refuse what would load wrongly in silence."""

import hashlib
import pickle
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase

from approx.checkpoints import families, hub, integrity
from approx.errors import ApproxError, Exit
from approx.seam.manifest import check_seal, sha256
from approx.seam.transformers_internals import backbone_of

EMBEDDED = "quickstart"


@dataclass
class Source:
    """Where a checkpoint lies and what its config says; no weight has been read.

    Attributes:
        name: As the user gave it.
        folder: The local folder.
        revision: Commit of the hub, or None for a local folder.
        raw: The raw config.
        config: The transformers config.
        stock_class: The stock model class it is of.
        converted: Whether it is a converted checkpoint.
        reader: The processor of a model that is in memory only; None where it lies in the folder.
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
        weights_sha256: Of its weight files, in order.
        notes: What the user should know, e.g. a head that is newly initialised.
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
        revision: Branch, tag or commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        allow_pickle: Whether pickled weights are downloaded too.

    Raises:
        ApproxError: if it is not there, or its family is not supported.
    """
    folder, commit = _folder(str(name), revision, offline, allow_pickle)
    raw = integrity.read_config(folder)
    converted = raw["model_type"].startswith("approx_")
    family = raw["model_type"].removeprefix("approx_")
    if family not in CONFIG_MAPPING:
        raise ApproxError(
            f"The model type '{raw['model_type']}' of {name} is not known to transformers {transformers.__version__}. "
            f"Supported families: {', '.join(families.FAMILIES)}.",
            Exit.UNSUPPORTED,
        )
    stock_config = CONFIG_MAPPING[family]
    if converted:
        families.register_family(stock_config)
    config_class = families.config_class(stock_config) if converted else stock_config
    try:
        config = config_class.from_pretrained(folder)
    except Exception as error:
        raise ApproxError(
            f"{folder / 'config.json'} does not describe a {family} model: {' '.join(str(error).split())}",
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
) -> Checkpoint:
    """Load a checkpoint, stock or converted, after checking its files, its keys and its numbers.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        revision: Branch, tag or commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        allow_pickle: Whether pickled weights are accepted.
        dtype: `auto` (what the config says), or a torch dtype's name.
        device: Where the model goes.

    Raises:
        ApproxError: if anything is missing, damaged or unsupported.
    """
    source = locate(name, revision=revision, offline=offline, allow_pickle=allow_pickle)
    files = integrity.weight_files(source.folder, allow_pickle=allow_pickle)
    if source.converted:
        check_seal(source.folder)
    model_class = families.model_class(source.stock_class) if source.converted else source.stock_class
    try:
        model, info = model_class.from_pretrained(  # type: ignore[attr-defined]  # every PreTrainedModel has it
            source.folder,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=files[0].suffix == ".safetensors",
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except ApproxError:
        raise
    except pickle.UnpicklingError as error:
        raise ApproxError(
            f"{files[0]} is a pickle that asks for more than tensors, or is damaged; it was not loaded. Get the checkpoint as "
            "safetensors.",
            Exit.UNAVAILABLE,
        ) from error
    except Exception as error:
        raise ApproxError(
            f"{source.folder} could not be loaded as {source.stock_class.__name__}: {_short(error)}", Exit.UNAVAILABLE
        ) from error
    notes = _check_keys(source, model, info)
    integrity.refuse_non_finite(model.state_dict().items(), str(source.folder))
    return Checkpoint(source, model.eval().to(device), _digest(files), notes)


def processor(source: Source) -> Any:
    """The tokenizer, feature extractor or processor of a checkpoint.

    Raises:
        ApproxError: if there is none.
    """
    if source.reader is not None:
        return source.reader
    try:
        found = _from_folder(processor_class(source.stock_class), source)
        tokenizer = getattr(found, "tokenizer", found)
        # Where its files are missing, transformers makes one that knows no word, and scores would be those of noise.
        if (
            isinstance(tokenizer, PreTrainedTokenizerBase)
            and not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens
        ):
            raise ValueError("the vocabulary is missing")
    except Exception as error:
        raise ApproxError(
            f"{source.folder} has no usable tokenizer or feature extractor: {_short(error)}. Copy its files beside the weights.",
            Exit.UNAVAILABLE,
        ) from error
    return found


def processor_class(model_class: type) -> str:
    """Name of the auto class that reads what models of a class take."""
    return {"input_ids": "AutoTokenizer", "pixel_values": "AutoImageProcessor"}.get(
        model_class.main_input_name,  # type: ignore[attr-defined]  # every PreTrainedModel has it
        "AutoProcessor",
    )


def _from_folder(kind: str, source: Source) -> Any:
    try:
        return getattr(transformers, kind).from_pretrained(
            source.folder, config=None if source.converted else source.config
        )
    except ImportError:
        if kind != "AutoProcessor":
            raise
        # A language model beside a speech model asks for packages that decode with it; the processor itself needs none.
        return transformers.Wav2Vec2Processor.from_pretrained(source.folder)


def _folder(name: str, revision: str | None, offline: bool, allow_pickle: bool) -> tuple[Path, str | None]:
    path = Path(name).expanduser()
    try:
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
    """transformers fills missing tensors with random numbers and goes on; only a new task head may be missing."""
    mismatched = [f"{key} is {tuple(found)}, not {tuple(due)}" for key, found, due in sorted(info["mismatched_keys"])]
    if mismatched:
        more = f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else ""
        raise ApproxError(
            f"{source.folder}: its weights do not have the shapes of its config: {', '.join(mismatched[:3])}{more}. Download "
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
            "are of another family than its config, or incomplete; transformers would have filled in random numbers.",
            Exit.UNAVAILABLE,
        )
    notes = []
    if missing:
        notes.append(
            f"{', '.join(missing[:4])} not in the checkpoint: newly initialised; train this head before you trust its output."
        )
    surplus = sorted(key for key in info["unexpected_keys"] if key.startswith(prefix) and "pooler" not in key)
    if surplus:
        notes.append(f"{len(surplus)} tensors have no place in this model and were left out, e.g. {surplus[0]}.")
    return notes


def _digest(files: list[Path]) -> str:
    if len(files) == 1:
        return sha256(files[0])
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."
