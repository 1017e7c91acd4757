"""Run the stages of one recipe in order: convert every variant, evaluate, bench, report."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from approx.checkpoints.atomic_folder import CLAIM, claim, held, refuse_unclaimed
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.record_model import RecipeText, Record
from approx.evaluation.record_training import Trained
from approx.measuring.identity import computed_by
from approx.measuring.measure import Progress, silent
from approx.pipeline.executors import Here
from approx.pipeline.preflight import check
from approx.pipeline.pushes import Pushes
from approx.pipeline.stages import Conversions, Study, measured
from approx.pipeline.store import Stage, Store, complete
from approx.planning.plan import Plan
from approx.publishing.report import write_report
from approx.recipe import BASE, HEALED, TRAINED, Recipe, slug
from approx_kernels.runtime.atomic_file import write_whole

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
    pushed: Callable[[dict[str, Any]], None] = lambda outcome: None,
) -> Record:
    """Run a whole recipe.

    Finished stages are stored in `out`, so an interrupted run continues where it stopped.

    Args:
        recipe: The recipe.
        out: Folder of the run; the record is `out/record.json`, the report `out/report/index.html`.
        resume: Continue an earlier run of the same recipe in `out`.
        force: Delete an earlier run in `out` and start over.
        offline: Whether to use only local files and the hub's cache.
        send: Whether to push what the recipe pushes; otherwise the folders that would be pushed are written into `out/push`.
        command: The command as typed, for the record.
        progress: Called with stage, done and total.
        pushed: Called with the outcome of each push, as of `approx.push`.

    Returns:
        The record.

    Raises:
        ApproxError: if the recipe has mistakes (with all of them), `out` holds another run or another process is writing it, a
            push would not be allowed, or a stage fails.
    """
    if recipe.push and offline and send:
        raise ApproxError(
            "--offline was given, but the recipe pushes, which needs the hub. Add --no-push to only write the folders that it would push."
        )
    _refuse(recipe, out, resume=resume, force=force)
    plans = check(recipe, offline=offline)
    progress("open the base, read the data", 0, 1)
    study = Study(recipe, recipe.checkpoint, out, offline, command, progress)
    base = study.open()[BASE]
    environment = record.environment(torch.get_num_threads())
    # The keys already include a hash of the code.
    machine = {key: value for key, value in environment.items() if key not in ("approx", "git_commit")}
    study.begin(machine, computed_by(base.model.device))
    with held(out):
        # Another process may have claimed it since it was looked at.
        _refuse(recipe, out, resume=resume, force=force)
        if recipe.search:
            _claim(recipe, out, force=force)
            plans |= study.search(recipe.search, out / "search")
        stages = _Stages.of(study, recipe, plans, out)
        pushes = Pushes(
            study, recipe, stages.folders, out / "record.json", stages.report.inputs, send, offline, progress
        )
        pushes.check(every=force)
        if not recipe.search:
            _claim(recipe, out, force=force)
        made = complete([*stages.report.inputs, stages.report], study.store, Here(), keep_going=False)
        last = complete(pushes.stages(), study.store, Here(), keep_going=False)
        for stage in pushes.stages():
            outcome = last.get(stage.key) or study.store.read(stage)
            assert outcome is not None  # it was computed now or is stored
            pushed(outcome["result"])
        return made[stages.report.key]["result"]


class _Stages(NamedTuple):
    """The folders of a run, by label, and its report, whose inputs are all other stages."""

    folders: dict[str, Stage]
    report: Stage

    @classmethod
    def of(cls, study: Study, recipe: Recipe, plans: dict[str, Plan], out: Path) -> "_Stages":
        converted = {name: study.convert(plan, name, out / "converted" / slug(name)) for name, plan in plans.items()}
        healed = _healed(study, recipe, converted, out)
        folders = {**converted, **healed}
        # What was healed takes the place of what it was in timings: only its weights differ.
        timed = {name: folders.get(name + HEALED, one) for name, one in converted.items()}
        timed = {name + HEALED * (name + HEALED in folders): one for name, one in timed.items()}
        parts = [
            *(study.evaluate(n, folders, out / f"outputs-{n}.parquet") for n in range(len(recipe.evaluate))),
            *(study.bench(grid, timed) for grid in recipe.bench),
        ]
        make = partial(_report, study, recipe, folders, parts)
        report = Stage("report", "report", make, (*folders.values(), *parts), kept=False)
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
            Trained(**outcome["result"])
            for one in folders.values()
            if one.noun == "training" and (outcome := study.store.read(one))
        ],
    )
    record.save(study.out / "record.json", made)
    write_report([made], study.out / "report", force=True)
    return made


def _refuse(recipe: Recipe, out: Path, *, resume: bool, force: bool) -> None:
    """Raise if the folder is not ours, or holds a run that may be neither continued nor replaced."""
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
    """Whether an earlier version, which made no claims, has run a recipe in a folder."""
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
