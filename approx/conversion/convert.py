"""Convert a checkpoint into a folder: load it, convert the model, check the result, and only then publish the folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import refuse_existing, refuse_overlap, refuse_unwritable
from approx.checkpoints.families import refuse_added
from approx.checkpoints.history import trainings
from approx.conversion import calibration, checks, clean_process, layer_error, surgery, writing
from approx.conversion.calibration_inputs import CalibrationFile, calibration_batch, calibration_length
from approx.conversion.companions import code_to_carry, refuse_foreign
from approx.conversion.separator import of_checkpoint, with_separator
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan


def convert(
    name: str | Path,
    out: Path,
    plan: Plan,
    *,
    max_length: int | None = None,
    calibrate: Path | None = None,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    merge_adapter: bool = False,
    bundle_kernels: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Convert a checkpoint into a new folder, verified before it is published.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        out: The folder to create.
        plan: The mechanism of each layer.
        max_length: Usable positions afterwards, in tokens, to extend the position table.
        calibrate: A text, or for speech a recording, to fit mechanisms and measure the error of each layer; by default
            `calibration_batch` chooses.
        force: Whether an existing `out` is replaced, once the new folder is complete.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        allow_pickle: Whether pickled weights are accepted.
        merge_adapter: Whether an adapter of PEFT beside the weights, or one whose folder is given, is merged into them.
        bundle_kernels: Whether the folder includes the C and Triton of its mechanisms instead of plain PyTorch.
        trust_remote_code: Whether the code of the checkpoint's own tokenizer or modules goes along; approx does not run it. A
            checkpoint of the hub needs `revision`, a commit.
        progress: Called with the name of each step.

    Returns:
        The receipt as plain data: the layers converted and left, the tensors added, the error of each layer, the checks.

    Raises:
        ApproxError: if the checkpoint, the plan or the calibration file is unusable, or a check fails (exit code 6; the result
            is kept beside `out` with the suffix `.failed`).
    """
    out = Path(out)
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    progress("reading the config")
    where: dict[str, Any] = {
        "revision": revision,
        "offline": offline,
        "allow_pickle": allow_pickle,
        "merge_adapter": merge_adapter,
    }
    source = checkpoint.locate(name, **where)
    refuse_overlap(source.folder, out)
    if source.converted:
        raise ApproxError(
            f"{name} is converted already. Revert it first, or convert its base checkpoint.", Exit.REFUSED
        )
    carried = code_to_carry(source, revision) if trust_remote_code else {}
    refuse_foreign(source, carried)
    plan = with_separator(plan, lambda: of_checkpoint(source))
    facts = anatomy(source.config, source.stock_class)
    plan.resolve(facts)
    refuse_added(rule.mechanism for rule in plan.rules)
    if max_length is not None:
        positions.extendable(source.config, facts.architecture, max_length)
    file = None if calibrate is None else CalibrationFile.read(calibrate, source.stock_class.main_input_name)
    progress("loading the weights")
    clean_process.begin()
    opened = checkpoint.load(name, **where)
    model = opened.model
    progress("checking the exact limit")
    results = [checks.exact_limit(model, plan)]
    reference = dict(model.state_dict())
    progress("replacing attention")
    receipt = surgery.exchange(model, plan, max_length=max_length, bundle_kernels=bundle_kernels)
    length = calibration_length(model)
    batch = calibration_batch(source, model, length, file)
    calibration.calibrate(model, batch.inputs)
    model.config.approx["history"] = [
        writing.conversion_step(opened, plan.to_data(), max_length, file, length, carried).model_dump()
    ]
    progress("checking padding and causality")
    results += [checks.padding(model), checks.causality(model)]
    receipt.lost(layer_error.layer_damage(model, batch.inputs), batch.told)
    receipt.warnings += layer_error.unseen(model, receipt.measured_at or {})
    written_checks = {
        "comparing the weights": lambda folder: checks.weights(folder, reference),
        "reloading in a fresh process": lambda folder: checks.fresh_process(folder, model),
    }
    writing.write_checked(
        out,
        opened,
        written_checks,
        what=f"The conversion of {name}",
        earlier=results,
        receipt=receipt,
        max_length=max_length,
        force=force,
        progress=progress,
    )
    return {**receipt.model_dump(), "notes": opened.notes}


def revert(name: str | Path, out: Path, *, force: bool = False) -> None:
    """Write the base checkpoint of a converted folder: the same tensors, without the mechanisms.

    Args:
        name: The converted folder.
        out: The folder to make.
        force: Whether an existing `out` is replaced, and weights that were trained after the conversion are written too.

    Raises:
        ApproxError: if `name` is not a converted checkpoint or was trained, or `out` exists.
    """
    out = Path(out)
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    opened = checkpoint.load(name, offline=True)
    refuse_overlap(opened.source.folder, out)
    if not opened.source.converted:
        raise ApproxError(f"{name} is not a converted checkpoint, so there is nothing to revert.", Exit.REFUSED)
    if (trained := trainings(opened.model.config.approx)) and not force:
        raise ApproxError(
            f"The weights of {name} were trained after its conversion ({', '.join(','.join(one.recover) for one in trained)}), so they "
            "are not those of its base. Write them with exact attention all the same with --force, or take the base itself.",
            Exit.REFUSED,
        )
    was_extended = opened.model.config.approx["base"]["positions"] is not None
    surgery.revert(opened.model)
    limit = positions.limit(opened.model.config) if was_extended else None
    what = f"The reversion of {name}"
    # A base is an ordinary checkpoint, without our manifest.
    writing.write_checked(out, opened, {}, what=what, max_length=limit, force=force, sealed=False)
