"""Write a converted checkpoint: an ordinary folder that stock transformers loads, with code, model card and receipt."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from approx.checkpoints import families, foreign
from approx.checkpoints.atomic_folder import atomic_folder, keep_failed
from approx.checkpoints.checkpoint import Checkpoint, processor
from approx.checkpoints.history import Base, CalibrationText, Conversion
from approx.checkpoints.receipt import RECEIPT, Check, Receipt
from approx.conversion.calibration_inputs import CalibrationFile
from approx.conversion.card import write_card
from approx.conversion.companions import change, copy_companions, forget_code, set_longest, settings
from approx.conversion.stored import keep_dtypes
from approx.errors import ApproxError, Exit
from approx.version import __version__

# Settings of a feature extractor that name its class.
_CLASSES = {"feature_extractor_type", "image_processor_type"}


def write_checked(
    out: Path,
    checkpoint: Checkpoint,
    checks: Mapping[str, Callable[[Path], Check]],
    *,
    what: str,
    earlier: Sequence[Check] = (),
    receipt: Receipt | None = None,
    max_length: int | None = None,
    force: bool = False,
    sealed: bool = True,
    passed: Callable[[Path, list[Check]], None] = lambda folder, results: None,
    progress: Callable[[str], None] = lambda step: None,
) -> list[Check]:
    """Write a checkpoint into a new folder, which is published only if every check passes.

    Args:
        out: The folder to create.
        checkpoint: The checkpoint, with its model in the state to save.
        checks: Name of a step -> a check of the written folder, in order.
        what: Description of the work for the error, such as "The conversion of bert".
        earlier: Results of checks that ran before writing; they count as well.
        receipt: Receipt of a conversion; the folder then gets it and a model card.
        max_length: The tokenizer's maximum length in tokens, if the positions changed.
        force: Whether an existing `out` is replaced, once the new folder is complete.
        sealed: Whether the folder gets a manifest.
        passed: Called with the folder and the results once every check has passed, before the folder gets its name.
        progress: Called with the name of each step.

    Returns:
        The results of all checks, the earlier ones first.

    Raises:
        ApproxError: if a check fails (exit code 6; the result is kept beside `out` with the suffix `.failed`), or the folder
            cannot be written.
    """
    with atomic_folder(out, force=force, sealed=sealed) as folder:
        progress("writing")
        write(folder, checkpoint, max_length)
        results = list(earlier)
        for step, check in checks.items():
            progress(step)
            results.append(check(folder))
        if receipt is not None:
            receipt.checks = results
            (folder / RECEIPT).write_text(json.dumps(receipt.model_dump(), indent=1) + "\n", encoding="utf-8")
            checkpoint.notes += write_card(folder, checkpoint, receipt)
        if failed := [check for check in results if check.passed is False]:
            kept = keep_failed(folder, out)
            details = "; ".join(f"{check.name}: {check.detail}" for check in failed)
            raise ApproxError(
                f"{what} did not pass its checks ({details}). Nothing was written to {out}; the result is kept as {kept} "
                "for inspection.",
                Exit.VERIFICATION,
            )
        passed(folder, results)
    return results


def write(folder: Path, checkpoint: Checkpoint, max_length: int | None = None) -> None:
    """Write model, processor files and code of a checkpoint into an empty folder.

    Args:
        folder: The target; usually the temporary one of `atomic_folder`.
        checkpoint: The checkpoint, with its model in the state to save, converted or reverted.
        max_length: The tokenizer's maximum length in tokens, if the positions changed.
    """
    carried = foreign.carried(checkpoint.model.config) or foreign.carried(checkpoint.source.config)
    checkpoint.notes += copy_companions(checkpoint.source, folder, carried)
    if not checkpoint.source.converted:
        # A checkpoint may have no processor.
        with suppress(ApproxError):
            _name_classes(folder, processor(checkpoint.source))
    checkpoint.model.save_pretrained(folder)
    forget_code(folder, but="auto_map" if families.is_converted(checkpoint.model) else "")
    keep_dtypes(checkpoint.source.folder, folder)
    if max_length is not None:
        set_longest(folder, max_length)


def _name_classes(folder: Path, processor: Any) -> None:
    """Name the classes in the settings of a processor, since a converted config's model type does not imply them."""
    whole = {"processor_class": type(processor).__name__} if isinstance(processor, ProcessorMixin) else {}
    for part in ("tokenizer", "feature_extractor", "image_processor") if whole else (None,):
        read = getattr(processor, part, None) if part else processor
        if isinstance(read, PreTrainedTokenizerBase):
            path, named = folder / "tokenizer_config.json", {"tokenizer_class": type(read).__name__}
        elif (path := folder / "preprocessor_config.json").is_file() and read is not None:
            named = {key: name for key, name in read.to_dict().items() if key in _CLASSES}
        else:
            continue
        change(path, {**named, **whole, **settings(path)})


def conversion_step(
    checkpoint: Checkpoint,
    plan: list[dict[str, Any]],
    max_length: int | None,
    file: CalibrationFile | None,
    calibration_length: int,
    carried: Mapping[str, str],
) -> Conversion:
    """What this conversion appends to the history of the checkpoint."""
    return Conversion(
        approx=__version__,
        base=named_base(checkpoint),
        plan=plan,
        max_length=max_length,
        calibration=None if file is None else CalibrationText(name=file.name, sha256=file.sha256),
        calibration_length=calibration_length,
        carried=dict(carried),
    )


def named_base(checkpoint: Checkpoint) -> Base:
    """A checkpoint as histories name it."""
    source = checkpoint.source
    place = source.folder if source.adapter is None else source.adapter.folder
    return Base(
        # The path of a local folder may be private; the hash identifies the weights.
        name=source.name if source.revision else place.resolve().name,
        revision=source.revision,
        weights_sha256=checkpoint.weights_sha256,
        adapter=None if source.adapter is None else source.adapter.kind,
    )
