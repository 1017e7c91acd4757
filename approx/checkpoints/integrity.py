"""Check the files of a checkpoint before a model is built from them."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from approx.checkpoints.conversion_record import check_record
from approx.errors import ApproxError, Exit
from approx.paths import inside, refuse_leaving
from approx.seam.manifest import MANIFEST, names

_LFS = b"version https://git-lfs"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The only folder that transformers reads by itself.
_TEMPLATES = "additional_chat_templates"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# The order in which transformers looks for weights.
_IN_ORDER = (_SINGLE, INDEX, PICKLE, PICKLE_INDEX)
_OTHER_WEIGHTS = (".gguf", ".safetensors", ".bin", ".h5", ".msgpack", ".pt", ".pth", ".ckpt")
# With these files beside the weights, transformers adds an adapter to the model wherever peft is installed.
ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Models are built from these numbers before any weight is read; a corrupt one would keep the machine busy for hours.
_MOST = {"layer": 5_000, "labels": 1_000_000}


def read_config(folder: Path) -> dict[str, Any]:
    """The raw `config.json` of a checkpoint.

    Raises:
        ApproxError: if it is missing, not JSON, a git-lfs pointer, has absurdly large counts, or uses relative positions.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ApproxError(
            f"config.json is missing in {folder}. Give the folder of a transformers checkpoint, or a model id of the hub.",
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
            f"{path} has no 'model_type', so the family of the model is unknown. Save the model with a current transformers.",
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
            f"{path} says {', '.join(beyond)}, which is implausible. It is damaged; download it again.",
            Exit.UNAVAILABLE,
        )
    relative = config.get("position_embedding_type", "absolute")
    if relative not in ("absolute", None, "rotary"):
        raise ApproxError(
            f"{path} sets position_embedding_type '{relative}', which transformers 5 ignores and no mechanism supports. "
            "Only checkpoints with absolute positions can be converted.",
            Exit.UNSUPPORTED,
        )
    return config


def refuse_leaving_links(folder: Path) -> None:
    """Check that no file of a checkpoint is a symbolic link to a place outside its folder; it could be copied or uploaded.

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
        ApproxError: naming what says that it was converted, and what was lost or is wrong.
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
        f"{folder / 'config.json'} is damaged: the folder was converted ({sign}), but {lost}. Copy the folder again, or convert "
        "the base checkpoint again.",
        Exit.UNAVAILABLE,
    )


def _sign_of_conversion(folder: Path, config: dict[str, Any]) -> str | None:
    """What beside 'approx' and 'model_type' tells that a folder was converted; None if nothing does."""
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

    The order of preference is that of `from_pretrained`: the file that the config names, one safetensors file, an index of
    several, and then the same as pickles. Whatever opens, hashes, compares or copies weights asks here, so that the name
    of a model is that of the weights which run.

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
                f"'transformers_weights' in {folder / 'config.json'} is '{first}', which is not a safetensors file of this folder. "
                "Download it, or delete the key to load model.safetensors.",
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
    """Names of the files of an adapter of PEFT in a folder; empty if there is none, its config alone without its weights."""
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
    found = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    if found and found[0].endswith(".gguf"):
        return (
            f"{folder} holds its weights as GGUF ({found[0]}), which transformers only reads when asked to. Load them with "
            f"from_pretrained(…, gguf_file='{found[0]}'), and save the model as safetensors."
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
