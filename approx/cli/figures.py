"""Tables of results: quality against the base, speed against exact attention."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from approx.cli.terminal import table
from approx.evaluation.record_model import Quality
from approx.evaluation.record_speed import Ratio, Speed, SpeedVariant, Timing
from approx.publishing import tables, wording
from approx.recipe import BASE, CEILING

_SPEED = ("batch", "tokens", "", "ms", "speed-up", "95 %", "of ceiling", "MB", "verdict")
_DECODING = ("batch", "prompt", "", "tokens/s", "speed-up", "95 %", "of ceiling", "cache MB", "verdict")
# The table must fit 80 columns.
_VERDICTS = {"exact is better here": "stay exact"}


_PASSED = {True: "passed", False: "FAILED", None: "does not apply"}


def checks_table(checks: list[dict[str, Any]]) -> Table:
    """The checks of a written folder."""
    rows = [[check["name"], _PASSED[check["passed"]], check["detail"]] for check in checks]
    return table(["check", "result", "detail"], rows)


def quality_table(entry: Quality) -> Table:
    """The scores of one task: the base, and the difference of each variant from it."""
    made = tables.quality_table(entry)
    rows = [[BASE, made["base"]["score"], "", made["base"]["interval"], "", "", ""]]
    for row in made["rows"]:
        verdict = row["verdict"] + (f" (needs {row['needed']})" if row["needed"] else "")
        about = [verdict, row["approximated"].partition(",")[0], row["p_adjusted"] or ""]
        rows.append([row["name"], row["score"], row["difference"], row["interval"], *about])
        if drawn := row["seeds"]:
            rows.append([drawn["name"], drawn["score"], drawn["difference"], drawn["text"], "", "", ""])
    return table(
        ["", made["metric"], "difference", made["confidence"], "verdict", "approximated", "p (Holm)"],
        rows,
        title=f"{made['task']}, {made['split']}: {made['examples']}",
    )


def speed_tables(speed: list[Speed]) -> list[Table]:
    """The times at all lengths and batch sizes: exact attention, no attention, and the variants; a table for each mode."""
    modes = {entry.mode: [row for row in speed if row.mode == entry.mode] for entry in speed}
    return [_speed_table(rows) for rows in modes.values()]


def _speed_table(speed: list[Speed]) -> Table:
    first = speed[0]
    decoded = dict.fromkeys(str(entry.new_tokens) for entry in speed)
    what = "Median time of one forward pass" if first.mode == "forward" else f"Decoding of {', '.join(decoded)} tokens"
    inputs = " and ".join(dict.fromkeys(entry.inputs for entry in speed))
    title = f"{what}: {inputs} inputs, {first.dtype} on {first.device}"
    if first.device == "cpu":
        title += f", {first.threads} thread{'s'[: first.threads > 1]}"
    title += ", fast products" * first.fast_products
    columns = _SPEED if first.mode == "forward" else _DECODING
    return table(columns, [row for entry in speed for row in _speed_rows(entry)], title=title)


def _speed_rows(entry: Speed) -> Iterator[list[str] | None]:
    timed: list[tuple[str, Timing]] = [(BASE, entry.base)]
    if entry.ceiling:
        timed.append((CEILING, entry.ceiling))
    timed += [(row.name, row) for row in entry.variants]
    forward = entry.mode == "forward"
    for number, (name, row) in enumerate(timed):
        ratio, interval = (row.ratio, row.interval) if isinstance(row, Ratio) else (None, None)
        share, verdict = (row.share_of_ceiling, row.verdict or "") if isinstance(row, SpeedVariant) else (None, "")
        yield [
            "" if number or entry.batch == 1 else str(entry.batch),
            "" if number else str(entry.length),
            name,
            wording.milliseconds(row.median_ms if forward else row.tokens_per_second),
            wording.times(ratio),
            wording.between(interval),
            wording.percent(share),
            wording.milliseconds(row.peak_mb if forward else row.cache_mb),
            row.status if row.status != "ok" else _VERDICTS.get(verdict, verdict),
        ]
    yield None
