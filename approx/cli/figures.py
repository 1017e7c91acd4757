"""Tables of results: quality against the base, speed against exact attention."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table

from approx.cli.tables import table
from approx.evaluation.options import BASE, CEILING
from approx.evaluation.record import BUSY, Quality, Relative, Speed, SpeedVariant, Timing
from approx.publishing import tables, wording
from approx.publishing.report import Comparison

if TYPE_CHECKING:
    from approx.checkpoints.history import Check

_SPEED = ("batch", "tokens", "", "ms", "speed-up", "95 %", "of ceiling", "MB", "verdict")
_DECODING = ("batch", "prompt", "", "tokens/s", "speed-up", "95 %", "of ceiling", "cache MB", "prompt ms", "verdict")
_REMEDY = (
    "Too few rounds were undisturbed, or they vary too much. Time again on an idle machine: `approx bench --wait-idle "
    "600` waits for one."
)
_PASSED = {True: "passed", False: "FAILED", None: "does not apply"}


def checks_table(checks: "list[Check]") -> Table:
    """The checks of a written folder."""
    rows = [[check.name, _PASSED[check.passed], check.detail] for check in checks]
    return table(["check", "result", "detail"], rows)


def quality_tables(entry: Quality) -> list[Table]:
    """The scores of one task, and what the models carried from segment to segment if they read texts in order."""
    made = tables.quality_table(entry)
    shown = [_quality_table(entry, made)]
    if rows := [list(row.values()) for row in made["carried"]]:
        title = "Carried from one segment of a text to the next; the state did not grow after so many tokens"
        shown.append(table(["", "state", "reached after", "tokens", "per token"], rows, title=title))
    return shown


def _quality_table(entry: Quality, made: dict[str, Any]) -> Table:
    """The base, and the difference of each variant from it."""
    others = made["others"]
    base, blank = made["base"], [""] * len(others)
    rows = [[BASE, base["score"], *base["others"], "", base["interval"], "", base["verdict"], "", ""]]
    if made["chance"]:
        rows.insert(0, ["chance", made["chance"], *blank, *[""] * 6])
    for row in made["rows"]:
        verdict = row["verdict"] + (f" (needs {row['needed']})" if row["needed"] else "")
        about = [row["margin"], verdict, row["approximated"].partition(",")[0], row["p_adjusted"] or ""]
        rows.append([row["name"], row["score"], *row["others"], row["difference"], row["interval"], *about])
        for more in row["more"]:
            rows.append([more["name"], more["score"], *blank, more["difference"], "", "", more["text"], "", ""])
    after = ["difference", made["confidence"], "margin", "verdict", "approximated", "p (Holm)"]
    return table(
        ["", *(name.replace("_", " ") for name in (made["metric"], *others)), *after],
        rows,
        title=f"{made['task']}, {made['split']}: {made['examples']}; differences in {made['units']}",
    )


def speed_tables(speed: list[Speed]) -> list[Table | str]:
    """The times at all lengths and batch sizes, a table for each mode; the remedy where a busy machine left them unsettled."""
    modes = {entry.mode: [row for row in speed if row.mode == entry.mode] for entry in speed}
    return [shown for rows in modes.values() for shown in _speed_table(rows)]


def _speed_table(speed: list[Speed]) -> list[Table | str]:
    first = speed[0]
    decoded = dict.fromkeys(str(entry.new_tokens) for entry in speed)
    what = "Median time of one forward pass" if first.mode == "forward" else f"Decoding of {', '.join(decoded)} tokens"
    inputs = " and ".join(dict.fromkeys(entry.inputs for entry in speed))
    title = f"{what}: {inputs} inputs, {first.dtype} on {first.device}"
    if first.device == "cpu":
        title += f", {first.threads} thread{'s'[: first.threads > 1]}"
    title += ", fast products" * first.fast_products
    columns = _SPEED if first.mode == "forward" else _DECODING
    rows = [row for entry in speed for row in _speed_rows(entry)]
    busy = any(row and row[-1] == BUSY for row in rows)
    return [table(columns, rows, title=title), *([_REMEDY] if busy else [])]


def _speed_rows(entry: Speed) -> Iterator[list[str] | None]:
    timed: list[tuple[str, Timing]] = [(BASE, entry.base)]
    if entry.ceiling:
        timed.append((CEILING, entry.ceiling))
    timed += [(row.name, row) for row in entry.variants]
    forward = entry.mode == "forward"
    for number, (name, row) in enumerate(timed):
        believed = verdict = None
        if isinstance(row, Relative):
            believed = entry.believed(row)
            # For the ceiling, show a verdict only if it is inconclusive.
            verdict = entry.verdict(row) if isinstance(row, SpeedVariant) or not believed.ratio else None
        yield [
            "" if number or entry.batch == 1 else str(entry.batch),
            "" if number else wording.length(str(entry.length), entry.seconds),
            name,
            wording.milliseconds(row.median_ms if forward else row.tokens_per_second),
            wording.times(believed.ratio if believed else None),
            wording.between(believed.interval if believed else None),
            wording.percent(entry.share(row) if isinstance(row, SpeedVariant) else None),
            wording.milliseconds(row.peak_mb if forward else row.cache_mb),
            *([] if forward else [wording.milliseconds(row.prompt_ms)]),
            row.status if row.status != "ok" else verdict or "",
        ]
    yield None


def comparison_tables(made: Comparison) -> list[Table | str]:
    """What differs between two records, their scores and speeds side by side, and the advice where it changed."""
    shown: list[Table | str] = []
    if made.differences:
        shown.append(table(["differs", "first", "second"], made.differences))
    for title, rows in (
        ("Quality; in brackets the interval of the difference from exact attention", made.quality),
        ("Speed relative to exact attention", made.speed),
    ):
        cells = [
            [row.what, row.first if row.first == row.second else f"{row.first} → {row.second}", *row.words, row.verdict]
            for row in rows
        ]
        if cells:
            shown.append(table(["", "model", "first", "second", "the second is"], cells, title=title))
    if made.advice:
        shown.append(table(["advice", "first", "second"], made.advice))
    return shown if made.quality or made.speed else [*shown, "The records have no measurement in common."]
