"""Measured figures as tables: quality against the base, speed against exact attention."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from approx.cli.terminal import table
from approx.publishing import wording
from approx.recipe import BASE, CEILING

_SPEED = ("batch", "tokens", "", "ms", "speed-up", "95 %", "of ceiling", "MB", "verdict")
# Short enough for a terminal of 80 columns; the record has the full words.
_VERDICTS = {"exact is better here": "stay exact"}


def quality_table(entry: dict[str, Any]) -> Table:
    """One task: the score of the base, and how each variant differs from it."""
    subset = ", a subset" if entry["subset"] else ""
    cut = f", {entry['truncated']} of them cut" if entry["truncated"] else ""
    metric, fraction = entry["metric"], entry.get("fraction", True)
    scale, digits = (100, 1) if fraction else (1, 3)
    rows = [
        [
            BASE,
            _score(entry["base"]["scores"][metric], scale),
            "",
            _interval(entry["base"]["interval"], scale, digits + 1),
            "",
            "",
            "",
        ]
    ]
    for row in entry["variants"]:
        needed = f" (needs about {row['needed_examples']:,} examples)" if row["needed_examples"] else ""
        rows.append(
            [
                row["name"],
                _score(row["scores"][metric], scale),
                f"{scale * row['difference']:+.{digits}f}",
                _interval(row["interval"], scale, digits + 1),
                row["verdict"] + needed,
                _approximated(row, entry),
                _p_value(row.get("p_adjusted")),
            ]
        )
        if row.get("seeds"):
            rows.append([*_over_seeds(row, scale, digits), "", "", ""])
    return table(
        ["", f"{metric} %" if fraction else metric, "difference", "95 %", "verdict", "approximated", "p (Holm)"],
        rows,
        title="; ".join(
            [f"{entry['task']}, {entry['split']}: {entry['examples']} examples{subset}{cut}", *entry.get("notes", ())]
        ),
    )


def speed_tables(speed: list[dict[str, Any]]) -> list[Table]:
    """All lengths and batch sizes: exact attention, none at all, and the variants."""
    if not speed:
        return []
    first = speed[0]
    inputs = " and ".join(dict.fromkeys(entry["inputs"] for entry in speed))
    title = f"Median time of one forward pass: {inputs} inputs, {first['dtype']} on {first['device']}"
    if first["device"] == "cpu":
        title += f", {first['threads']} thread{'s'[: first['threads'] > 1]}"
    title += ", fast products" * first.get("fast_products", False)
    return [table(_SPEED, [row for entry in speed for row in _speed_rows(entry)], title=title)]


def _speed_rows(entry: dict[str, Any]) -> Iterator[list[str] | None]:
    timed = [(BASE, entry["base"])]
    if entry["ceiling"]:
        timed.append((CEILING, entry["ceiling"]))
    timed += [(row["name"], row) for row in entry["variants"]]
    for number, (name, row) in enumerate(timed):
        share, verdict = row.get("share_of_ceiling"), row.get("verdict") or ""
        yield [
            "" if number or entry["batch"] == 1 else str(entry["batch"]),
            "" if number else str(entry["length"]),
            name,
            _number(row["median_ms"], 2),
            _number(row.get("ratio"), 2, "×"),
            _interval(row.get("interval")),
            "" if share is None else f"{share:.0%}",
            _number(row.get("peak_mb"), 0),
            row["status"] if row["status"] != "ok" else _VERDICTS.get(verdict, verdict),
        ]
    yield None


def _over_seeds(row: dict[str, Any], scale: float, digits: int) -> list[str]:
    """A row of its own: mean and standard deviation over the draws of a variant, and the lowest and highest score."""
    drawn = row["seeds"]
    if not drawn["scores"]:
        return [f"{row['name']}, any seed", "draws nothing", "", ""]
    spread = "" if drawn["sd"] is None else f" ± {scale * drawn['sd']:.{digits}f}"
    between = [drawn["low"], drawn["high"]]
    score = _score(drawn["mean"], scale) + spread
    return [f"{row['name']}, {len(drawn['scores'])} seeds", score, "", _interval(between, scale, digits)]


def _approximated(row: dict[str, Any], entry: dict[str, Any]) -> str:
    found = row.get("approximated")
    return "" if found is None else f"{wording.part(found['examples'] / entry['examples'])} of inputs"


def _p_value(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _score(score: float, scale: float) -> str:
    return f"{scale * score:.{1 if scale > 1 else 3}f}"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _interval(interval: list[float] | None, factor: float = 1, digits: int = 2) -> str:
    return "" if interval is None else f"{factor * interval[0]:.{digits}f} … {factor * interval[1]:.{digits}f}"
