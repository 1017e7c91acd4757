"""The tables of a sweep: all plans of a grid on a task, best first, with their speeds on one machine."""

import csv
import io
from typing import Any, NamedTuple

from approx.publishing import wording
from approx.publishing.sweep_rows import TASK, QualityRow, Results, SpeedRow


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
