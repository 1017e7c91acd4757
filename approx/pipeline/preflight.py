"""Find mistakes in a recipe and its data before any work, in seconds instead of minutes."""

import os
from collections.abc import Sequence
from pathlib import Path

from approx.checkpoints import checkpoint
from approx.conversion.calibration_inputs import CalibrationFile
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, prepare
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.evaluation.prediction_cache import fingerprint
from approx.finetuning.data import overlap
from approx.finetuning.options import FinetuneStage
from approx.measuring.identity import examples_read
from approx.measuring.measure import choose_device, task_of
from approx.measuring.products import refuse
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.plan import Plan
from approx.pushing.permission import refuse_bad_words
from approx.recipe import BASE, Recipe
from approx.tasks import open_task
from approx.tasks.table import is_hub

# Public data sets repeat a few short texts in both of their splits.
_REPEATED = 0.02


def check(recipe: Recipe, *, offline: bool) -> dict[str, Plan]:
    """Check a recipe against its checkpoint, without reading weights.

    Args:
        recipe: The recipe, with the mistakes that reading it revealed.
        offline: Whether to use only local files and the hub's cache.

    Returns:
        Name of each variant -> its plan.

    Raises:
        ApproxError: with all mistakes, one per line; the exit code is their lowest.
    """
    errors = [ApproxError(mistake) for mistake in recipe.mistakes]
    facts: Anatomy | None = None
    plans: dict[str, Plan] = {}
    try:
        # Without a checkpoint, its absence is already among the mistakes.
        facts = _facts(recipe, offline) if recipe.checkpoint else None
    except ApproxError as error:
        errors += _at(recipe.at("checkpoint"), error)
    for name, rules in recipe.variants.items():
        plans[name] = Plan(tuple(rules))
        if facts is not None:
            try:
                plans[name].resolve(facts)
            except ApproxError as error:
                errors += _at(recipe.at("variants", name) + f"Variant '{name}': ", error)
    try:
        device = choose_device(recipe.device)
        if any(stage.fast_products for stage in (*recipe.evaluate, *recipe.bench)):
            refuse(device, "float32" if recipe.dtype == "auto" else recipe.dtype)
    except ApproxError as error:
        errors.append(error)
    for number, stage in enumerate(recipe.evaluate):
        errors += [one for error in _task_mistakes(stage) for one in _at(recipe.at("evaluate", number), error)]
    for number, heal in enumerate(recipe.heal):
        errors += [one for error in _training_mistakes(heal) for one in _at(recipe.at("heal", number), error)]
    for number, push in enumerate(recipe.push):
        try:
            refuse_bad_words(push.repo, push.revision, push.message)
        except ApproxError as error:
            errors += _at(recipe.at("push", number) + "Push: ", error)
    for number, stage in enumerate(recipe.bench):
        errors += [one for error in _length_mistakes(stage, facts) for one in _at(recipe.at("bench", number), error)]
    if errors:
        raise ApproxError("\n".join(map(str, errors)), min(error.exit_code for error in errors))
    return plans


def rehearse(base: checkpoint.Checkpoint, stage: EvaluateStage) -> str:
    """Check that a checkpoint fits a task and its data, without running it.

    Returns:
        A hash of the loaded examples and their tokens.

    Raises:
        ApproxError: if head, labels, data, tokenizer or lengths do not fit.
    """
    task = task_of(stage)
    task.check(base.model)
    split = task.load(
        None if stage.data is None else Path(stage.data), stage.split, stage.limit, streaming=stage.streaming
    )
    subject = Subject(BASE, base.model, checkpoint.processor(base.source))
    prepared = prepare(
        [subject], task, split, batch_size=stage.inputs_per_batch, max_length=stage.max_length, truncate=stage.truncate
    )
    return fingerprint(examples_read(task, split), prepared.encodings)


def refuse_trained_on(heals: Sequence[FinetuneStage], stage: EvaluateStage) -> None:
    """Refuse an evaluation on training examples.

    Raises:
        ApproxError: if the evaluation and a training share examples.
    """
    if not heals:
        return
    split = task_of(stage).load(
        None if stage.data is None else Path(stage.data), stage.split, stage.limit, streaming=stage.streaming
    )
    files = {Path(file).resolve() for heal in heals for file in heal.text or []}
    if stage.data is not None and Path(stage.data).resolve() in files:
        raise ApproxError(
            f"{stage.data} is trained on by 'heal', so its score would say nothing. Evaluate on another file.",
            Exit.REFUSED,
        )
    for heal in heals:
        if (shared := overlap(heal, split.examples)) > _REPEATED * len(split.examples):
            raise ApproxError(
                f"{shared} of the {len(split.examples)} examples that {stage.task} is evaluated on are trained on by 'heal', so their "
                "score would say nothing. Train on another split or on other settings of the task.",
                Exit.REFUSED,
            )


def _training_mistakes(heal: FinetuneStage) -> list[ApproxError]:
    errors = []
    if (heal.task is None) == (heal.text is None):
        errors.append(ApproxError("Heal: give either 'task' or 'text', whose examples are trained on."))
    try:
        if heal.task is not None:
            open_task(heal.task, **heal.settings)
    except ApproxError as error:
        errors.append(error)
    for path in [*([heal.data] if heal.data else []), *(heal.text or [])]:
        if not is_hub(path) and not os.path.exists(path):
            text = f"Heal: {path} does not exist. Fix the path in the recipe, or replace it with --data."
            errors.append(ApproxError(text + _from_where(path), Exit.UNAVAILABLE))
    return errors


def _at(place: str, error: ApproxError) -> list[ApproxError]:
    """One error per line of an error, with the place in front."""
    return [ApproxError(f"{place}{line}", error.exit_code) for line in str(error).splitlines()]


def _facts(recipe: Recipe, offline: bool) -> Anatomy:
    try:
        source = checkpoint.locate(
            recipe.checkpoint, revision=recipe.revision, offline=offline, merge_adapter=recipe.merge_adapter
        )
    except ApproxError as error:
        hint = f" Replace it with --checkpoint.{_from_where(recipe.checkpoint)}" if recipe.checkpoint[:1] == "." else ""
        raise ApproxError(f"Checkpoint: {error}{hint}", error.exit_code) from None
    if source.converted:
        raise ApproxError(
            f"Checkpoint: {recipe.checkpoint} is converted already. A recipe starts from a base checkpoint.",
            Exit.REFUSED,
        )
    if recipe.calibrate is not None:
        try:
            CalibrationFile.read(Path(recipe.calibrate), source.stock_class.main_input_name)
        except ApproxError as error:
            hint = "" if os.path.exists(recipe.calibrate) else _from_where(recipe.calibrate)
            raise ApproxError(f"Calibrate: {error}{hint}", error.exit_code) from None
    return anatomy(source.config, source.stock_class)


def _task_mistakes(stage: EvaluateStage) -> list[ApproxError]:
    errors = []
    try:
        task_of(stage)
    except ApproxError as error:
        errors.append(error)
    if stage.data is not None and not is_hub(stage.data) and not os.path.exists(stage.data):
        text = f"Data {stage.data} of task {stage.task} does not exist. Fix the path in the recipe, or replace it with --data."
        errors.append(ApproxError(text + _from_where(stage.data), Exit.UNAVAILABLE))
    return errors


def _length_mistakes(stage: BenchStage, facts: Anatomy | None) -> list[ApproxError]:
    if facts is None or facts.positions is None or max(stage.lengths) <= max(facts.positions, stage.max_length or 0):
        return []
    return [
        ApproxError(
            f"Bench: length {max(stage.lengths)} is too long: {facts.architecture} takes {facts.positions} positions. "
            f"Use shorter lengths, or add 'max_length: {max(stage.lengths)}' to extend the positions for timing."
        )
    ]


def _from_where(path: str) -> str:
    return "" if Path(path).is_absolute() else f" Paths in a recipe are relative to the current folder, {Path.cwd()}."
