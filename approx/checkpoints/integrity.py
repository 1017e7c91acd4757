"""Whether the files of a checkpoint are what they should be, looked at before any model is built from them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from approx.errors import ApproxError, Exit

_LFS = b"version https://git-lfs"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Models are built from these numbers before any weight is read, so a wrong digit would keep the machine busy for hours.
_MOST = {"layer": 5_000, "labels": 1_000_000}


def read_config(folder: Path) -> dict[str, Any]:
    """The raw `config.json` of a checkpoint.

    Raises:
        ApproxError: if it is missing, is not JSON, is a git-lfs pointer, counts beyond reason, or asks for relative
            positions.
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
            f"{path} says {', '.join(beyond)}, which no model has. It is damaged; download it again.", Exit.UNAVAILABLE
        )
    relative = config.get("position_embedding_type", "absolute")
    if relative not in ("absolute", None, "rotary"):
        raise ApproxError(
            f"{path} asks for position_embedding_type '{relative}', which transformers 5 ignores and no mechanism honours. "
            "Checkpoints with absolute positions can be converted.",
            Exit.UNSUPPORTED,
        )
    return config


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The weight files of a checkpoint, after a look at each that finds pointers, truncation and lying headers.

    Args:
        folder: Of the checkpoint.
        allow_pickle: Whether a checkpoint that only has pickled weights is accepted.

    Raises:
        ApproxError: naming the file, what is wrong with it and what to do.
    """
    if (folder / _INDEX).is_file():
        _refuse_lfs(folder / _INDEX)
        try:
            names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(folder / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            files = []
        if not files:
            raise ApproxError(f"{folder / _INDEX} is not a valid index. Download it again.", Exit.UNAVAILABLE)
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        return _pickles(folder, allow_pickle)
    for path in files:
        if not path.is_file():
            raise ApproxError(f"{path} is missing although {_INDEX} names it. Download it again.", Exit.UNAVAILABLE)
        _check_safetensors(path)
    return files


def refuse_non_finite(named_tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    """Check every number of a checkpoint: logits can stay finite around a NaN that no example has touched yet.

    Raises:
        ApproxError: naming the first tensors that hold NaN or infinity.
    """
    wrong = [name for name, t in named_tensors if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ApproxError(
            f"{source} holds NaN or infinite numbers in {', '.join(wrong[:3])}{more}. The checkpoint is damaged; "
            "download or train it again.",
            Exit.UNAVAILABLE,
        )


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
            f"{path} ({path.stat().st_size:,} bytes) is damaged or cut short: {error}. Download it again.",
            Exit.UNAVAILABLE,
        ) from None


def _pickles(folder: Path, allow_pickle: bool) -> list[Path]:
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not pickles:
        raise ApproxError(
            f"{folder} holds no weights: {_SINGLE} and {_INDEX} were looked for. Give a folder that holds them.",
            Exit.UNAVAILABLE,
        )
    if not allow_pickle:
        raise ApproxError(
            f"{folder} has pickled weights only ({pickles[0].name}), and a pickle can run code. If you trust its author, "
            "pass --allow-pickle; the converted checkpoint is saved as safetensors.",
            Exit.REFUSED,
        )
    for path in pickles:
        _refuse_lfs(path)
    return pickles
