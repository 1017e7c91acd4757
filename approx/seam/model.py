"""The class of converted models; copied into converted checkpoints."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from approx.errors import ApproxError, Exit
from approx.mechanisms.mechanism import HeadGroups, Mechanism, unusable_state
from approx.seam.dispatch import FORMAT, IMPLEMENTATION, attach
from approx.seam.internals import cache_of, forget_file_layout, is_compiled_in_place, keep_in_float32
from approx_kernels.runtime.pytorch import unreadable

MANIFEST = "approx_manifest.json"
# The model's own files; a tokenizer may be saved in the folder later and is not part of it.
_MODEL_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json", "*.py")


class ApproxModel:
    """Mixin of every converted model: builds the mechanisms from the config, and fails loudly if they are missing."""

    config: Any
    modules: Any
    state_dict: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # Some heads build their backbone with AutoModel.from_config, which must return the stock one.
        converted = type(config)
        stock = next(kind for kind in converted.__mro__ if kind.__module__.startswith("transformers."))
        config.__class__ = stock
        # Whisper's generation and pipelines read the family from the config object. Saving reads it from the class,
        # which keeps its own name, so that a converted model is never loaded with exact attention.
        config.model_type = stock.model_type
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # the stock class follows in the MRO
        finally:
            config.__class__ = converted
        if not config.approx or config.approx.get("format") != FORMAT:
            raise ApproxError(
                f"{type(self).__name__} needs a config whose field 'approx' has format {FORMAT}, not: {config.approx}. "
                "Load a folder that `approx convert` wrote, or convert the base checkpoint again.",
                Exit.UNAVAILABLE,
            )
        attach(self, config.approx["sites"])
        # Random features and learned maps need more than 16 bits; mechanisms cast their output instead. Each tensor is named,
        # because transformers would otherwise convert integers to float32 too.
        fixed = {name for name, t in self.state_dict().items() if ".mechanism." in name and t.is_floating_point()}
        keep_in_float32(self, fixed)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, and check that the mechanisms' tensors are usable.

        Raises:
            ApproxError: if tensors of a mechanism are missing, which transformers would leave uninitialised, or do not
                match its settings: wrong shape or dtype, NaN or infinity, or integers out of range.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO
        lost = sorted(name for name in info["missing_keys"] if ".mechanism." in name)
        if lost:
            raise ApproxError(
                f"The checkpoint lacks {len(lost)} tensors of its attention mechanisms, e.g. {lost[0]}. "
                "It was saved incompletely; convert the base checkpoint again.",
                Exit.UNAVAILABLE,
            )
        for name, module in model.named_modules():
            if isinstance(module, Mechanism) and not isinstance(module, HeadGroups) and (why := unusable_state(module)):
                raise ApproxError(
                    f"The checkpoint is damaged: {name}.{why}. Convert the base checkpoint again.", Exit.UNAVAILABLE
                )
        # A reverted model is saved in its family's layout, not in that of this folder's files.
        forget_file_layout(model)
        return (model, info) if wants_info else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the stock class."""
        # `model.compile()` starts the graph inside this call, so it must be prepared for here.
        if (unreadable() or is_compiled_in_place(self)) and self._causal():
            kwargs = _with_mask(args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO

    @assume_constant_result
    def _causal(self) -> bool:
        return any(module.causal for module in self.modules() if isinstance(module, Mechanism))

    def approximates(self, positions: int, widest: int) -> bool:
        """Whether any layer is not exact on an input of this length.

        Args:
            positions: Positions of the input in attention, without padding.
            widest: Positions of the longest input in the batch, to compare with `exact_below`.
        """
        return any(
            widest >= mechanism.exact_below and start is not None and positions >= start
            for mechanism in self._mechanisms()
            for start in (mechanism.differs_from(),)
        )

    def _mechanisms(self) -> list[Mechanism]:
        return [each for each in self.modules() if isinstance(each, Mechanism) and not isinstance(each, HeadGroups)]

    def approximated_pairs(self, positions: int, widest: int) -> float:
        """The share of the pairs of tokens whose weight is not exact, in the heads whose attention can differ from it.

        The arguments are those of `approximates`.
        """
        able = [each for each in self._mechanisms() if each.differs_from() is not None]
        shares = (each.heads * each.approximated_pairs(positions) for each in able if widest >= each.exact_below)
        return sum(shares) / max(sum(each.heads for each in able), 1)

    def attention_penalty(self) -> Tensor:
        """The sum of the mechanisms' penalties, such as their spans, as a scalar; 0 if there are none.

        Training adds it to its loss, times a weight.
        """
        wanted = (module.penalty() for module in self.modules() if isinstance(module, Mechanism))
        return sum((each for each in wanted if each is not None), torch.zeros(()))

    def step_attention(self, step: int) -> None:
        """Notify the mechanisms of a finished training step, counted from 1: some redraw their random state."""
        for module in self.modules():
            if isinstance(module, Mechanism):
                module.after_step(step)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save as transformers does, in the layout that converted classes load, with the code and the manifest.

        Raises:
            ApproxError: if `push_to_hub` is set: only a complete folder is pushed.
        """
        if kwargs.pop("push_to_hub", False):
            raise ApproxError(
                "push_to_hub=True would upload this folder before it is complete. Save it, then call push_to_hub on the model."
            )
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, **kwargs)  # type: ignore[misc]  # the stock class follows in the MRO
        if is_main_process:
            self._write_code(Path(save_directory))
            seal_model(Path(save_directory))

    def _write_code(self, folder: Path) -> None:
        """Nothing to do: transformers already copied the code of remote classes."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refuse continuous batching, to which `generate_batch` and paged caches lead too, with an ApproxError."""
        raise ApproxError(
            "Continuous batching (generate_batch, a paged cache) lays several texts into one row, which converted layers cannot keep "
            "apart. Call generate() with the texts as one left-padded batch and its attention_mask, or `approx revert` the model.",
            Exit.UNSUPPORTED,
        )

    def _set_implementation_unguarded(self, implementation: str) -> None:
        super().set_attn_implementation(implementation)  # type: ignore[misc]  # the stock class follows in the MRO

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Allow only the seam's attention: any other would silently undo the conversion.

        Raises:
            ApproxError: for any other implementation.
        """
        if attn_implementation != IMPLEMENTATION:
            raise ApproxError(
                f"Attention implementation '{attn_implementation}' was requested, but this model is converted: the switch "
                "would silently remove its mechanisms. Use `approx revert` to get the base checkpoint back.",
                Exit.REFUSED,
            )
        self._set_implementation_unguarded(attn_implementation)


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with a mask of all real tokens, unless a mask, positions or a cache is given.

    Compiled code cannot check positions for packed sequences, so without a mask transformers assumes packing.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    said = [kwargs.get("attention_mask"), kwargs.get("position_ids"), cache_of(kwargs)]
    if len(args) > 1 or not isinstance(ids, Tensor) or any(each is not None for each in said):
        return kwargs
    return {**kwargs, "attention_mask": torch.ones_like(ids)}


def seal_model(folder: Path) -> None:
    """Write the manifest of weights, config and code only."""
    seal_files(folder, (path for pattern in _MODEL_FILES for path in folder.glob(pattern)))


def seal_files(folder: Path, files: Iterable[Path]) -> None:
    """Write the manifest of some files of a folder, the sha256 of each, last, so that an incomplete folder is detected."""
    manifest = folder / MANIFEST
    manifest.unlink(missing_ok=True)
    chosen = sorted(set(files) - {manifest})
    for path in chosen:
        flush(path)
    hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in chosen}
    manifest.write_text(json.dumps({"files": hashes}, indent=1) + "\n", encoding="utf-8")
    flush(manifest)
    flush(folder)


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or a folder's directory entry, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
