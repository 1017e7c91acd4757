"""Run a recipe: check it before anything is computed, then convert every variant, heal, search, evaluate, bench, report and push."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import CLAIM, atomic_folder, claim, locked_output, refuse_unclaimed, remove
from approx.checkpoints.checkpoint import Checkpoint
from approx.conversion import convert
from approx.conversion.calibration import CalibrationFile
from approx.conversion.surgery import answers_questions, of_checkpoint, with_separator
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.evaluate import Subject, fingerprint, prepare
from approx.evaluation.options import BASE, BenchStage, EvaluateStage
from approx.evaluation.record import RecipeText, Record, Trained
from approx.finetuning.finetune import BudgetMetError, finetune_folder
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import digest_of, overlap
from approx.grid import Grid
from approx.measuring.measure import (
    choose_device,
    code,
    companions_sha256,
    computed_by,
    examples_read,
    identity,
    make_record,
    measure_quality,
    measure_speed,
    open_all,
    task_of,
)
from approx.measuring.products import refuse
from approx.measuring.quantised import refuse_quantising
from approx.pipeline.store import Here, Outcome, Stage, Store, complete, stage_key
from approx.planning.anatomy import Anatomy, anatomy
from approx.planning.plan import Plan
from approx.progress import Progress, silent
from approx.publishing.report import write_report
from approx.pushing.options import PushStage
from approx.pushing.push import NotPushed, Pushed, push
from approx.pushing.remote import check_permission, endpoint, refuse_bad_words, stated
from approx.recipe import HEALED, TRAINED, Recipe, slug
from approx.searching.options import SearchStage
from approx.searching.outcome import Searched
from approx.searching.search import FITTED, MEASURED, SENSITIVITIES, Search
from approx.tasks import open_task
from approx.tasks.table import is_hub
from approx_kernels.runtime.atomic_file import write_whole

OUTCOME, BEST = "search.json", "best.yaml"


def folder_of(plan: Path) -> Path:
    """The folder next to a plan for the measurements of its search: `plan.yaml` -> `plan-search`."""
    return plan.with_name(f"{plan.stem}-search")


def search(
    base: Checkpoint,
    stage: SearchStage,
    plan: Path | None,
    *,
    folder: Path,
    sensitivities: Path | None = None,
    resume: bool = False,
    force: bool = False,
    seed: int = 0,
    command: str = "",
    progress: Progress = silent,
) -> Searched:
    """Search, and write the plan, `search.json`, the record and the report.

    After Ctrl-C the plan is the best one so far, and a comment in it says that it is not proven.

    Args:
        base: The exact checkpoint.
        stage: The options.
        plan: File for the plan; None writes none. It is not written if nothing fits what was asked for.
        folder: Folder for everything else.
        sensitivities: File of an earlier search of the same model, candidates and examples.
        resume: Go on with an earlier search in the folder.
        force: Start over, and replace an earlier search.
        seed: Seed of everything random.
        command: The command as typed, for the record.
        progress: Called with what happens, done and total.

    Raises:
        ApproxError: if an output exists or another process writes it, the options contradict each other or do not fit
            the model, or no plan could be as fast as asked.
    """
    with locked_output(folder):
        _refuse_search(plan, folder, resume=resume, force=force)
        if sensitivities is not None and not sensitivities.is_file():
            raise ApproxError(
                f"{sensitivities} does not exist. Leave it out, and sensitivities are measured.", Exit.UNAVAILABLE
            )
        running = Search(base, stage, folder, resume=resume, seed=seed, progress=progress)
        if sensitivities is not None:
            running.know(sensitivities)
        claim(folder, "search", "a search", _search_begun)
        if not resume:
            remove(folder, "search")
            claim(folder, "search", "a search")
        for leftover in folder.rglob(".*.tmp"):
            # Killed processes leave these files, and the whole folder is ours.
            leftover.unlink(missing_ok=True)
        try:
            found = running.run()
        finally:
            if [path.name for path in folder.iterdir()] == [CLAIM]:
                remove(folder, "search")
        claim(folder, "search", "a search")
        write_whole(folder / OUTCOME, json.dumps(found.to_data(), indent=1, ensure_ascii=False) + "\n")
        usable = found.feasible or found.interrupted
        for file, wanted in ((plan, usable), (folder / BEST, not usable)):
            if file is not None and wanted and found.plan is not None:
                # Via a temporary file in the folder, so a killed process leaves none next to the plan.
                write_whole(file, found.to_yaml(), within=folder)
            elif file is not None:
                # A plan of an earlier search must not pass for this one's.
                file.unlink(missing_ok=True)
        if found.speed is not None:
            made = make_record(
                {BASE: base, **found.models},
                title=f"Search: {found.goal}",
                notice=found.summary,
                seed=seed,
                command=command,
                quality=[found.quality] if found.quality is not None else [],
                speed=[found.speed],
            )
            checked = [one.model_copy(update={"verified": found.verified[one.name]}) for one in made.variants]
            made = made.model_copy(update={"variants": checked})
            record.save(folder / "record.json", made)
            write_report([made], folder / "report")
        return found


def _refuse_search(plan: Path | None, folder: Path, *, resume: bool, force: bool) -> None:
    refuse_unclaimed(folder, "search", "a search", _search_begun)
    begun = folder.is_dir() and any(folder.iterdir())
    # Without an earlier search there is nothing to resume, so the plan is not ours.
    if plan is not None and plan.exists() and not (plan.is_file() and (force or (resume and begun))):
        how = "Choose another name, or replace it with --force." if plan.is_file() else "Choose another name."
        raise ApproxError(f"{plan} exists. {how}", Exit.REFUSED)
    if begun and not (resume or force):
        raise ApproxError(
            f"{folder} holds an earlier search. Go on with it with --resume, or start over with --force.", Exit.REFUSED
        )


def _search_begun(folder: Path) -> bool:
    """Whether a folder holds a search of an earlier version, which did not mark its folders."""
    names = {SENSITIVITIES, MEASURED, FITTED, OUTCOME, BEST, "record.json", "report"}
    try:
        data = json.loads((folder / SENSITIVITIES).read_bytes())
        return {*data} == {"schema", "about", "damages"} and {path.name for path in folder.iterdir()} <= names
    except (OSError, ValueError, TypeError, RecursionError):
        return False


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
        # A missing checkpoint is already among the mistakes.
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
        if recipe.quantize is not None:
            refuse_quantising(recipe.quantize, recipe.device)
        if any(stage.fast_products for stage in (*recipe.evaluate, *recipe.bench)):
            refuse(device, "float32" if recipe.dtype == "auto" else recipe.dtype)
    except ApproxError as error:
        errors.append(error)
    for number, stage in enumerate(recipe.evaluate):
        errors += [one for error in _task_mistakes(stage) for one in _at(recipe.at("evaluate", number), error)]
    for number, heal in enumerate(recipe.heal):
        errors += [one for error in _training_mistakes(heal) for one in _at(recipe.at("heal", number), error)]
    for number, wanted in enumerate(recipe.push):
        try:
            refuse_bad_words(wanted.repo, wanted.revision, wanted.message)
        except ApproxError as error:
            errors += _at(recipe.at("push", number) + "Push: ", error)
    for number, stage in enumerate(recipe.bench):
        errors += [one for error in _length_mistakes(stage, facts) for one in _at(recipe.at("bench", number), error)]
    if errors:
        raise ApproxError("\n".join(map(str, errors)), min(error.exit_code for error in errors))
    return plans


def check_task(base: checkpoint.Checkpoint, stage: EvaluateStage) -> str:
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
    split = task.at_least(task.labelled(split), subject.processor, stage.min_length)
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
                f"{shared} of the {len(split.examples)} examples that {stage.task} is evaluated on are trained on by "
                "'heal', so their score would say nothing. Train on another split or on other settings of the task.",
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


# Label of a converted folder -> the stage that makes it.
Conversions = Mapping[str, Stage]


class Study:
    """One checkpoint with the stages of a recipe or grid; the base is loaded and the data are read, since the keys depend on them.

    Args:
        asked: The recipe or grid.
        checkpoint: Name of the base.
        out: Folder of the run or sweep.
        offline: Whether to use only local files and the hub's cache.
        command: The command, for the records.
        progress: Called with a stage's activity, done and total; pickled if stages run in other processes.
        here: Whether outcomes hold only for this machine, because all stages run on it.

    Raises:
        ApproxError: if the base cannot be loaded, or a task does not fit it or its data.
    """

    def __init__(
        self,
        asked: Recipe | Grid,
        checkpoint: str,
        out: Path,
        *,
        offline: bool,
        command: str,
        progress: Progress = silent,
        here: bool = False,
    ) -> None:
        self.asked, self.checkpoint, self.out, self.store = asked, checkpoint, out, Store(out)
        self._where = {"revision": asked.revision, "offline": offline, "merge_adapter": asked.merge_adapter}
        self._command, self._progress = command, progress
        self._opened: dict[str, Checkpoint] = {}
        base = self.open()[BASE]
        for task in asked.evaluate:
            refuse_trained_on(asked.heal, task)
        self._data = [check_task(base, task) for task in asked.evaluate]
        # Weights, config, dtype, versions and code are in the identity.
        self._about = (
            identity(base),
            companions_sha256(base.source.folder),
            asked.device,
            asked.dtype,
            asked.seed,
            *((_machine(), computed_by(base.model.device)) if here else ()),
        )

    def open(self, conversions: Conversions | None = None) -> dict[str, Checkpoint]:
        """The base and the converted checkpoints, by label; each is loaded once per process.

        Raises:
            ApproxError: if a checkpoint cannot be loaded.
        """
        names = {BASE: self.checkpoint, **{label: str(one.product) for label, one in (conversions or {}).items()}}
        for label, name in names.items():
            if name not in self._opened:
                where = self._where if label == BASE else {}
                asked = self.asked
                self._opened |= open_all({name: name}, asked.device, asked.dtype, quantize=asked.quantize, **where)
        return {label: self._opened[name] for label, name in names.items()}

    def close(self) -> None:
        """Drop the loaded models, before stages are sent to other processes."""
        self._opened.clear()

    def record(self, conversions: Conversions, **more: Any) -> Record:
        """A record of measurements; the keywords are those of `make_record`."""
        about = {"title": self.asked.title, "notice": self.asked.notice, "seed": self.asked.seed}
        return make_record(self.open(conversions), command=self._command, **about, **more)

    def search(self, searches: Mapping[str, SearchStage], out: Path) -> dict[str, Plan]:
        """Search the plans of variants, each in a folder of its own; a finished search is read.

        Raises:
            ApproxError: if a search finds nothing (exit code 7).
        """
        plans = {}
        # Models are converted and timed in float weights, also where the results are measured in int8.
        base = self.open()[BASE]
        if self.asked.quantize is not None:
            base = open_all({BASE: self.checkpoint}, self.asked.device, self.asked.dtype, **self._where)[BASE]
        for name, asked in searches.items():
            file = out / f"{slug(name)}.yaml"
            if not file.is_file():
                found = search(
                    base,
                    asked,
                    file,
                    folder=folder_of(file),
                    resume=True,
                    seed=self.asked.seed,
                    command=self._command,
                    progress=self._progress,
                )
                if found.interrupted:
                    file.unlink()
                    raise KeyboardInterrupt
                if not found.feasible:
                    raise ApproxError(f"The search for '{name}': {found.summary}", Exit.THRESHOLD)
            plans[name] = Plan.read(file)
        return plans

    def convert(self, plan: Plan, label: str, place: Path | None = None) -> Stage:
        """The stage that converts by a plan, into `place` or a folder named by its key."""
        source = self.open()[BASE].source
        plan = with_separator(plan, lambda: of_checkpoint(source), answers=answers_questions(source.stock_class))
        calibration = self.asked.calibrate if isinstance(self.asked, Recipe) else None
        file = None if calibration is None else Path(calibration)
        text = None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
        key = stage_key("convert", *self._about, plan.to_data(), text, place and place.name)
        folder = place or self.out / "converted" / key[:16]
        make = partial(self._convert, plan, label, folder, file, place is not None)
        return Stage(f"convert {label}", key, make, product=folder, noun="conversion")

    def heal(self, training: FinetuneStage, label: str, source: Stage | None, place: Path | None = None) -> Stage:
        """The training of a converted folder, or of the base, into a folder named by its key or into `place`."""
        options = training.model_dump(mode="json", exclude={"report_to"})
        about = (*self._about, code(("finetuning",)))
        key = stage_key("heal", *about, source and source.key, options, digest_of(training), place and place.name)
        folder = place or self.out / "healed" / key[:16]
        make = partial(self._heal, training, label, source, folder, self.out / "training" / key[:16])
        inputs = () if source is None else (source,)
        return Stage(f"heal {label}", key, make, inputs, product=folder, noun="training")

    def evaluate(
        self, number: int, conversions: Conversions, place: Path | None = None, after: Sequence[Stage] = ()
    ) -> Stage:
        """The stage that compares converted folders with their base on a task, or scores only the base.

        Args:
            number: Number of the task.
            conversions: The conversions to compare; empty scores the base.
            place: File for the per-example outputs; by default next to the outcome.
            after: Stages whose stored outputs this one uses.
        """
        task = self.asked.evaluate[number]
        key = self._key("evaluate", conversions, {**task.model_dump(), "data": self._data[number]})
        outputs = place or self.store.folder / f"{key}.parquet"
        name, inputs = f"evaluate {_labels(conversions)} on {task.task}", (*conversions.values(), *after)
        return Stage(name, key, partial(self._evaluate, number, conversions, outputs), inputs, product=outputs)

    def bench(self, grid: BenchStage, conversions: Conversions) -> Stage:
        """The stage that times converted folders and their base, on the texts of the first task or on random tokens."""
        texts = self.asked.evaluate[0] if grid.inputs == "real" else None
        key = self._key("bench", conversions, texts and (self._data[0], texts.settings), grid.model_dump())
        name = f"bench {_labels(conversions)} at {', '.join(map(str, grid.lengths))} tokens"
        return Stage(name, key, partial(self._bench, grid, texts, conversions), tuple(conversions.values()), alone=True)

    def _key(self, kind: str, conversions: Conversions, *settings: Any) -> str:
        return stage_key(kind, *self._about, [one.key for one in conversions.values()], *settings)

    def _convert(self, plan: Plan, label: str, folder: Path, calibrate: Path | None, replace: bool) -> None:
        self._progress(f"convert to {label}", 0, 1)
        # A folder named by its key is complete and verified, since it is named last.
        if replace or not folder.is_dir():
            convert.convert(self.checkpoint, folder, plan, calibrate=calibrate, force=replace, **self._where)
        self._progress(f"convert to {label}", 1, 1)

    def _heal(
        self, training: FinetuneStage, label: str, source: Stage | None, folder: Path, working: Path
    ) -> dict[str, Any]:
        start = self.checkpoint if source is None else str(source.product)
        where = self._where if source is None else {}
        # Trained weights are no longer the base's, so they cannot teach.
        again = source is not None and source.noun == "training" and label != TRAINED
        modes = training.recover or ["distill"]
        retrained = again and ("distill" in modes or training.keep_exact is not None)
        try:
            # A killed process may have written the folder, but not this stage.
            done = finetune_folder(
                start,
                folder,
                training,
                teacher=self.checkpoint if retrained else None,
                working=working,
                resume=(working / "training.json").is_file(),
                force=True,
                device=choose_device(self.asked.device),
                **where,
                progress=lambda what, *more: self._progress(f"heal {label}: {what}", *more),
            )
        except BudgetMetError as met:
            # The target is already met: copy the checkpoint unchanged.
            with atomic_folder(folder, force=True) as copied:
                shutil.copytree(start, copied, dirs_exist_ok=True)
            done = met.healing
        return {
            "name": label,
            **{key: value for key, value in done.to_data().items() if key not in ("output", "options", "notes")},
        }

    def _evaluate(self, number: int, conversions: Conversions, outputs: Path) -> dict[str, Any]:
        opened, task, seed = self.open(conversions), self.asked.evaluate[number], self.asked.seed
        entry = measure_quality(opened, task, seed=seed, outputs=outputs, fresh=False, progress=self._progress)
        return self.record(conversions, quality=[entry]).to_data()

    def _bench(self, grid: BenchStage, texts: EvaluateStage | None, conversions: Conversions) -> dict[str, Any]:
        speed = list(measure_speed(self.open(conversions), grid, texts, seed=self.asked.seed, progress=self._progress))
        return self.record(conversions, speed=speed).to_data()


def _machine() -> dict[str, Any]:
    # The stage keys already include a hash of the code.
    environment = record.environment(torch.get_num_threads())
    return {key: value for key, value in environment.items() if key not in ("approx", "git_commit")}


def measured(outcome: Outcome) -> Record:
    """The record of an evaluation or bench, from its stored outcome.

    Raises:
        ApproxError: if it is not a record.
    """
    return record.validated(outcome.result, f"The outcome of '{outcome.name}'", Exit.INTERNAL)


def _labels(conversions: Conversions) -> str:
    return ", ".join(conversions) or "the exact base"


@dataclass(frozen=True)
class Pushes:
    """The pushes of a run.

    Args:
        study: The study of the run.
        recipe: Its recipe.
        folders: The converted and the healed folders, by label.
        record: The record of the run.
        parts: The stages that the record is made of.
        send: Whether to push; otherwise the folders that would be pushed are written into `push/` of the run.
        offline: Without `send`: whether the hub may not be asked for the licence of the base.
        progress: Called with stage, done and total.
    """

    study: Study
    recipe: Recipe
    folders: Conversions
    record: Path
    parts: tuple[Stage, ...]
    send: bool
    offline: bool
    progress: Progress

    def stages(self) -> list[Stage]:
        """One stage for each push; the outcome is that of `approx.push`. Folders that are only written are written every time."""
        return [
            Stage(
                f"push to {asked.repo}",
                self._key(asked),
                lambda asked=asked: vars(self._push(asked)),
                noun="push",
                stored=self.send,
            )
            for asked in self.recipe.push
        ]

    def check(self, *, every: bool) -> None:
        """Ask the hub whether the pushes that are not done, or every one, would be allowed.

        Raises:
            ApproxError: with all reasons why not; the exit code is their lowest.
        """
        source, errors = self.study.open()[BASE].source, list[ApproxError]()
        for number, (asked, stage) in enumerate(zip(self.recipe.push, self.stages(), strict=True)):
            if self.send and (every or self.study.store.state(stage) != "done"):
                try:
                    stated(asked.base_model, asked.license, asked.language)
                    check_permission(
                        asked.repo,
                        base=asked.base_model or (source.name if source.revision else None),
                        public=asked.public,
                        create_pr=asked.create_pr,
                        revision=asked.revision,
                    )
                except ApproxError as error:
                    errors.append(ApproxError(f"{self.recipe.at('push', number)}Push: {error}", error.exit_code))
        if errors:
            raise ApproxError("\n".join(map(str, errors)), min(error.exit_code for error in errors))

    def _folder(self, asked: PushStage) -> Stage:
        """The folder to push: the variant after its training."""
        name = asked.variant or next(iter([*self.recipe.variants, *self.recipe.search]))
        return self.folders.get(name + HEALED, self.folders[name])

    def _key(self, asked: PushStage) -> str:
        made_of = [one.key for one in (self._folder(asked), *self.parts)]
        return stage_key("push", endpoint(), asked.model_dump(), made_of, self.recipe.text)

    def _push(self, asked: PushStage) -> Pushed | NotPushed:
        folder = self._folder(asked).product
        assert folder is not None  # conversions and trainings make folders
        more: dict[str, Any] = {"records": [self.record], "public": asked.public, "progress": self.progress}
        more |= {"base_model": asked.base_model, "license": asked.license, "language": asked.language}
        if not self.send:
            # Named as in the hub's cache; no repository name has two hyphens.
            names = [*asked.repo.split("/"), *([slug(asked.revision)] if asked.revision else [])]
            place = self.record.parent / "push" / "--".join(names)
            return push(folder, asked.repo, dry_run=place, force=True, offline=self.offline, **more)
        try:
            return push(
                folder, asked.repo, create_pr=asked.create_pr, revision=asked.revision, message=asked.message, **more
            )
        except ApproxError as error:
            raise ApproxError(
                "The run is complete but for its push. Continue it with --resume, or push by hand: approx push "
                f"{folder} {asked.repo} --record {self.record}. What stopped it: {error}",
                error.exit_code,
            ) from error


_RECIPE = "recipe.yaml"
_OWN = (_RECIPE, "stages", "search", "converted", "healed", "training", "report", "push", "record.json")


def run(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    send: bool = True,
    command: str = "",
    progress: Progress = silent,
    pushed: Callable[[Pushed | NotPushed], None] = lambda outcome: None,
) -> Record:
    """Run a whole recipe.

    Finished stages are stored in `out`, so an interrupted run continues where it stopped.

    Args:
        recipe: The recipe.
        out: Folder of the run; the record is `out/record.json`, the report `out/report/index.html`.
        resume: Continue an earlier run of the same recipe in `out`.
        force: Delete an earlier run in `out` and start over.
        offline: Whether to use only local files and the hub's cache.
        send: Whether to push what the recipe pushes; otherwise the folders that would be pushed are written into
            `out/push`.
        command: The command as typed, for the record.
        progress: Called with stage, done and total.
        pushed: Called with the outcome of each push, as of `approx.push`.

    Returns:
        The record.

    Raises:
        ApproxError: if the recipe has mistakes (with all of them), `out` holds another run or another process is
            writing it, a push would not be allowed, or a stage fails.
    """
    if recipe.push and offline and send:
        raise ApproxError(
            "--offline was given, but the recipe pushes, which needs the hub. Add --no-push to only write the folders "
            "that it would push."
        )
    _refuse(recipe, out, resume=resume, force=force)
    plans = check(recipe, offline=offline)
    progress("open the base, read the data", 0, 1)
    study = Study(recipe, recipe.checkpoint, out, offline=offline, command=command, progress=progress, here=True)
    with locked_output(out):
        # Another process may have claimed the folder since the check above.
        _refuse(recipe, out, resume=resume, force=force)
        if recipe.search:
            _claim(recipe, out, force=force)
            plans |= study.search(recipe.search, out / "search")
        stages = _Stages.of(study, recipe, plans, out)
        pushes = Pushes(
            study,
            recipe,
            folders=stages.folders,
            record=out / "record.json",
            parts=stages.report.inputs,
            send=send,
            offline=offline,
            progress=progress,
        )
        pushes.check(every=force)
        if not recipe.search:
            _claim(recipe, out, force=force)
        made = complete([*stages.report.inputs, stages.report], study.store, Here(), keep_going=False)
        last = complete(pushes.stages(), study.store, Here(), keep_going=False)
        for stage in pushes.stages():
            outcome = last.get(stage.key) or study.store.read(stage)
            assert outcome is not None  # it was computed now or is stored
            pushed((Pushed if "url" in outcome.result else NotPushed)(**outcome.result))
        return made[stages.report.key].result


class _Stages(NamedTuple):
    """The folders of a run, by label, and its report, whose inputs are all other stages."""

    folders: dict[str, Stage]
    report: Stage

    @classmethod
    def of(cls, study: Study, recipe: Recipe, plans: dict[str, Plan], out: Path) -> "_Stages":
        converted = {name: study.convert(plan, name, out / "converted" / slug(name)) for name, plan in plans.items()}
        healed = _healed(study, recipe, converted, out)
        folders = {**converted, **healed}
        # Of a healed variant only the healed folder is timed: just the weights differ.
        timed = {name: folders.get(name + HEALED, one) for name, one in converted.items()}
        timed = {name + HEALED * (name + HEALED in folders): one for name, one in timed.items()}
        parts = [
            *(study.evaluate(n, folders, out / f"outputs-{n}.parquet") for n in range(len(recipe.evaluate))),
            *(study.bench(grid, timed) for grid in recipe.bench),
        ]
        make = partial(_report, study, recipe, folders, parts)
        report = Stage("report", "report", make, (*folders.values(), *parts), stored=False)
        return cls(folders, report)


def _healed(study: Study, recipe: Recipe, converted: Conversions, out: Path) -> dict[str, Stage]:
    """The trainings, by label; of several for one variant each goes on from the one before."""
    stages: dict[str, Stage] = {}
    for number, heal in enumerate(recipe.heal):
        chosen = converted if heal.variants is None else {name: converted[name] for name in heal.variants}
        for name, folder in chosen.items():
            label = name + HEALED
            place = out / "healed" / f"{slug(name)}-{number}"
            stages[label] = study.heal(heal.training, label, stages.get(label, folder), place)
        if heal.exact:
            stages[TRAINED] = study.heal(
                heal.of_the_base, TRAINED, stages.get(TRAINED), out / "healed" / f"exact-{number}"
            )
    return stages


def _report(study: Study, recipe: Recipe, folders: Conversions, parts: list[Stage]) -> Record:
    """Write record and report from the results of all stages; fast, so its outcome is not stored."""
    results = [measured(outcome) for part in parts if (outcome := study.store.read(part))]
    made = study.record(
        folders,
        recipe=RecipeText(text=recipe.text, sha256=recipe.sha256),
        quality=[entry for result in results for entry in result.quality],
        speed=[row for result in results for row in result.speed],
        trainings=[
            Trained(**outcome.result)
            for one in folders.values()
            if one.noun == "training" and (outcome := study.store.read(one))
        ],
    )
    record.save(study.out / "record.json", made)
    write_report([made], study.out / "report", force=True)
    return made


def _refuse(recipe: Recipe, out: Path, *, resume: bool, force: bool) -> None:
    """Raise if the folder does not hold a run, or one that may be neither continued nor replaced."""
    if resume and force:
        raise ApproxError("--resume continues a run and --force starts it over. Give one of them.")
    refuse_unclaimed(out, "run", "a run", _begun)
    if force or not out.is_dir() or {path.name for path in out.iterdir()} <= {CLAIM}:
        return
    if not resume:
        raise ApproxError(
            f"{out} holds an earlier run. Continue it with --resume, or start over with --force.", Exit.REFUSED
        )
    written = out / _RECIPE
    if written.is_file() and written.read_text(encoding="utf-8", errors="replace") != recipe.text:
        raise ApproxError(
            f"{out} holds a run of another recipe. Choose another output folder, or start over with --force.",
            Exit.REFUSED,
        )


def _begun(out: Path) -> bool:
    """Whether a folder holds a run of an earlier version, which did not mark its folders."""
    return (out / _RECIPE).is_file() and Store(out).begun()


def _claim(recipe: Recipe, out: Path, *, force: bool) -> None:
    """Mark `out` as the folder of this run; with `force`, first delete the files of an earlier run, and only those."""
    claim(out, "run", "a run", _begun)
    try:
        if force:
            for path in (*(out / name for name in _OWN), *out.glob("outputs-*.parquet")):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        write_whole(out / _RECIPE, recipe.text)
    except OSError as error:
        raise ApproxError(f"{out} cannot be written: {error.strerror}. Choose another output folder.") from None
