"""Train a checkpoint into a new folder, which gets its name only after the checks."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import (
    held,
    refuse_existing,
    refuse_overlap,
    refuse_unclaimed,
    refuse_unwritable,
    remove,
)
from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.foreign import carried
from approx.checkpoints.history import Training, trainings
from approx.checkpoints.integrity import weight_files
from approx.checkpoints.receipt import Check, Receipt, read_receipt
from approx.conversion import checks, clean_process, layer_error, writing
from approx.conversion.calibration_inputs import calibration_batch, calibration_length
from approx.conversion.companions import refuse_foreign
from approx.errors import ApproxError, Exit
from approx.evaluation import distributed
from approx.finetuning.estimate import estimate
from approx.finetuning.finetune import Healing, finetune, has_begun
from approx.finetuning.options import FinetuneStage
from approx.finetuning.phase import Progress
from approx.finetuning.preparation import prepare_training, refuse_sharding
from approx.seam.manifest import sha256
from approx.version import __version__
from approx_kernels.runtime.atomic_file import write_whole

_OUTCOME = "outcome.json"


class Written(BaseModel):
    """What a training came to, in its folder until that is removed, for the case that the process ends in between.

    Attributes:
        weights: Hashes of the weight files of its output.
        result: What `finetune_folder` returns.
    """

    model_config = ConfigDict(strict=True)

    weights: dict[str, str]
    result: dict[str, Any]


def finetune_folder(
    name: str | Path,
    out: Path,
    options: FinetuneStage,
    *,
    teacher: str | None = None,
    working: Path | None = None,
    resume: bool = False,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Train a checkpoint into a new folder, which gets its name only if every check passes.


    Args:
        name: A folder, a model id of the hub, or `quickstart`; converted or not.
        out: The folder to make.
        options: Options of the training.
        teacher: The exact model for `distill`; by default the checkpoint's own weights with exact attention.
        working: Folder for checkpoints during training; by default `out` with the suffix `.training`.
        resume: Whether to continue an unfinished training into `out`.
        force: Whether to replace an existing `out` and to start an unfinished training over.
        revision: Commit of the hub.
        offline: Whether only local files and the hub's cache may be used.
        merge_adapter: Whether an adapter of PEFT beside the weights, or one whose folder is given, is merged into them.
        device: Device to train on.
        progress: Called with the current activity, steps done and total steps.

    Returns:
        The outcome of the training as plain data, with the checks of the folder.

    Raises:
        ApproxError: if the checkpoint, an option or the data are refused, the budget is met already, the loss is not finite, or
            a check fails (exit code 6; the result is kept beside `out` with the suffix `.failed`).
    """
    refuse_sharding()
    out = Path(out)
    working = working or out.with_name(f"{out.name}.training")
    refuse_unclaimed(working, "training", "a training", has_begun)
    ended = resume and not force and (working / _OUTCOME).is_file()
    if not ended:
        refuse_existing(out, force=force)
    refuse_unwritable(out)
    # Another process would continue from the same checkpoints.
    with held(working) if distributed.leads() else nullcontext():
        written = distributed.agree(_written_before(out, working) if ended and distributed.leads() else None)
        if written is not None:
            return written.result
        refuse_existing(out, force=force)
        return _finetuned(
            name, out, options, teacher, working, resume, force, revision, offline, merge_adapter, device, progress
        )


def _written_before(out: Path, working: Path) -> Written | None:
    """The outcome of a training that has written its output already, and was killed before it removed its folder."""
    try:
        found = Written.model_validate_json((working / _OUTCOME).read_bytes())
    except (OSError, ValidationError):
        # Most trainings end before they write anything.
        return None
    if not out.is_dir() or found.weights != _hashes(out):
        return None
    remove(working, "training", _OUTCOME)
    return found


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in weight_files(folder)}


def _finetuned(
    name: str | Path, out: Path, options: FinetuneStage, teacher: str | None, working: Path, resume: bool, force: bool,
    revision: str | None, offline: bool, merge_adapter: bool, device: str, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    opened, taught = _opened(name, teacher, options, revision, offline, merge_adapter, device)
    refuse_overlap(opened.source.folder, out)
    reader = checkpoint.processor(opened.source)
    if taught is not None:
        _same_tokenizer(opened, taught)
    done = finetune(
        opened.model, reader, options, folder=working, teacher=None if taught is None else taught.model,
        resume=resume, restart=force and not resume, progress=progress,
    )  # fmt: skip

    def result(results: list[Check]) -> dict[str, Any]:
        notes = [*opened.notes, *done.notes]
        return {"output": str(out), **done.to_data(), "checks": [vars(check) for check in results], "notes": notes}

    results: list[Check] = []
    if distributed.leads():

        def keep(folder: Path, results: list[Check]) -> None:
            made = Written(weights=_hashes(folder), result=json.loads(json.dumps(result(results))))
            write_whole(working / _OUTCOME, made.model_dump_json())

        results = _written(opened, out, options, done, taught, keep, force=force, progress=progress)
        remove(working, "training", _OUTCOME)
    return result(results)


def rehearse(
    name: str | Path,
    options: FinetuneStage,
    *,
    teacher: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Report what `finetune_folder` would do, with time and memory from one step of each mode; nothing is written.

    Args and errors: as for `finetune_folder`.
    """
    refuse_sharding()
    opened, taught = _opened(name, teacher, options, revision, offline, merge_adapter, device)
    reader = checkpoint.processor(opened.source)
    prepared = prepare_training(opened.model, reader, options, None if taught is None else taught.model)
    return {
        "name": opened.source.name,
        "examples": len(prepared.data.split.examples),
        "held_out": len(prepared.data.held_out.examples),
        "measure": prepared.measure.name,
        "phases": [estimate(opened.model, phase, prepared, options) for phase in prepared.phases],
        "approximated": prepared.approximated,
        "notes": [*opened.notes, *prepared.notes],
    }


def _opened(
    name: str | Path,
    teacher: str | None,
    options: FinetuneStage,
    revision: str | None,
    offline: bool,
    merge_adapter: bool,
    device: str,
) -> tuple[Checkpoint, Checkpoint | None]:
    clean_process.begin()
    opened = checkpoint.load(name, revision=revision, offline=offline, merge_adapter=merge_adapter, device=device)
    # Before the training, not when its result is written.
    refuse_foreign(opened.source, carried(opened.source.config))
    record = opened.source.raw.get("approx") or {}
    if teacher is None:
        if "distill" in (options.recover or []) and trainings(record):
            raise ApproxError(
                f"The weights of {name} were trained since they were converted, so with exact attention they are not the base. "
                "Name it with --teacher.",
            )
        return opened, None
    if "distill" not in (options.recover or []):
        raise ApproxError("--teacher has an effect only with the mode 'distill'. Add it to --recover, or leave it out.")
    taught = checkpoint.load(teacher, offline=offline, merge_adapter=merge_adapter, device=device)
    if taught.source.converted or taught.source.stock_class is not opened.source.stock_class:
        raise ApproxError(
            f"The teacher {teacher} is a {type(taught.model).__name__}; it has to be an exact "
            f"{opened.source.stock_class.__name__}, such as the checkpoint that {name} was converted from.",
            Exit.UNSUPPORTED,
        )
    return opened, taught


def _same_tokenizer(opened: Checkpoint, taught: Checkpoint) -> None:
    own, other = checkpoint.processor(opened.source), checkpoint.processor(taught.source)
    vocabularies = [getattr(each, "get_vocab", dict)() for each in (own, other)]
    if vocabularies[0] != vocabularies[1]:
        raise ApproxError(
            f"The tokenizer of {opened.source.name} and that of the teacher {taught.source.name} differ, so the two read "
            "different tokens. Take the checkpoint that was converted as the teacher."
        )


def _written(
    opened: Checkpoint,
    out: Path,
    options: FinetuneStage,
    done: Healing,
    taught: Checkpoint | None,
    keep: Callable[[Path, list[Check]], None],
    *,
    force: bool,
    progress: Progress,
) -> list[Check]:
    model = opened.model.to("cpu")
    state = dict(model.state_dict())
    receipt: Receipt | None = None
    results: list[Check] = []
    written = {"comparing the weights": lambda folder: checks.weights(folder, state, "trained")}

    def say(what: str) -> None:
        progress(what, 0, 1)

    if opened.source.converted:
        receipt = read_receipt(opened.source.folder)
        say("checking padding and causality")
        results = [checks.padding(model), checks.causality(model)]
        _remember(opened, options, done, taught)
        if receipt is not None:
            batch = calibration_batch(opened.source, model, calibration_length(model), None)
            receipt.lost(layer_error.layer_damage(model, batch.inputs), batch.told)
        written["reloading in a fresh process"] = lambda folder: checks.fresh_process(folder, model)
    return writing.write_checked(
        out, opened, written, what=f"The training of {opened.source.name}", earlier=results, receipt=receipt, force=force,
        passed=keep, progress=say,
    )  # fmt: skip


def _remember(opened: Checkpoint, options: FinetuneStage, done: Healing, taught: Checkpoint | None) -> None:
    step = Training(
        approx=__version__,
        base=writing.named_base(opened),
        recover=done.recover,
        task=options.task,
        data_sha256=done.data_sha256,
        examples=done.examples,
        held_out=done.held_out,
        steps=done.steps,
        seconds=sum(phase.seconds for phase in done.phases),
        seed=options.seed,
        teacher=None if taught is None else writing.named_base(taught),
        measure=done.measure,
        exact=done.exact,
        before=done.before,
        after=done.after,
        # Paths may be private.
        options={name: value for name, value in done.options.items() if name not in ("data", "text")},
    )
    record = opened.model.config.approx
    record["history"] = [*record.get("history", []), step.model_dump()]
