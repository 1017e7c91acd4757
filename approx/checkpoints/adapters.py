"""Adapters of PEFT, beside a checkpoint or alone: found, refused with the remedy, or merged into the weights on request.

transformers adds an adapter that lies beside the weights wherever peft is installed, and leaves it out elsewhere. Neither
happens here without being asked for, so that a name always stands for the same model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from approx.checkpoints.integrity import ADAPTER, adapter_names
from approx.errors import ApproxError, Exit

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
    """Refuse a checkpoint with an adapter that was not asked for.

    Raises:
        ApproxError: saying what it is, and how to merge it.
    """
    merge = "Merge it with --merge-adapter (in Python and recipes merge_adapter: true)"
    if alone:
        base = f"of '{adapter.base}'" if adapter.base else "whose config does not name its base"
        text = f"{name} is a {adapter.kind} adapter {base}, not a whole model. {merge}, or save the merged model and give its folder."
    else:
        text = (
            f"{name} holds a {adapter.kind} adapter ({ADAPTER}) beside the weights. transformers adds it where peft is installed and "
            f"ignores it elsewhere, so it is not settled which model is meant. {merge}, or move it out of the folder."
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
            f"Merging the adapter in {adapter.folder} needs the package peft ({error}). Install it: pip install "
            "'approx-attention[train]'.",
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
            f"{adapter.folder} holds a {adapter.kind} adapter, which has no weights to merge into the model. Only adapters of "
            "linear layers, such as LORA, can be merged.",
            Exit.UNSUPPORTED,
        )


def merge(model: Any, adapter: Adapter) -> tuple[Any, set[str]]:
    """Add an adapter to the weights of a loaded model.

    Returns:
        The model, of the class it had, and the names of its parameters that the adapter brought whole, such as a task head.

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
        f"The {adapter.kind} adapter in {adapter.folder} could not be merged into a {kind} ({reason}). Merge it where it was "
        "trained, with merge_and_unload() and save_pretrained(), and give that folder.",
        Exit.UNAVAILABLE,
    )


def _names(file: Path) -> set[str]:
    """Names of the tensors in a file of weights."""
    if file.suffix == ".bin":
        return {*torch.load(file, map_location="meta", weights_only=True)}
    with safe_open(file, framework="pt") as tensors:
        return {*tensors.keys()}
