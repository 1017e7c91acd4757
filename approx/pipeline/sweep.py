"""A sweep: the cells of a grid, computed where they are missing, and what they say together."""

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from approx.conversion.separator import of_checkpoint, with_separator
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.bench import crossover
from approx.grid import Grid
from approx.measuring.measure import Progress, open_all, silent
from approx.pipeline.executors import Executor
from approx.pipeline.journal import write_whole
from approx.pipeline.preflight import check, rehearse
from approx.pipeline.sweep_cell import Cell, Keys, Workshop, compute, failed
from approx.planning.plan import Plan
from approx.planning.seeding import seeded
from approx.publishing import sweep as tables
from approx.recipe import BASE, slug

_PHASES = (("convert", "base"), ("evaluate",), ("bench",))
_OWN = ("cells", "converted", "records", "jobs", "sweep.json", "sweep.csv", "sweep.md")


def workshop(grid: Grid, out: Path, *, offline: bool = False, command: str = "") -> Workshop:
    """What the cells of a grid share.

    Raises:
        ApproxError: if `out` is something else than the folder of a sweep.
    """
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if out.exists() and (not out.is_dir() or (names and not names & set(_OWN))):
        raise ApproxError(f"{out} exists and is no sweep of approx. Choose another output folder.", Exit.REFUSED)
    return Workshop(
        out.resolve(), grid.title, grid.notice, grid.revision, grid.device, grid.dtype, grid.seed, offline, command
    )


def cells(grid: Grid, *, offline: bool = False, progress: Progress = silent) -> list[Cell]:
    """The cells of a grid: for each checkpoint its plans' conversions, its own scores, and plan × task × seed.

    The base is loaded and the data read, since the keys depend on them; nothing is computed and nothing written.

    Raises:
        ApproxError: with all mistakes of the grid at once, or if a task does not fit a checkpoint or its data.
    """
    plans = _checked(grid, offline)
    found: list[Cell] = []
    for number, name in enumerate(grid.checkpoint):
        progress("open the base, read the data", number, len(grid.checkpoint))
        base = open_all({BASE: name}, grid.device, grid.dtype, revision=grid.revision, offline=offline)[BASE]
        for stage in grid.evaluate:
            rehearse(base, stage)
        keys = Keys(base, grid.device, grid.dtype, grid.seed)
        own = {
            plan: with_separator(parsed, lambda base=base: of_checkpoint(base.source)) for plan, parsed in plans.items()
        }
        found += _cells(grid, name, own, keys)
    progress("open the base, read the data", len(grid.checkpoint), len(grid.checkpoint))
    return sorted(found, key=lambda cell: [cell.kind in phase for phase in _PHASES].index(True))


def sweep(
    grid: Grid, shop: Workshop, todo: Sequence[Cell], executor: Executor, *, progress: Progress = silent
) -> dict[str, Any]:
    """Compute the cells that are missing or failed, and put all of them together.

    A cell that fails does not stop the others; the next sweep tries it again. Whatever kills a sweep, finished cells stay.

    Args:
        grid: What to do.
        shop: What the cells share.
        todo: Of `cells`.
        executor: Where they are computed.
        progress: Called with the cell that was finished last, done and total.

    Returns:
        What `sweep.json` holds (see `approx.publishing.sweep.collect`); beside it `computed`, how many cells were, and
        `tables`, laid out for people.
    """
    states = {cell.key: shop.state(cell) for cell in todo}
    needed = {cell.folder for cell in todo if states[cell.key] != "done"}
    # Plans that come to the same share their cells, under whatever names.
    waiting = list(
        {
            cell.key: cell
            for cell in todo
            if states[cell.key] != "done" and (cell.kind != "convert" or cell.key in needed)
        }.values()
    )
    total, done, computed = len(waiting), 0, 0
    for phase in _PHASES:
        now = []
        for cell in waiting:
            if cell.kind in phase and (lost := _lost(cell, shop, todo)) is not None:
                failed(shop, cell, lost)
                done += 1
            elif cell.kind in phase:
                now.append(cell)
        computed += len(now)
        progress(f"sweep: {now[0].title}" if now else "sweep", done, max(total, 1))
        for cell, outcome in executor.map(partial(compute, shop), now, alone="bench" in phase) if now else ():
            if isinstance(outcome, BaseException):
                failed(shop, cell, outcome)
            done += 1
            progress(f"sweep: {cell.title}", done, max(total, 1))
    for leftover in (shop.out / "cells").glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    made = _written(grid, shop, todo)
    return {**made, "computed": computed, "tables": tables.layout(made)}


def _checked(grid: Grid, offline: bool) -> dict[str, Plan]:
    """The plans, or all mistakes, each told once."""
    plans: dict[str, Plan] = {}
    told: dict[str, str] = {}
    codes: list[Exit] = []
    # A grid that names no checkpoint, or none that can be read, is told the rest of its mistakes too.
    for name in grid.checkpoint or [""]:
        try:
            plans = check(grid.recipe(name), offline=offline)
        except ApproxError as error:
            codes.append(error.exit_code)
            for line in str(error).splitlines():
                # What is wrong with a variant is wrong with many of its plans.
                place, variant, _ = line.partition("Variant '")
                told.setdefault(place + line.partition("': ")[2] if variant else line, line)
    if told:
        raise ApproxError("\n".join(told.values()), min(codes))
    return plans


def _cells(grid: Grid, checkpoint: str, plans: dict[str, Plan], keys: Keys) -> Iterator[Cell]:
    tasks = [(stage, *keys.stage(stage)) for stage in grid.evaluate]
    for stage, data, settings in tasks:
        yield Cell("base", keys.key("base", data, settings), checkpoint, stage=stage)
    for name, plan in plans.items():
        drawn = seeded(plan, grid.seeds[0]) != plan
        for number, seed in enumerate(grid.seeds if drawn else grid.seeds[:1]):
            rules = seeded(plan, seed).to_data()
            label = f"{name} seed={seed}" if drawn and len(grid.seeds) > 1 else name
            folder = keys.key("convert", rules)
            about = (checkpoint, name, rules, seed if drawn else None, label)
            yield Cell("convert", folder, *about)
            for stage, data, settings in tasks:
                yield Cell("evaluate", keys.key("evaluate", rules, data, settings), *about, stage, folder=folder)
            # What is drawn changes what is said, not how long it takes.
            for stage in grid.bench if number == 0 else ():
                texts = grid.evaluate[0] if stage.inputs == "real" else None
                data = tasks[0][1] if texts else None
                key = keys.key("bench", rules, data, vars(stage), texts and texts.settings)
                yield Cell("bench", key, *about, stage, texts, folder)


def _lost(cell: Cell, shop: Workshop, todo: Sequence[Cell]) -> ApproxError | None:
    """Why a cell cannot be computed: its conversion failed."""
    conversion = next((one for one in todo if one.key == cell.folder), None)
    found = None if conversion is None else shop.read(conversion)
    if found is None or found["status"] == "done":
        return None
    return ApproxError(f"Its conversion failed: {found['error']}", Exit(found["exit_code"]))


def _written(grid: Grid, shop: Workshop, todo: Sequence[Cell]) -> dict[str, Any]:
    """Write the tables and the records; returns what `sweep.json` holds."""
    outcomes = [found for cell in todo if (found := shop.read(cell)) is not None]
    recipe = {"text": grid.text, "sha256": grid.sha256}
    about = {"schema": 1, "title": grid.title, "notice": grid.notice, "grid": recipe, "seeds": grid.seeds}
    made = {**about, **tables.collect(outcomes, {name: point.values for name, point in grid.points.items()})}
    write_whole(shop.out / "sweep.json", json.dumps(made, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(shop.out / "sweep.csv", tables.comma_separated(made))
    write_whole(shop.out / "sweep.md", tables.markdown(made))
    shutil.rmtree(shop.out / "records", ignore_errors=True)
    parts = [found["record"] for found in outcomes if found["record"] and found["record"]["variants"]]
    for name, one in _records(parts):
        record.save(shop.out / "records" / f"{name}.json", {**one, "recipe": recipe})
    return made


def _records(parts: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `approx report` reads: the quality of all plans together, and the speed of each plan on each machine."""
    joined: dict[str, dict[str, Any]] = {}
    for part in parts:
        base, label = slug(Path(part["checkpoint"]["name"]).name), slug(part["variants"][0]["name"])
        machine = tables.machine(part)
        alike = [name for name, one in joined.items() if name.startswith(f"{base}-speed-{label}.")]
        place = next((n for n, name in enumerate(alike) if tables.machine(joined[name]) == machine), len(alike))
        name = f"{base}-quality" if part["quality"] else f"{base}-speed-{label}.{place}"
        if name not in joined:
            joined[name] = copy.deepcopy(part)
            continue
        whole = joined[name]
        known = {variant["name"] for variant in whole["variants"]}
        whole["variants"] += [variant for variant in part["variants"] if variant["name"] not in known]
        whole["speed"] += part["speed"]
        for entry in part["quality"]:
            same = (one for one in whole["quality"] if tables.same_task(one, entry))
            if (found := next(same, None)) is None:
                whole["quality"].append(copy.deepcopy(entry))
            else:
                found["variants"] += entry["variants"]
    for name, whole in joined.items():
        for entry in whole["quality"]:
            # They lie beside the cells, a file each.
            entry["outputs"] = None
        whole["crossover"] = crossover(whole["speed"])
        yield name.removesuffix(".0"), whole
