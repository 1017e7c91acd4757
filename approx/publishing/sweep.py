"""The tables of a sweep: all plans of a grid on a task, best first, with their speeds on one machine."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from approx.evaluation.record import Quality, QualityVariant, Record, Scores, Speed
from approx.publishing import wording

# The keys of a task that say which examples were scored, and how.
TASK = ("task", "split", "metric", "fraction", "lower_is_better", "examples", "subset", "truncated", "details")
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep, computed or failed.

    Attributes:
        key: Key of its stage.
        title: Name of its stage.
        kind: `base`, `convert`, `heal`, `evaluate` or `bench`.
        checkpoint: Name of its base.
        plan: Name of its plan; None for the base.
        seed: Seed of the mechanisms; None if nothing is random.
        error: Why it failed; None if it did not.
        exit_code: Exit code of the error.
        record: What it measured.
    """

    key: str
    title: str
    kind: str
    checkpoint: str
    plan: str | None
    seed: int | None
    error: str | None = None
    exit_code: int = 0
    record: Record | None = None


@dataclass(frozen=True)
class OverSeeds:
    """A value over seeds; the standard deviation is None for a single seed."""

    mean: float
    sd: float | None
    seeds: int


@dataclass(frozen=True)
class OfSeed:
    """One seed of a plan on a task; see `approx.evaluation.record.QualityVariant`."""

    seed: int | None
    scores: Scores
    difference: float
    interval: list[float] | None
    p_value: float | None
    verdict: str


@dataclass(frozen=True)
class QualityRow:
    """One plan on one task.

    Attributes:
        checkpoint: Name of the base.
        plan: Name of the plan.
        values: The values that the grid chose for the plan.
        base: Score of the base; the keys before it are as in a record.
        score: Score of the plan.
        difference: Its difference from the base.
        loss: The mean difference, positive if the plan is worse.
        interval: Interval of the difference; None with several seeds, whose standard deviation is reported instead.
        verdicts: Verdict -> number of seeds with it.
        by_seed: The seeds.
    """

    checkpoint: str
    plan: str
    values: dict[str, Any]
    task: str
    split: str
    metric: str
    fraction: bool
    lower_is_better: bool
    examples: int
    subset: bool
    truncated: int
    details: str
    base: float
    score: OverSeeds
    difference: OverSeeds
    loss: float
    interval: list[float] | None
    verdicts: dict[str, int]
    by_seed: list[OfSeed]

    @property
    def of(self) -> tuple[Any, ...]:
        """The examples that were scored; rows that differ in them are not compared."""
        return (*(getattr(self, name) for name in TASK), self.base)


@dataclass(frozen=True)
class SpeedRow:
    """One plan at one length and batch size.

    Attributes:
        checkpoint: Name of the base.
        plan: Name of the plan.
        values: The values that the grid chose for the plan.
        base_ms: Median time of the base; the other keys are as in a record.
        machine: The part of the environment that speeds depend on.
    """

    checkpoint: str
    plan: str
    values: dict[str, Any]
    batch: int
    length: int
    inputs: str
    device: str
    dtype: str
    mode: str
    fast_products: bool
    baseline: str
    crowded: bool
    base_ms: float | None
    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    peak_mb: float | None
    ratio: float | None
    interval: list[float] | None
    share_of_ceiling: float | None
    verdict: str | None
    status: str
    machine: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A cell that failed."""

    key: str
    title: str
    checkpoint: str
    error: str
    exit_code: int


@dataclass(frozen=True)
class Results:
    """The results of a sweep's cells.

    Attributes:
        quality: A row for each checkpoint, task and plan, best first.
        speed: A row for each plan, length and batch size.
        failed: The cells that failed.
    """

    quality: list[QualityRow]
    speed: list[SpeedRow]
    failed: list[Failed]

    def to_data(self) -> dict[str, Any]:
        """As plain data, for `sweep.json`."""
        return asdict(self)


def machine(record: Record) -> dict[str, Any]:
    """The part of a record's environment that speeds depend on; speeds of different machines are not compared."""
    return {key: record.environment.get(key) for key in _MACHINE}


def same_task(one: Quality, other: Quality) -> bool:
    """Whether two quality entries are of the same examples."""
    return _examples(one) == _examples(other)


def collect(cells: Sequence[Cell], values: Mapping[str, dict[str, Any]]) -> Results:
    """Combine the cells of a sweep.

    Args:
        cells: The cells that were computed or failed.
        values: Name of a plan -> the values that the grid chose for it.
    """
    groups: dict[str, list[tuple[Cell, Quality]]] = {}
    speed = []
    for cell in cells:
        if cell.kind not in ("evaluate", "bench") or cell.record is None or cell.plan is None:
            continue
        for entry in cell.record.quality:
            groups.setdefault(str((cell.checkpoint, cell.plan, _examples(entry))), []).append((cell, entry))
        for row in cell.record.speed:
            speed.append(_timed(row, cell.checkpoint, cell.plan, values[cell.plan], machine(cell.record)))
    quality = [_over_seeds(group, values) for group in groups.values()]
    failed = [
        Failed(cell.key, cell.title, cell.checkpoint, cell.error, cell.exit_code)
        for cell in cells
        if cell.error is not None
    ]
    return Results(sorted(quality, key=lambda row: (row.checkpoint, row.task, row.loss)), speed, failed)


def _examples(task: Quality) -> tuple[Any, ...]:
    return (*(getattr(task, name) for name in TASK), task.base.scores, task.base.interval)


def _timed(row: Speed, checkpoint: str, plan: str, values: dict[str, Any], place: dict[str, Any]) -> SpeedRow:
    (timed,) = row.variants
    believed = row.believed(timed)
    return SpeedRow(
        checkpoint=checkpoint,
        plan=plan,
        values=values,
        batch=row.batch,
        length=row.length,
        inputs=row.inputs,
        device=row.device,
        dtype=row.dtype,
        mode=row.mode,
        fast_products=row.fast_products,
        baseline=row.baseline,
        crowded=row.crowded,
        base_ms=row.base.median_ms,
        median_ms=timed.median_ms,
        p10_ms=timed.p10_ms,
        p90_ms=timed.p90_ms,
        peak_mb=timed.peak_mb,
        ratio=believed.ratio,
        interval=believed.interval,
        share_of_ceiling=timed.share_of_ceiling,
        verdict=row.verdict(timed),
        status=timed.status,
        machine=place,
    )


def _over_seeds(group: list[tuple[Cell, Quality]], values: Mapping[str, dict[str, Any]]) -> QualityRow:
    cell, task = group[0]
    entries = [(one.seed, entry.variants[0]) for one, entry in group]
    variants = [variant for _, variant in entries]
    difference = _spread([variant.difference for variant in variants])
    plan = str(cell.plan)
    return QualityRow(
        checkpoint=cell.checkpoint,
        plan=plan,
        values=values[plan],
        task=task.task,
        split=task.split,
        metric=task.metric,
        fraction=task.fraction,
        lower_is_better=task.lower_is_better,
        examples=task.examples,
        subset=task.subset,
        truncated=task.truncated,
        details=task.details,
        base=task.base.scores[task.metric],
        score=_spread([variant.scores[task.metric] for variant in variants]),
        difference=difference,
        loss=difference.mean if task.lower_is_better else -difference.mean,
        interval=variants[0].interval if len(variants) == 1 else None,
        verdicts=dict(Counter(variant.verdict for variant in variants)),
        by_seed=[_of_seed(seed, variant) for seed, variant in entries],
    )


def _of_seed(seed: int | None, entry: QualityVariant) -> OfSeed:
    return OfSeed(seed, entry.scores, entry.difference, entry.interval, entry.p_value, entry.verdict)


def _spread(values: list[float]) -> OverSeeds:
    return OverSeeds(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


class Table(NamedTuple):
    """One table of a sweep.

    Attributes:
        title: What it is of.
        columns: Headings.
        rows: The cells as text.
        lines: The same as values by name.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    lines: list[dict[str, Any]]


class Place(NamedTuple):
    """Where a speed was measured; sorts by batch size and length."""

    batch: int
    length: int
    inputs: str
    device: str
    dtype: str
    mode: str
    fast_products: bool


def layout(results: Results) -> list[Table]:
    """Format a table for each checkpoint, task and machine, sorted by loss, then by speed."""
    checkpoints = list(dict.fromkeys(row.checkpoint for row in [*results.quality, *results.speed]))
    tables = []
    for checkpoint in checkpoints:
        quality = [row for row in results.quality if row.checkpoint == checkpoint]
        speed = [row for row in results.speed if row.checkpoint == checkpoint]
        tasks = list({row.of: row for row in quality}.values())
        machines = [row.machine for row in speed]
        machines = [one for number, one in enumerate(machines) if one not in machines[:number]]
        for task in tasks or [None]:
            rows = [row for row in quality if task is not None and row.of == task.of]
            for place in machines or [None]:
                timed = [row for row in speed if row.machine == place]
                tables.append(_table(checkpoint, task, rows, timed))
    return tables


def _table(checkpoint: str, task: QualityRow | None, quality: list[QualityRow], speed: list[SpeedRow]) -> Table:
    places = sorted({_place(row) for row in speed})
    names = list(dict.fromkeys(row.plan for row in [*quality, *speed]))
    lines: list[tuple[str, QualityRow | None, list[SpeedRow | None]]] = []
    for name in names:
        scored = next((row for row in quality if row.plan == name), None)
        timed = {_place(row): row for row in speed if row.plan == name}
        lines.append((name, scored, [timed.get(place) for place in places]))
    lines.sort(key=lambda line: (line[1].loss if line[1] else float("inf"), -_last_ratio(line[2])))
    several = len({place[2:] for place in places}) > 1 or len({place.batch for place in places}) > 1
    columns = ["plan"]
    if task is not None:
        unit = f"{task.metric} %" if task.fraction else task.metric
        columns += [unit, "difference", "sd", "seeds", "95 %", "verdict"]
    columns += [f"×, {_column(place, several)}" for place in places]
    return Table(
        title="; ".join(_headings(checkpoint, task, speed)),
        columns=columns,
        rows=[
            [name, *(_quality_words(scored, task) if task else []), *map(_speed_words, timed)]
            for name, scored, timed in lines
        ],
        lines=[
            {
                "checkpoint": checkpoint,
                "plan": name,
                **({} if task is None else dict(zip((*TASK, "base"), task.of, strict=True))),
                **({} if scored is None else _quality_values(scored)),
                **({"machine": machine_words(speed[0].machine)} if speed else {}),
                **{
                    f"ratio, {_column(place, several)}": row and row.ratio
                    for place, row in zip(places, timed, strict=True)
                },
                **next(row.values for row in [*quality, *speed] if row.plan == name),
            }
            for name, scored, timed in lines
        ],
    )


def _place(row: SpeedRow) -> Place:
    return Place(row.batch, row.length, row.inputs, row.device, row.dtype, row.mode, row.fast_products)


def _last_ratio(timed: list[SpeedRow | None]) -> float:
    return next((row.ratio for row in reversed(timed) if row and row.ratio), 0.0)


def _column(place: Place, several: bool) -> str:
    setting = f", batch {place.batch}, {place.inputs}, {place.dtype}, {place.device}" if several else ""
    return f"{place.length} tokens{setting}" + ", fast products" * place.fast_products


def machine_words(place: dict[str, Any]) -> str:
    """Describe the machine of a speed measurement."""
    threads = f"{place['threads']} thread{'s' if place['threads'] != 1 else ''}"
    return ", ".join(
        str(part) for part in (place["gpu"], place["processor"], threads, f"torch {place['torch']}") if part
    )


def _headings(checkpoint: str, task: QualityRow | None, speed: list[SpeedRow]) -> list[str]:
    parts = [checkpoint]
    if task is not None:
        scale = wording.scale(task)
        exact = f"{task.base * scale:.{1 if scale > 1 else 3}f}"
        parts.append(f"{task.task}, {task.split}: {wording.share_of_examples(task)}, exact attention {exact}")
    if speed:
        parts.append(f"times exact attention's speed on {machine_words(speed[0].machine)}")
    return parts


def _quality_words(row: QualityRow | None, task: QualityRow) -> list[str]:
    if row is None:
        return [""] * 6
    scale, digits = wording.scale(task), 1 if wording.scale(task) > 1 else 3
    seeds, sd, interval = row.difference.seeds, row.difference.sd, row.interval
    several = len(row.verdicts) > 1
    return [
        f"{row.score.mean * scale:.{digits}f}",
        f"{row.difference.mean * scale:+.{digits}f}",
        "" if sd is None else f"{sd * scale:.{digits + 1}f}",
        str(seeds) if seeds > 1 else "",
        "" if interval is None else f"{interval[0] * scale:.{digits + 1}f} … {interval[1] * scale:.{digits + 1}f}",
        ", ".join(f"{verdict} ({count} of {seeds})" if several else verdict for verdict, count in row.verdicts.items()),
    ]


def _speed_words(row: SpeedRow | None) -> str:
    if row is None:
        return ""
    return wording.times(row.ratio) if row.ratio else row.verdict or row.status


def _quality_values(row: QualityRow) -> dict[str, Any]:
    low, high = row.interval or (None, None)
    return {
        "score": row.score.mean,
        "score_sd": row.score.sd,
        "difference": row.difference.mean,
        "difference_sd": row.difference.sd,
        "seeds": row.difference.seeds,
        "low": low,
        "high": high,
        "verdict": ", ".join(row.verdicts),
    }


def comma_separated(results: Results) -> str:
    """Render a sweep as CSV: the lines of all its tables, with a column for each key of the grid."""
    lines = [line for table in layout(results) for line in table.lines]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def markdown(title: str, notice: str | None, results: Results) -> str:
    """Render a sweep as Markdown."""
    parts = [f"# {wording.cell(title)}"]
    if notice:
        parts.append(f"*{wording.cell(notice)}*")
    for table in layout(results):
        aligned = ["---"] + ["--:"] * (len(table.columns) - 1)
        lines = [table.columns, aligned, *table.rows]
        parts.append(
            "\n".join(
                [f"{wording.cell(table.title)}:", "", *(f"| {' | '.join(map(wording.cell, line))} |" for line in lines)]
            )
        )
    if results.failed:
        failures = [f"- {wording.cell(one.title)}: {wording.cell(one.error)}" for one in results.failed]
        parts.append("\n".join(["Failed; the next sweep tries these cells again:", "", *failures]))
    return "\n\n".join(parts) + "\n"
