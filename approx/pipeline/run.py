"""The order of the stages, written once: convert every variant, evaluate, bench, record, report."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.measuring.identity import beside, computed_by
from approx.measuring.measure import Progress, make_record, measure_quality, measure_speed, open_all, silent
from approx.pipeline.journal import Journal
from approx.pipeline.preflight import check, rehearse
from approx.planning.plan import Plan
from approx.publishing.report import write_report
from approx.recipe import BASE, Recipe, slug

_CLAIM = "recipe.yaml"
_OWN = (_CLAIM, "journal", "converted", "report", "record.json")


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
        ApproxError: if the recipe does not fit the checkpoint (with all its mistakes), `out` holds another run, or a stage
            fails.
    """
    _refuse(recipe, out, resume=resume, force=force)
    plans = check(recipe, offline=offline)
    progress("open the base, read the data", 0, 1)
    opened = open_all({BASE: recipe.checkpoint}, recipe.device, recipe.dtype, revision=recipe.revision, offline=offline)
    data = [rehearse(opened[BASE], stage) for stage in recipe.evaluate]
    _claim(recipe, out, force=force)

    environment = record.environment(torch.get_num_threads())
    base = (
        f"{opened[BASE].weights_sha256} {beside(opened[BASE].source.folder)} {computed_by(opened[BASE].model.device)}"
    )
    journal = Journal(out / "journal", f"{recipe.sha256} {base} {json.dumps(environment)}")
    folders = _convert(recipe, plans, out / "converted", journal, offline, progress)
    opened |= open_all(folders, recipe.device, recipe.dtype)
    weights = [one.weights_sha256 for one in opened.values()]
    quality, speed = [], []
    for number, stage in enumerate(recipe.evaluate):
        outputs = out / f"outputs-{number}.parquet"
        measure = partial(
            measure_quality, opened, stage, seed=recipe.seed, outputs=outputs, fresh=False, progress=progress
        )
        quality.append(journal.once(f"evaluate-{number}", measure, outputs, about=[weights, data[number]]))
    for number, stage in enumerate(recipe.bench):
        texts = recipe.evaluate[0] if stage.inputs == "real" else None
        time = partial(measure_speed, opened, stage, texts, seed=recipe.seed, progress=progress)
        speed += journal.once(f"bench-{number}", time, about=[weights, None if texts is None else data[0]])
    made = make_record(
        opened,
        title=recipe.title,
        notice=recipe.notice,
        seed=recipe.seed,
        command=command,
        recipe={"text": recipe.text, "sha256": recipe.sha256},
        quality=quality,
        speed=speed,
    )
    record.save(out / "record.json", made)
    write_report([made], out / "report")
    return made


def _convert(
    recipe: Recipe, plans: dict[str, Plan], out: Path, journal: Journal, offline: bool, progress: Progress
) -> dict[str, str]:
    """Convert the base into every variant that is not there yet; name -> folder."""
    folders = {name: out / slug(name) for name in plans}
    calibrate = None if recipe.calibrate is None else Path(recipe.calibrate)
    text = None if calibrate is None else hashlib.sha256(calibrate.read_bytes()).hexdigest()
    for number, (name, folder) in enumerate(folders.items()):

        def make_folder(number: int = number, name: str = name, folder: Path = folder) -> dict[str, Any]:
            progress(f"convert to {name}", number, len(plans))
            # What is there was not finished, or was made under another key.
            return convert.convert(
                recipe.checkpoint, folder, plans[name], calibrate=calibrate, force=True, revision=recipe.revision,
                offline=offline,
            )  # fmt: skip

        journal.once(f"convert-{slug(name)}", make_folder, folder, about=text)
    progress("convert", len(plans), len(plans))
    return {name: str(folder) for name, folder in folders.items()}


def _refuse(recipe: Recipe, out: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder with something else in it: a run is neither mixed with another nor deleted unasked."""
    claim = out / _CLAIM
    if out.exists() and not out.is_dir():
        raise ApproxError(f"{out} is a file; the folder of a run was asked for. Choose another output.", Exit.REFUSED)
    if not out.is_dir() or not any(out.iterdir()) or (force and claim.is_file()):
        return
    if not claim.is_file():
        raise ApproxError(f"{out} exists and is no run of approx. Choose another output folder.", Exit.REFUSED)
    if not resume:
        raise ApproxError(
            f"{out} holds an earlier run. Go on with it by --resume, or start anew by --force.", Exit.REFUSED
        )
    if claim.read_text(encoding="utf-8") != recipe.text:
        raise ApproxError(
            f"{out} holds a run of another recipe. Choose another output folder, or start anew by --force.",
            Exit.REFUSED,
        )


def _claim(recipe: Recipe, out: Path, *, force: bool) -> None:
    """Take `out` for this run; with `force` what an earlier run made goes, and nothing else that lies there."""
    if force and out.is_dir():
        for path in (*(out / name for name in _OWN), *out.glob("outputs-*.parquet")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _CLAIM).write_text(recipe.text, encoding="utf-8")
    except OSError as error:
        raise ApproxError(f"{out} cannot be written: {error.strerror}. Choose another output folder.") from None
