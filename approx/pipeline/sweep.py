"""A sweep: compute the missing stages of a grid, and combine their results."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from approx.checkpoints.atomic_folder import claim, locked_output, refuse_unclaimed
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.bench import crossover
from approx.evaluation.record import RecipeText, Record
from approx.grid import Grid
from approx.pipeline.run import Study, check, measured
from approx.pipeline.store import Executor, Stage, Store, complete
from approx.planning.plan import Plan, seeded
from approx.progress import Progress, silent
from approx.publishing import sweep as tables
from approx.publishing.plots import sweep_picture
from approx.publishing.sweep import Cell, Results, collect, machine, same_task
from approx.recipe import slug
from approx_kernels.runtime.atomic_file import write_whole


@dataclass(frozen=True)
class GridStage(Stage):
    """A stage of a sweep; the table that its outcome belongs to depends on where in the grid it is.

    Attributes:
        kind: `base`, `convert`, `heal`, `evaluate` or `bench`.
        checkpoint: Name of the base.
        plan: Name of the plan; None for the base alone.
        seed: Seed of the plan; None where nothing is drawn.
        label: Name of the plan with its seed.
    """

    kind: str = ""
    checkpoint: str = ""
    plan: str | None = None
    seed: int | None = None
    label: str = ""


@dataclass(frozen=True)
class Swept:
    """The outcome of a sweep.

    Attributes:
        results: Results of its cells.
        tables: The formatted tables.
        computed: Number of cells that were computed; the others existed already.
        data: The content of `sweep.json`, and `computed`.
    """

    results: Results
    tables: list[tables.Table]
    computed: int
    data: dict[str, Any]


def cells(
    grid: Grid, out: Path, *, offline: bool = False, command: str = "", progress: Progress = silent
) -> list[GridStage]:
    """The cells of a grid: for each checkpoint its conversions, its own scores, and plan × task × seed.

    The base and the data are loaded, since the keys depend on them; nothing is computed or written.

    Raises:
        ApproxError: with all mistakes of the grid at once; if a task does not fit a checkpoint or its data; or if `out`
            is not the folder of a sweep.
    """
    refuse_unclaimed(out, "sweep", "a sweep", _begun)
    plans = _checked(grid, offline)
    made: list[GridStage] = []
    for number, name in enumerate(grid.checkpoint):
        progress("open the base, read the data", number, len(grid.checkpoint))
        study = Study(grid, name, out.resolve(), offline=offline, command=command)
        made += _cells(grid, plans, study)
        study.close()
    progress("open the base, read the data", len(grid.checkpoint), len(grid.checkpoint))
    return sorted(made, key=lambda cell: (cell.alone, bool(cell.inputs)))


def sweep(
    grid: Grid, out: Path, todo: Sequence[GridStage], executor: Executor, *, progress: Progress = silent
) -> Swept:
    """Compute the cells that are missing or failed, and combine all of them.

    A failed cell stops only those that depend on it; the next sweep tries it again. Finished cells survive any crash.

    Args:
        grid: The grid.
        out: The folder that the cells were made for.
        todo: Cells from `cells`.
        executor: Runs the cells.
        progress: Called with the cell that finished last, done and total.
    """
    with locked_output(out):
        claim(out, "sweep", "a sweep", _begun)
        computed = complete(
            todo,
            Store(out),
            executor,
            keep_going=True,
            progress=lambda name, *where: progress(f"sweep: {name}" if name else "sweep", *where),
        )
        return _written(
            grid, out, [cell for stage in todo if (cell := _cell(stage, Store(out))) is not None], len(computed)
        )


def _begun(out: Path) -> bool:
    """Whether a folder holds a sweep of an earlier version, which did not mark its folders."""
    return not (out / "recipe.yaml").exists() and Store(out).begun()


def _checked(grid: Grid, offline: bool) -> dict[str, Plan]:
    """Return the plans, or raise all mistakes, each once."""
    plans: dict[str, Plan] = {}
    lines: dict[str, str] = {}
    codes: list[Exit] = []
    # Without a usable checkpoint, the other mistakes are still reported.
    for name in grid.checkpoint or [""]:
        try:
            plans = check(grid.recipe(name), offline=offline)
        except ApproxError as error:
            codes.append(error.exit_code)
            for line in str(error).splitlines():
                # A mistake in a variant is repeated for many of its plans.
                place, variant, _ = line.partition("Variant '")
                lines.setdefault(place + line.partition("': ")[2] if variant else line, line)
    if lines:
        raise ApproxError("\n".join(lines.values()), min(codes))
    return plans


def _cells(grid: Grid, plans: dict[str, Plan], study: Study) -> Iterator[GridStage]:
    bases = [study.evaluate(task, {}) for task in range(len(grid.evaluate))]
    yield from (GridStage(**vars(base), kind="base", checkpoint=study.checkpoint) for base in bases)
    for name, plan in plans.items():
        drawn = seeded(plan, grid.seeds[0]) != plan
        for number, seed in enumerate(grid.seeds if drawn else grid.seeds[:1]):
            label = f"{name} seed={seed}" if drawn and len(grid.seeds) > 1 else name
            folder = study.convert(seeded(plan, seed), label)
            made = [folder]
            for heal in grid.heal:
                if heal.variants is None or grid.points[name].variant in heal.variants:
                    made.append(study.heal(heal.training, label, made[-1]))
            measured = {label: made[-1]}
            made += [study.evaluate(task, measured, after=[base]) for task, base in enumerate(bases)]
            # The seed changes scores, not speed.
            made += [study.bench(lengths, measured) for lengths in grid.bench if number == 0]
            where = {"checkpoint": study.checkpoint, "plan": name, "seed": seed if drawn else None, "label": label}
            yield from (GridStage(**vars(one), kind=one.name.partition(" ")[0], **where) for one in made)


def _cell(stage: GridStage, store: Store) -> Cell | None:
    """The outcome of a cell, for the tables; None if it was not computed."""
    outcome = store.read(stage)
    if outcome is None:
        return None
    made = None
    if stage.kind in ("base", "evaluate", "bench") and outcome.result is not None:
        made = measured(outcome)
        # Another plan may share the stage, or this plan had another name then.
        for part in (*made.quality, *made.speed, made):
            for variant in part.variants:
                variant.name = stage.label
    where = {name: getattr(stage, name) for name in ("kind", "checkpoint", "plan", "seed")}
    return Cell(stage.key, stage.name, **where, error=outcome.error, exit_code=outcome.exit_code, record=made)


def _written(grid: Grid, out: Path, found: list[Cell], computed: int) -> Swept:
    """Write the tables and the records."""
    recipe = RecipeText(text=grid.text, sha256=grid.sha256)
    results = collect(found, {name: point.values for name, point in grid.points.items()})
    about = {"schema": 1, "title": grid.title, "notice": grid.notice, "grid": recipe.to_data(), "seeds": grid.seeds}
    made = {**about, **results.to_data()}
    write_whole(out / "sweep.json", json.dumps(made, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(out / "sweep.csv", tables.comma_separated(results))
    write_whole(out / "sweep.md", tables.markdown(grid.title, grid.notice, results))
    if (drawn := sweep_picture(results.quality)) is not None:
        write_whole(out / "sweep.svg", drawn)
    shutil.rmtree(out / "records", ignore_errors=True)
    for name, one in _records([cell.record for cell in found if cell.record and cell.record.variants]):
        record.save(out / "records" / f"{name}.json", one.model_copy(update={"recipe": recipe}))
    return Swept(results, tables.layout(results), computed, {**made, "computed": computed})


def _records(parts: list[Record]) -> Iterator[tuple[str, Record]]:
    """The records for `approx report`: one with the quality of all plans, and one for the speed of each plan and machine."""
    joined: dict[str, Record] = {}
    for part in parts:
        base, label = slug(Path(part.checkpoint.name).name), slug(part.variants[0].name)
        place_of = machine(part)
        alike = [name for name in joined if name.startswith(f"{base}-speed-{label}.")]
        place = next((n for n, name in enumerate(alike) if machine(joined[name]) == place_of), len(alike))
        name = f"{base}-quality" if part.quality else f"{base}-speed-{label}.{place}"
        if name not in joined:
            joined[name] = part.model_copy(deep=True)
            continue
        whole = joined[name]
        known = {variant.name for variant in whole.variants}
        whole.variants += [variant for variant in part.variants if variant.name not in known]
        whole.speed += part.speed
        for entry in part.quality:
            same = (one for one in whole.quality if same_task(one, entry))
            if (task := next(same, None)) is None:
                whole.quality.append(entry.model_copy(deep=True))
            else:
                task.variants += entry.variants
    for name, whole in joined.items():
        for entry in whole.quality:
            # Outputs are one file per cell, not one next to the record.
            entry.outputs = None
        whole.crossover = crossover(whole.speed)
        yield name.removesuffix(".0"), whole
