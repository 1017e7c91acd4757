"""The stages of runs and sweeps: conversion, evaluation, bench; and what each depends on."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from approx.checkpoints.atomic_folder import atomic_folder
from approx.checkpoints.checkpoint import Checkpoint
from approx.conversion import convert
from approx.conversion.separator import of_checkpoint, with_separator
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.evaluation.record_model import Record
from approx.finetuning.data import digest_of
from approx.finetuning.finetune import BudgetMetError
from approx.finetuning.folder import finetune_folder
from approx.finetuning.options import FinetuneStage
from approx.grid import Grid
from approx.measuring.identity import beside, code, identity
from approx.measuring.measure import (
    Progress,
    choose_device,
    make_record,
    measure_quality,
    measure_speed,
    open_all,
    silent,
)
from approx.pipeline.preflight import refuse_trained_on, rehearse
from approx.pipeline.search import folder_of, search
from approx.pipeline.store import Outcome, Stage, Store, stage_key
from approx.planning.plan import Plan
from approx.recipe import BASE, Recipe, slug
from approx.searching.options import SearchStage

# Label of a converted folder -> the stage that makes it.
Conversions = Mapping[str, Stage]


class Study:
    """One checkpoint with the stages of a recipe or grid.

    Args:
        asked: The recipe or grid.
        checkpoint: Name of the base.
        out: Folder of the run or sweep.
        offline: Whether to use only local files and the hub's cache.
        command: The command, for the records.
        progress: Called with a stage's activity, done and total; pickled if stages run in other processes.
    """

    def __init__(
        self, asked: Recipe | Grid, checkpoint: str, out: Path, offline: bool, command: str, progress: Progress = silent
    ) -> None:
        self.asked, self.checkpoint, self.out, self.store = asked, checkpoint, out, Store(out)
        self._where = {"revision": asked.revision, "offline": offline, "merge_adapter": asked.merge_adapter}
        self._command, self._progress = command, progress
        self._about: tuple[Any, ...] = ()
        self._data: list[str] = []
        self._opened: dict[str, Checkpoint] = {}

    def begin(self, *about: Any) -> None:
        """Load the base and read the data, which the keys depend on, together with `about`.

        Raises:
            ApproxError: if the base cannot be loaded, or a task does not fit it or its data.
        """
        base, asked = self.open()[BASE], self.asked
        for task in asked.evaluate:
            refuse_trained_on(asked.heal, task)
        self._data = [rehearse(base, task) for task in asked.evaluate]
        # Weights, config, dtype, versions and code are in the identity.
        self._about = (identity(base), beside(base.source.folder), asked.device, asked.dtype, asked.seed, *about)

    def open(self, conversions: Conversions | None = None) -> dict[str, Checkpoint]:
        """The base and the converted checkpoints, by label; each is loaded once per process.

        Raises:
            ApproxError: if a checkpoint cannot be loaded.
        """
        names = {BASE: self.checkpoint, **{label: str(one.product) for label, one in (conversions or {}).items()}}
        for label, name in names.items():
            if name not in self._opened:
                where = self._where if label == BASE else {}
                self._opened |= open_all({name: name}, self.asked.device, self.asked.dtype, **where)
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
        for name, asked in searches.items():
            file = out / f"{slug(name)}.yaml"
            if not file.is_file():
                found = search(
                    self.open()[BASE], asked, file, folder=folder_of(file), resume=True, seed=self.asked.seed,
                    command=self._command, progress=self._progress,
                )  # fmt: skip
                if found.interrupted:
                    file.unlink()
                    raise KeyboardInterrupt
                if not found.feasible:
                    raise ApproxError(f"The search for '{name}': {found.told}", Exit.THRESHOLD)
            plans[name] = Plan.read(file)
        return plans

    def convert(self, plan: Plan, label: str, place: Path | None = None) -> Stage:
        """The stage that converts by a plan, into `place` or a folder named by its key."""
        plan = with_separator(plan, lambda: of_checkpoint(self.open()[BASE].source))
        given = self.asked.calibrate if isinstance(self.asked, Recipe) else None
        file = None if given is None else Path(given)
        text = None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
        key = stage_key("convert", *self._about, plan.to_data(), text, place and place.name)
        folder = place or self.out / "converted" / key[:16]
        make = partial(self._convert, plan, label, folder, file, place is not None)
        return Stage(f"convert {label}", key, make, product=folder, noun="conversion")

    def heal(self, training: FinetuneStage, label: str, source: Stage | None, place: Path | None = None) -> Stage:
        """The training of a converted folder, or of the base, into a folder named by its key or at a place of one's own."""
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
            place: File for the per-example outputs; by default beside the outcome.
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
        retrained = source is not None and source.noun == "training" and "distill" in (training.recover or [])
        try:
            # A killed process may have written the folder, but not this stage.
            done = finetune_folder(
                start, folder, training, teacher=self.checkpoint if retrained else None, working=working, resume=(working / "training.json").is_file(), force=True,
                device=choose_device(self.asked.device), **where,
                progress=lambda what, *more: self._progress(f"heal {label}: {what}", *more),
            )  # fmt: skip
        except BudgetMetError as met:
            # It is as good as it is asked to be, so it is healed.
            with atomic_folder(folder, force=True) as copied:
                shutil.copytree(start, copied, dirs_exist_ok=True)
            done = met.healing.to_data()
        return {
            "name": label,
            **{key: value for key, value in done.items() if key not in ("output", "options", "notes")},
        }

    def _evaluate(self, number: int, conversions: Conversions, outputs: Path) -> dict[str, Any]:
        opened, task, seed = self.open(conversions), self.asked.evaluate[number], self.asked.seed
        entry = measure_quality(opened, task, seed=seed, outputs=outputs, fresh=False, progress=self._progress)
        return self.record(conversions, quality=[entry]).to_data()

    def _bench(self, grid: BenchStage, texts: EvaluateStage | None, conversions: Conversions) -> dict[str, Any]:
        speed = measure_speed(self.open(conversions), grid, texts, seed=self.asked.seed, progress=self._progress)
        return self.record(conversions, speed=speed).to_data()


def measured(outcome: Outcome) -> Record:
    """The record of an evaluation or bench, from its stored outcome.

    Raises:
        ApproxError: if it is not a record.
    """
    return record.validated(outcome["result"], f"The outcome of '{outcome['name']}'", Exit.INTERNAL)


def _labels(conversions: Conversions) -> str:
    return ", ".join(conversions) or "the exact base"
