"""Open a stock or converted checkpoint from a folder or the hub; hash it, and reject what would load wrongly."""

import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, errors, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.quantizers.auto import AutoHfQuantizer

from approx.checkpoints import families
from approx.checkpoints.foreign import refuse_kernels
from approx.checkpoints.history import check_record
from approx.checkpoints.manifest import MANIFEST, check_seal, names, sha256
from approx.errors import ApproxError, Exit
from approx.paths import inside, refuse_leaving
from approx.planning import positions
from approx.planning.positions import example_inputs
from approx.seam.internals import backbone_of
from approx.version import install

_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py", "*.md", "*.jinja"]
# Licences have all kinds of names.
_PATTERNS += [
    "[Ll][Ii][Cc][Ee]*",
    "[Nn][Oo][Tt][Ii][Cc][Ee]*",
    "[Cc][Oo][Pp][Yy][Ii][Nn][Gg]*",
    "[Uu][Ss][Ee]_[Pp][Oo][Ll]*",
]
# A converted folder has its code next to the weights; folders below it are unrelated.
_IGNORED = ["*/*.py"]
# Some networks drop packets silently, and the client would wait for minutes by default.
_SECONDS = 10


def download(name: str, *, revision: str | None, offline: bool, allow_pickle: bool) -> tuple[Path, str]:
    """Download a model from the hub into the local cache.

    Args:
        name: Model id.
        revision: Branch, tag or commit; None for the main branch.
        offline: Whether to use only the cache.
        allow_pickle: Whether to download pickled weights too.

    Returns:
        The local folder, and the commit.

    Raises:
        ApproxError: if it does not exist, access is denied, or the hub does not answer.
    """
    requested, reachable = revision, True
    try:
        if not offline:
            revision, reachable = _commit(name, revision)
        patterns = [*_PATTERNS, "pytorch_model*.bin"] if allow_pickle else _PATTERNS
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                local_files_only=offline or not reachable,
            )
        )
    except errors.RepositoryNotFoundError:
        raise ApproxError(
            f"'{name}' was not found, or you have no access: it is not a local folder, and the hub does not list it. "
            "Check the name; for a private model run `hf auth login` or set HF_TOKEN.",
            Exit.UNAVAILABLE,
        ) from None
    except errors.RevisionNotFoundError:
        raise ApproxError(
            f"'{name}' has no revision '{requested}'. Leave --revision out, or name one.", Exit.UNAVAILABLE
        ) from None
    except errors.HFValidationError:
        raise ApproxError(
            f"'{name}' is neither a folder nor a valid model id of the hub (owner/name).", Exit.UNAVAILABLE
        ) from None
    except errors.LocalEntryNotFoundError:
        why = "(--offline)" if offline else "either, and the hub cannot be reached"
        raise ApproxError(
            f"'{name}' is not a local folder, and it is not in the hub's local cache {why}. Give the path of a folder, "
            "or connect to the network.",
            Exit.UNAVAILABLE,
        ) from None
    except Exception as error:
        # Which HTTP library raises here depends on the version of the client.
        raise ApproxError(
            f"'{name}' could not be downloaded: {type(error).__name__}: {' '.join(str(error).split())[:200]} Try "
            "again; finished downloads stay in the cache.",
            Exit.UNAVAILABLE,
        ) from error
    return folder, folder.name


def listed(name: str, commit: str) -> list[str] | None:
    """Names of all files that a commit of a repository holds; None if the hub does not answer.

    Args:
        name: Model id.
        commit: The commit.
    """
    try:
        found = HfApi().model_info(name, revision=commit, timeout=_SECONDS).siblings
    except Exception:
        # Whatever went wrong, the list is not known.
        return None
    return [one.rfilename for one in found or []]


def _commit(name: str, revision: str | None) -> tuple[str | None, bool]:
    """The commit of a revision, and whether the hub answered; if not, the cache may still have it."""
    try:
        return HfApi().model_info(name, revision=revision, timeout=_SECONDS).sha, True
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception:
        # Any network or server error: fall back to the cache, whose error mentions the network.
        return revision, False


def settings(path: Path) -> dict[str, Any]:
    """The settings in a file; empty if there is no file.

    Raises:
        ApproxError: if it is not a JSON object.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(read, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ApproxError(
            f"{path} cannot be read as JSON settings: {error}. Correct it, or download it again.", Exit.UNAVAILABLE
        ) from None
    return read


def try_out(reader: Any) -> None:
    """Check that the tokenizer of a checkpoint has a vocabulary and reads a text and a pair.

    Args:
        reader: A tokenizer, or a processor, which may have one.

    Raises:
        ValueError: if it does not.
    """
    # transformers instantiates any of its classes that the settings name, a model too.
    if not isinstance(reader, (PreTrainedTokenizerBase, ProcessorMixin, FeatureExtractionMixin, ImageProcessingMixin)):
        raise ValueError(f"its class is {type(reader).__name__}, which is neither a tokenizer nor a processor")
    tokenizer = getattr(reader, "tokenizer", reader)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    # Without its files, transformers builds one with an empty vocabulary, and every score would be noise.
    if not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens:
        raise ValueError("the vocabulary is missing")
    if not tokenizer.is_fast:
        return
    try:
        tokenizer("a")
        tokenizer("a", "a")
    except BaseException as error:
        # A panic of Rust is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"it cannot read a text ({type(error).__name__}: {error})") from None
        raise


_LFS = b"version https://git-lfs"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The only folder that transformers reads by itself.
_TEMPLATES = "additional_chat_templates"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# The order in which transformers looks for weights.
_IN_ORDER = (_SINGLE, INDEX, PICKLE, PICKLE_INDEX)
_OTHER_WEIGHTS = (".gguf", ".safetensors", ".bin", ".h5", ".msgpack", ".pt", ".pth", ".ckpt")
# With these files next to the weights, transformers adds an adapter to the model wherever peft is installed.
ADAPTER = "adapter_config.json"
# What an export found, beside its program; a folder with this file holds no weights for PyTorch.
EXPORTED = "approx_export.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Models are built from these numbers before any weight is read; a corrupt one would keep the machine busy for hours.
_MOST = {"layer": 5_000, "labels": 1_000_000}


def read_config(folder: Path) -> dict[str, Any]:
    """The raw `config.json` of a checkpoint.

    Raises:
        ApproxError: if it is missing, not JSON, a git-lfs pointer, has absurdly large counts, or uses relative
            positions.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ApproxError(
            f"config.json is missing in {folder}. Give the folder of a transformers checkpoint, or a model id of the "
            "hub.",
            Exit.UNAVAILABLE,
        )
    _refuse_lfs(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError, OSError) as error:
        raise ApproxError(f"{path} is not a valid config: {error}. Download it again.", Exit.UNAVAILABLE) from None
    if not isinstance(config.get("model_type"), str):
        raise ApproxError(
            f"{path} has no 'model_type', so the family of the model is unknown. Save the model with a current "
            "transformers.",
            Exit.UNAVAILABLE,
        )
    beyond = [
        f"{key} = {value:.3g}"
        for key, value in config.items()
        for word, most in _MOST.items()
        if word in key and isinstance(value, int) and value > most
    ]
    if beyond:
        raise ApproxError(
            f"{path} has {', '.join(beyond)}, which is implausible. It is damaged; download it again.",
            Exit.UNAVAILABLE,
        )
    relative = config.get("position_embedding_type", "absolute")
    if relative not in ("absolute", None, "rotary"):
        raise ApproxError(
            f"{path} sets position_embedding_type '{relative}', which transformers 5 ignores and no mechanism "
            "supports. Only checkpoints with absolute positions can be converted.",
            Exit.UNSUPPORTED,
        )
    return config


def refuse_leaving_links(folder: Path) -> None:
    """Check that no file of a checkpoint is a symbolic link out of its folder; it could be copied or uploaded.

    Raises:
        ApproxError: naming the link and where it leads.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ApproxError(f"{folder} cannot be opened: {error.strerror}.", Exit.UNAVAILABLE) from None
    for path in paths:
        # Other folders are never read, except those that modules.json names, which are checked there.
        if path.is_symlink() and (path.name == _TEMPLATES or not path.is_dir()):
            refuse_leaving(folder, path)
    if (folder / _TEMPLATES).is_dir():
        for path in sorted((folder / _TEMPLATES).iterdir()):
            refuse_leaving(folder, path)


def refuse_half_converted(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a converted folder whose config does not say how: transformers would compute exact attention.

    Raises:
        ApproxError: naming the sign of a conversion, and what was lost or is wrong.
    """
    block, converted = config.get("approx"), config["model_type"].startswith("approx_")
    sites = block.get("sites") if isinstance(block, dict) else None
    whole = isinstance(sites, dict) and bool(sites)
    if whole and converted:
        check_record(config, folder / "config.json")
        return
    if converted:
        sign = f"'model_type' is {config['model_type']}"
    else:
        sign = "'approx' lists mechanisms" if whole else _sign_of_conversion(folder, config)
    if sign is None:
        return
    lost = f"'model_type' is {config['model_type']}" if whole else "'approx' lists no mechanisms"
    raise ApproxError(
        f"{folder / 'config.json'} is damaged: the folder was converted ({sign}), but {lost}. Copy the folder again, "
        "or convert the base checkpoint again.",
        Exit.UNAVAILABLE,
    )


def _sign_of_conversion(folder: Path, config: dict[str, Any]) -> str | None:
    """A sign, besides 'approx' and 'model_type', that a folder was converted; None if there is none."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any(str(one).startswith("Approx") for one in architectures):
        return f"'architectures' is {architectures[0]}"
    if (folder / MANIFEST).is_file() and any(name.endswith(".py") for name in names(folder)):
        return f"{MANIFEST} lists its code"
    # Weights that cannot be read are reported where they are loaded.
    with suppress(SafetensorError, OSError):
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if key := next((key for key in file.keys() if ".mechanism." in key), None):  # noqa: SIM118 - a file
                    return f"its weights have {key}"
    return None


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The weight files that transformers loads from a folder, checked for LFS pointers, truncation and wrong headers.

    The order of preference is that of `from_pretrained`: the file that the config names, one safetensors file, an index
    of several, and then the same as pickles. Whatever opens, hashes, compares or copies weights asks here, so that the
    name of a model is that of the weights which run.

    Args:
        folder: Folder of the checkpoint.
        allow_pickle: Whether a checkpoint with only pickled weights is accepted.

    Raises:
        ApproxError: naming the file, the problem and what to do.
    """
    config = _config_of(folder)
    named = config.get("transformers_weights")
    if named is None:
        first = next((name for name in _IN_ORDER if (folder / name).is_file()), None)
        if first is None:
            raise ApproxError(_no_weights(folder), Exit.UNAVAILABLE)
    else:
        first = inside(folder, named, folder / "config.json").relative_to(folder).as_posix()
        right = Path(first).name == first and first.endswith((".safetensors", ".safetensors.index.json"))
        if not right or not os.path.isfile(folder / first):
            raise ApproxError(
                f"'transformers_weights' in {folder / 'config.json'} is '{first}', which is not a safetensors file of "
                "this folder. Download it, or delete the key to load model.safetensors.",
                Exit.UNAVAILABLE,
            )
    if first in (PICKLE, PICKLE_INDEX) and not allow_pickle:
        raise ApproxError(
            f"{folder} has only pickled weights ({first}), and a pickle can run code. If you trust its author, pass "
            "--allow-pickle; the converted checkpoint is saved as safetensors.",
            Exit.REFUSED,
        )
    files = _named_in(folder / first) if first.endswith(".index.json") else [folder / first]
    files += [folder / name for name in _further(config) if (folder / name).is_file()]
    for path in files:
        # A name may be too long to be looked for.
        if not os.path.isfile(path):
            raise ApproxError(f"{path} is missing, but {first} names it. Download it again.", Exit.UNAVAILABLE)
        if path.suffix == ".safetensors":
            _check_safetensors(path)
        else:
            _refuse_lfs(path)
    return files


def unused_weights(folder: Path, files: Sequence[Path]) -> str | None:
    """A note about safetensors files and indices in a folder that transformers ignores; None if there are none."""
    known = {path.name for path in files} | ({INDEX} if files[0].name != _SINGLE else set())
    left = sorted({path.name for path in folder.glob("*.safetensors*")} - known - {*adapter_names(folder)})
    if not left:
        return None
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"{', '.join(left[:3])}{more} not read: transformers loads {files[0].name} from this folder."


def adapter_names(folder: Path) -> list[str]:
    """Names of the files of a PEFT adapter in a folder, or of its config without weights; empty without an adapter."""
    if not os.path.isfile(folder / ADAPTER):
        return []
    return [ADAPTER, *[name for name in _ADAPTER_WEIGHTS if os.path.isfile(folder / name)][:1]]


def _config_of(folder: Path) -> dict[str, Any]:
    # A config that cannot be read is reported by `read_config`.
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}
    return {}


def _further(config: dict[str, Any]) -> tuple[str, ...]:
    """Files that transformers reads besides the weights, which a few families name in their config class."""
    family = str(config.get("model_type")).removeprefix("approx_")
    return getattr(CONFIG_MAPPING[family], "extra_files", ()) if family in CONFIG_MAPPING else ()


def _named_in(index: Path) -> list[Path]:
    _refuse_lfs(index)
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(inside(index.parent, name, index) for name in named)
    except ApproxError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files = []
    if not files:
        raise ApproxError(f"{index} is not a valid index. Download it again.", Exit.UNAVAILABLE)
    return files


def _no_weights(folder: Path) -> str:
    if (folder / EXPORTED).is_file():
        return f"{folder} is an exported program, which only evaluate and bench take. Give the checkpoint it was exported from."
    found = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    if found and found[0].endswith(".gguf"):
        return (
            f"{folder} holds its weights as GGUF ({found[0]}), which transformers reads only on request. Load them "
            f"with from_pretrained(…, gguf_file='{found[0]}'), and save the model as safetensors."
        )
    others = f"; {', '.join(found[:3])} has another name, which transformers does not load by itself" if found else ""
    return f"{folder} holds no weights: neither {_SINGLE} nor {INDEX} exists{others}. Give a folder with weights."


def refuse_non_finite(named_tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Check every number of a checkpoint: logits can be finite until an example reaches a NaN.

    Raises:
        ApproxError: naming the first tensors that hold NaN or infinity.
    """
    wrong = [name for name, tensor in named_tensors if tensor.is_floating_point() and not _finite(tensor)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ApproxError(
            f"{source} holds NaN or infinite numbers in {', '.join(wrong[:3])}{more}. The checkpoint is damaged; "
            "download or train it again.",
            Exit.UNAVAILABLE,
        )


def _finite(tensor: torch.Tensor) -> bool:
    # A NaN or infinity always shows in the sum, which is much faster to compute; a sum of finite numbers may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _refuse_lfs(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ApproxError(
                f"{path} is a git-LFS pointer, not the file itself. Run `git lfs pull` in its repository.",
                Exit.UNAVAILABLE,
            )


def _check_safetensors(path: Path) -> None:
    _refuse_lfs(path)
    try:
        with safe_open(path, framework="pt") as file:
            if not list(file.keys()):
                raise ApproxError(f"{path} holds no tensors. Download it again.", Exit.UNAVAILABLE)
    except (SafetensorError, OSError) as error:
        raise ApproxError(
            f"{path} ({path.stat().st_size:,} bytes) is damaged or truncated: {error}. Download it again.",
            Exit.UNAVAILABLE,
        ) from None


def state_sha256(model: Any) -> str:
    """Hash the tensors of a loaded model, with their names and dtypes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Adapters that change no weight, but what a model reads: there is nothing to merge.
_PROMPTS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT"}


@dataclass(frozen=True)
class Adapter:
    """An adapter, of which only the config was read.

    Attributes:
        folder: Its folder.
        kind: What PEFT calls its kind, such as LORA.
        base: The checkpoint that it was trained on, as its config names it; None if it does not.
        revision: Commit of the base on the hub.
        files: What it consists of: its config and its weights.
    """

    folder: Path
    kind: str
    base: str | None
    revision: str | None
    files: tuple[Path, ...]


def find(folder: Path) -> Adapter | None:
    """The adapter in a folder; None if there is none.

    Raises:
        ApproxError: if its config cannot be read.
    """
    names = adapter_names(folder)
    if not names:
        return None
    path = folder / ADAPTER
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, base, revision = (config.get(key) for key in ("peft_type", "base_model_name_or_path", "revision"))
    except (ValueError, AttributeError, RecursionError, OSError) as error:
        raise ApproxError(f"{path} is not a valid config: {error}. Download it again.", Exit.UNAVAILABLE) from None
    named = base if isinstance(base, str) and base else None
    return Adapter(
        folder,
        kind if isinstance(kind, str) else "unknown kind of",
        named,
        revision if isinstance(revision, str) else None,
        tuple(folder / name for name in names),
    )


def refuse(name: str, adapter: Adapter, *, alone: bool) -> None:
    """Refuse a checkpoint with an adapter that is not to be merged.

    Raises:
        ApproxError: saying what it is, and how to merge it.
    """
    merge = "Merge it with --merge-adapter (in Python and recipes merge_adapter: true)"
    if alone:
        base = f"of '{adapter.base}'" if adapter.base else "whose config does not name its base"
        text = (
            f"{name} is a {adapter.kind} adapter {base}, not a whole model. {merge}, or save the merged model and give "
            "its folder."
        )
    else:
        text = (
            f"{name} holds a {adapter.kind} adapter ({ADAPTER}) next to the weights. transformers adds it where peft "
            f"is installed and ignores it elsewhere, so the model is ambiguous. {merge}, or move it out "
            "of the folder."
        )
    raise ApproxError(text, Exit.REFUSED)


def refuse_unmergeable(adapter: Adapter, *, allow_pickle: bool) -> None:
    """Refuse an adapter that cannot be merged, before weights are read.

    Raises:
        ApproxError: if peft is missing, its weights are missing or pickled, or its kind changes no weights.
    """
    try:
        import peft
    except ImportError as error:
        raise ApproxError(
            f"Merging the adapter in {adapter.folder} needs the package peft ({error}). Install it: "
            f"{install('train')}.",
            Exit.MISSING,
        ) from None
    if len(adapter.files) < 2:
        raise ApproxError(
            f"{adapter.folder} has an {ADAPTER}, but no adapter_model.safetensors. Download it again.",
            Exit.UNAVAILABLE,
        )
    if adapter.files[1].suffix == ".bin" and not allow_pickle:
        raise ApproxError(
            f"{adapter.files[1]} is a pickle, which can run code. Save the adapter as safetensors with a current peft.",
            Exit.REFUSED,
        )
    if adapter.kind in _PROMPTS or adapter.kind not in set(peft.PeftType):
        raise ApproxError(
            f"{adapter.folder} holds a {adapter.kind} adapter, which has no weights to merge into the model. Only "
            "adapters of linear layers, such as LORA, can be merged.",
            Exit.UNSUPPORTED,
        )


def merge(model: Any, adapter: Adapter) -> tuple[Any, set[str]]:
    """Add an adapter to the weights of a loaded model.

    Returns:
        The model, of the class it had, and the names of its parameters that the adapter brought whole, such as a task
        head.

    Raises:
        ApproxError: if the adapter does not fit the model.
    """
    import peft
    from peft.utils import ModulesToSaveWrapper

    kind = type(model).__name__
    try:
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter.folder), torch_device="cpu")
        stored = _names(adapter.files[1])
        # By default peft asks the hub whether the embeddings were resized.
        embeddings = any("embed" in name or "lm_head" in name for name in stored)
        known = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=embeddings)
        replaced = {
            f"{name}.{part}".removeprefix("base_model.model.")
            for name, module in wrapped.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
            for part, _ in module.original_module.named_parameters()
        }
        surplus = sorted(stored ^ {*known})
        if not surplus:
            return wrapped.merge_and_unload(safe_merge=True).eval(), replaced
        reason = f"tensors without a counterpart: {', '.join(surplus[:3])}"
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise ApproxError(
        f"The {adapter.kind} adapter in {adapter.folder} could not be merged into a {kind} ({reason}). Merge it where "
        "it was trained, with merge_and_unload() and save_pretrained(), and give that folder.",
        Exit.UNAVAILABLE,
    )


def _names(file: Path) -> set[str]:
    """Names of the tensors in a file of weights."""
    if file.suffix == ".bin":
        return {*torch.load(file, map_location="meta", weights_only=True)}
    with safe_open(file, framework="pt") as tensors:
        return {*tensors.keys()}


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
    adapter: Adapter | None = None


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        source: Where it came from.
        model: The model, in evaluation mode.
        weights_sha256: Hash of the weight files that were loaded, in order, and of the files of a merged adapter.
        notes: Messages for the user, e.g. about a newly initialised task head.
        runtime: What runs it, with versions and the precision of the weights, such as `onnxruntime 1.32.0, int8`; None for PyTorch
            alone with weights in the model's dtype.
    """

    source: Source
    model: Any
    weights_sha256: str
    notes: list[str] = field(default_factory=list)
    runtime: str | None = None


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
        merge_adapter: Whether an adapter next to the weights, or one named by its folder, is merged when they are
            loaded.

    Raises:
        ApproxError: if it does not exist, its family is not supported, or it holds an adapter that is not to be merged.
    """
    folder, commit = _folder(str(name), revision, offline, allow_pickle)
    refuse_leaving_links(folder)
    if (found := find(folder)) is not None:
        alone = not (folder / "config.json").is_file()
        if not merge_adapter:
            refuse(str(name), found, alone=alone)
        refuse_unmergeable(found, allow_pickle=allow_pickle)
        folder = _base_of(found, offline, allow_pickle) if alone else folder
    raw = read_config(folder)
    converted = raw["model_type"].startswith("approx_")
    family = raw["model_type"].removeprefix("approx_")
    if family not in CONFIG_MAPPING:
        raise ApproxError(
            f"transformers {transformers.__version__} does not know the model type '{raw['model_type']}' of {name}. "
            f"Supported families: {', '.join(families.FAMILIES)}.",
            Exit.UNSUPPORTED,
        )
    refuse_half_converted(folder, raw)
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
    return Source(
        name=str(name),
        folder=folder,
        revision=commit,
        raw=raw,
        config=config,
        stock_class=stock,
        converted=converted,
        adapter=found,
    )


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
        merge_adapter: Whether an adapter next to the weights, or one named by its folder, is merged into them.

    Raises:
        ApproxError: if anything is missing, damaged or unsupported.
    """
    source = locate(name, revision=revision, offline=offline, allow_pickle=allow_pickle, merge_adapter=merge_adapter)
    refuse_unquantisable(source)
    files = weight_files(source.folder, allow_pickle=allow_pickle)
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
            f"{files[0]} was not loaded: it is a pickle that is damaged or holds more than tensors. Get the checkpoint "
            "as safetensors.",
            Exit.UNAVAILABLE,
        ) from error
    except Exception as error:
        raise ApproxError(
            f"{source.folder} could not be loaded as {source.stock_class.__name__}: {_short(error)}", Exit.UNAVAILABLE
        ) from error
    brought: set[str] = set()
    if source.adapter is not None:
        model, brought = merge(model, source.adapter)
    notes = _check_keys(source, model, {**info, "missing_keys": {*info["missing_keys"]} - brought})
    if (unused := unused_weights(source.folder, files)) is not None:
        notes.append(unused)
    if source.adapter is not None:
        files = [*files, *source.adapter.files]
        notes.append(f"The {source.adapter.kind} adapter in {source.adapter.folder} was merged into the weights.")
    if not source.converted and source.raw.get("auto_map"):
        notes.append(
            "config.json names custom code for this model; it is not run: the model is transformers' "
            f"{model_class.__name__}."
        )
    refuse_non_finite(model.state_dict().items(), str(source.folder))
    return Checkpoint(source, model.eval().to(device), _digest(files), notes)


def refuse_unquantisable(source: Source) -> None:
    """Refuse a quantised checkpoint that cannot be opened here, before weights are read.

    Raises:
        ApproxError: if its package or hardware is missing, or the method is unknown.
    """
    quantised = source.raw.get("quantization_config")
    if not quantised:
        return
    method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else "an unnamed method"
    remedy = "or give the checkpoint from which it was quantised."
    try:
        quantizer = AutoHfQuantizer.from_config(quantised, pre_quantized=True)
        quantizer.validate_environment(device_map=None, dtype=None, weights_only=True)
    except (ImportError, RuntimeError) as error:
        raise ApproxError(
            f"{source.name} is quantised ({method}), which this installation cannot open: {_short(error)}. Install "
            f"what is missing, {remedy}",
            Exit.MISSING,
        ) from None
    except Exception as error:
        raise ApproxError(
            f"{source.name} is quantised ({method}), which transformers {transformers.__version__} cannot open: "
            f"{_short(error)}. Correct its config, {remedy}",
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
            f"{folder} has no usable tokenizer or feature extractor: {_short(error)}. Copy its files next to the "
            "weights.",
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
                f"--revision {revision} was given, but {name} is a local folder, which has no revisions. Leave one of "
                "them out."
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
    return download(name, revision=revision, offline=offline, allow_pickle=allow_pickle)


def _base_of(found: Adapter, offline: bool, allow_pickle: bool) -> Path:
    """The folder of the checkpoint that an adapter was trained on.

    Raises:
        ApproxError: if its config does not name it, it cannot be reached, or it holds an adapter itself.
    """
    if found.base is None:
        raise ApproxError(
            f"The adapter in {found.folder} does not name its base in {ADAPTER}. Copy its files next to the weights of "
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
    refuse_leaving_links(base)
    if find(base) is not None:
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
            f"The config of {name} contradicts itself: model_type '{raw['model_type']}' and architecture "
            f"'{architecture}' are of different families. Download it again.",
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
    """Check keys and shapes: transformers silently initialises missing tensors, which only suits a new task head."""
    mismatched = [f"{key} is {tuple(shape)}, not {tuple(due)}" for key, shape, due in sorted(info["mismatched_keys"])]
    if mismatched:
        more = f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else ""
        raise ApproxError(
            f"{source.folder}: the shapes of the weights do not match the config: {', '.join(mismatched[:3])}{more}. "
            "Download both again.",
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
            f"{source.folder} lacks tensors of its {source.stock_class.__name__}: {', '.join(backbone[:3])}{more}. Its "
            "weights are incomplete or of another family than its config; transformers would have initialised these at "
            "random.",
            Exit.UNAVAILABLE,
        )
    notes = []
    if unread:
        notes.append(f"{', '.join(sorted(unread)[:4])} not in the checkpoint: set to 0, since only training reads it.")
    if missing:
        notes.append(
            f"{', '.join(missing[:4])} not in the checkpoint: newly initialised; train this task head before using its "
            "output."
        )
    surplus = sorted(key for key in info["unexpected_keys"] if key.startswith(prefix) and "pooler" not in key)
    if surplus:
        notes.append(f"{len(surplus)} tensors do not belong to this model and were ignored, e.g. {surplus[0]}.")
    return notes


def _unread(model: Any, missing: Iterable[str]) -> set[str]:
    """Those of the missing tensors that only training reads, such as the embedding of masked frames; they are set to 0.

    If a missing tensor full of NaN leaves the outputs of an example finite, inference does not read it. Experts are
    read by some inputs only, so one example says nothing of them. Counters of batches are whole numbers, which cannot
    be NaN.
    """
    tensors = model.state_dict()
    unread = {name for name in missing if name.endswith("num_batches_tracked")}
    probed = [name for name in missing if tensors[name].is_floating_point() and "expert" not in name]
    for name in probed if len(probed) <= _MOST_ASKED else ():
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
