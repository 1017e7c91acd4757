"""The order of the stages, written once: convert every variant, evaluate, bench, record, report."""

import shutil
from pathlib import Path
from typing import Any

from approx.conversion import checkpoint, make
from approx.conversion.anatomy import anatomy
from approx.conversion.folder import MANIFEST
from approx.conversion.plan import Plan
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.bench import crossover
from approx.pipeline.journal import Journal
from approx.pipeline.measure import BASE, Progress, make_record, measure_quality, measure_speed, open_all, silent
from approx.publishing.report import write_report
from approx.recipe import Recipe, slug
from approx.tasks import open_task
from approx.version import __version__

_CLAIM = "recipe.yaml"


def run(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Carry a whole recipe out.

    Every finished stage is kept in `out`, so a run that was cut goes on where it stopped.

    Args:
        recipe: What to do.
        out: Folder of this run; the record is `out/record.json`, the report `out/report/index.html`.
        resume: Go on with an earlier run of the same recipe in `out`.
        force: Start anew, deleting an earlier run in `out`.
        offline: Whether only local files and the hub's cache may be used.
        command: As typed, for the record.
        progress: Called with stage, done and total.

    Returns:
        The record.

    Raises:
        ApproxError: if the recipe does not fit the checkpoint, `out` holds another run, or a stage fails.
    """
    plans = {name: Plan.parse(data, f"variant '{name}'") for name, data in recipe.variants.items()}
    _check_before_work(recipe, plans, offline)
    _claim(recipe, out, resume=resume, force=force)

    opened = open_all({BASE: recipe.checkpoint}, recipe.device, recipe.dtype, revision=recipe.revision, offline=offline)
    journal = Journal(out / "journal", f"{recipe.sha256} {opened[BASE].weights_sha256} {__version__}")
    folders = {name: out / "converted" / slug(name) for name in plans}
    for number, (name, chosen) in enumerate(plans.items()):
        progress(f"convert to {name}", number, len(plans))
        if not (folders[name] / MANIFEST).is_file():
            make.convert(recipe.checkpoint, folders[name], chosen, revision=recipe.revision, offline=offline)
    progress("convert", len(plans), len(plans))
    opened |= open_all({name: str(folder) for name, folder in folders.items()}, recipe.device, recipe.dtype)

    quality = [
        journal.once(
            f"evaluate-{number}",
            lambda stage=stage, number=number: measure_quality(
                opened, stage, seed=recipe.seed, outputs=out / f"outputs-{number}.parquet", progress=progress
            ),
        )
        for number, stage in enumerate(recipe.evaluate)
    ]
    races = [
        journal.once(
            f"bench-{number}",
            lambda stage=stage: measure_speed(
                opened,
                stage,
                recipe.evaluate[0] if stage.inputs == "real" else None,
                seed=recipe.seed,
                progress=progress,
            ),
        )
        for number, stage in enumerate(recipe.bench)
    ]
    speed = [row for one in races for row in one["speed"]]
    made = make_record(
        opened,
        title=recipe.title,
        notice=recipe.notice,
        seed=recipe.seed,
        command=command,
        recipe={"text": recipe.text, "sha256": recipe.sha256},
        quality=quality,
        speed=speed,
        crossover=crossover(speed),
    )
    record.save(out / "record.json", made)
    write_report([made], out / "report")
    return made


def _check_before_work(recipe: Recipe, plans: dict[str, Plan], offline: bool) -> None:
    """Find in seconds what would otherwise be found after minutes: all mistakes of all plans, tasks and data."""
    source = checkpoint.locate(recipe.checkpoint, revision=recipe.revision, offline=offline)
    if source.converted:
        raise ApproxError(
            f"{recipe.checkpoint} is converted already. A recipe starts from a base checkpoint.", Exit.REFUSED
        )
    facts = anatomy(source.config, source.stock_class)
    mistakes: list[ApproxError] = []
    for name, chosen in plans.items():
        try:
            chosen.resolve(facts)
        except ApproxError as error:
            mistakes.append(ApproxError(f"Variant '{name}': {error}", error.exit_code))
    for stage in recipe.evaluate:
        try:
            open_task(stage.task, **stage.settings)
        except ApproxError as error:
            mistakes.append(error)
        if stage.data is not None and not Path(stage.data).exists():
            mistakes.append(
                ApproxError(
                    f"Data {stage.data} of task {stage.task} does not exist. Mend the path in the recipe.",
                    Exit.UNAVAILABLE,
                )
            )
    if mistakes:
        raise ApproxError("\n".join(map(str, mistakes)), min(error.exit_code for error in mistakes))


def _claim(recipe: Recipe, out: Path, *, resume: bool, force: bool) -> None:
    """Take `out` for this run, or refuse: an earlier run is neither mixed with another nor deleted unasked."""
    claim = out / _CLAIM
    if out.is_file():
        raise ApproxError(f"{out} is a file; the folder of a run was asked for. Choose another output.", Exit.REFUSED)
    if out.is_dir() and any(out.iterdir()):
        if not claim.is_file():
            raise ApproxError(f"{out} exists and is no run of approx. Choose another output folder.", Exit.REFUSED)
        if force:
            shutil.rmtree(out)
        elif not resume:
            raise ApproxError(
                f"{out} holds an earlier run. Go on with it by --resume, or start anew by --force.", Exit.REFUSED
            )
        elif claim.read_text(encoding="utf-8") != recipe.text:
            raise ApproxError(
                f"{out} holds a run of another recipe. Choose another output folder, or start anew by --force.",
                Exit.REFUSED,
            )
    out.mkdir(parents=True, exist_ok=True)
    claim.write_text(recipe.text, encoding="utf-8")
