"""The tables of a sweep: all plans of a grid on a task, best first, with their speeds on one machine."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from approx.publishing import wording

_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")
_TASK = ("task", "split", "metric", "fraction", "lower_is_better", "examples", "subset", "truncated")
# Older results lack "fast_products".
_PLACE = ("batch", "length", "inputs", "device", "dtype", "mode", "fast_products")
_SPEED = (*_PLACE, "baseline", "crowded")
_TIMES = ("median_ms", "p10_ms", "p90_ms", "peak_mb", "ratio", "interval", "share_of_ceiling", "verdict", "status")


def machine(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record's environment that speeds depend on; speeds of different machines are not compared."""
    return {key: record["environment"].get(key) for key in _MACHINE}


def same_task(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two quality entries are of the same examples."""
    return all(one.get(key) == other.get(key) for key in (*_TASK, "base"))


def collect(outcomes: Sequence[dict[str, Any]], values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Combine the outcomes of all cells.

    Args:
        outcomes: The stored outcome of each cell.
        values: Name of a plan -> the values that the grid chose for it.

    Returns:
        `quality`: a row for each checkpoint, task and plan, with mean and standard deviation over the seeds (null for
        a single seed), best first; `speed`: a row for each plan, length and batch size, with the machine; `failed`: the
        cells that failed, with their errors.
    """
    groups: dict[tuple[Any, ...], list[tuple[Any, dict[str, Any], dict[str, Any]]]] = {}
    speed = []
    for outcome in outcomes:
        if outcome["status"] != "done" or outcome["kind"] not in ("evaluate", "bench"):
            continue
        record, plan = outcome["record"], outcome["plan"]
        about = {"checkpoint": outcome["checkpoint"], "plan": plan, "values": values[plan]}
        for entry in record["quality"]:
            key = (outcome["checkpoint"], plan, str([entry.get(name) for name in (*_TASK, "base")]))
            groups.setdefault(key, []).append((outcome["seed"], entry, about))
        for row in record["speed"]:
            (timed,) = row["variants"]
            speed.append(
                {
                    **about,
                    **{name: row.get(name) for name in _SPEED},
                    "base_ms": row["base"]["median_ms"],
                    **{name: timed.get(name) for name in _TIMES},
                    "machine": machine(record),
                }
            )
    quality = sorted(map(_over_seeds, groups.values()), key=lambda row: (row["checkpoint"], row["task"], row["loss"]))
    failed = [
        {name: outcome[name] for name in ("key", "title", "checkpoint", "error", "exit_code")}
        for outcome in outcomes
        if outcome["status"] != "done"
    ]
    return {"quality": quality, "speed": speed, "failed": failed}


def _over_seeds(group: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    _, task, about = group[0]
    entries = [(seed, entry["variants"][0]) for seed, entry, _ in group]
    differences = [variant["difference"] for _, variant in entries]
    difference = _spread(differences)
    return {
        **about,
        **{name: task.get(name) for name in _TASK},
        "base": task["base"]["scores"][task["metric"]],
        "score": _spread([variant["scores"][task["metric"]] for _, variant in entries]),
        "difference": difference,
        "loss": difference["mean"] if task.get("lower_is_better") else -difference["mean"],
        # With several seeds, the standard deviation is reported instead.
        "interval": entries[0][1]["interval"] if len(entries) == 1 else None,
        "verdicts": dict(Counter(variant["verdict"] for _, variant in entries)),
        "by_seed": [
            {
                "seed": seed,
                **{name: variant[name] for name in ("scores", "difference", "interval", "p_value", "verdict")},
            }
            for seed, variant in entries
        ],
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None, "seeds": len(values)}


def layout(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Format a table for each checkpoint, task and machine, sorted by loss, then by speed.

    Returns:
        `title`, `columns` and `rows` as text, and `lines`: the same as values by name.
    """
    checkpoints = list(dict.fromkeys(row["checkpoint"] for row in [*results["quality"], *results["speed"]]))
    tables = []
    for checkpoint in checkpoints:
        quality = [row for row in results["quality"] if row["checkpoint"] == checkpoint]
        speed = [row for row in results["speed"] if row["checkpoint"] == checkpoint]
        tasks = [row for number, row in enumerate(quality) if not any(_alike(row, other) for other in quality[:number])]
        machines = [row["machine"] for row in speed]
        machines = [one for number, one in enumerate(machines) if one not in machines[:number]]
        for task in tasks or [None]:
            rows = [row for row in quality if task is not None and _alike(row, task)]
            for place in machines or [None]:
                timed = [row for row in speed if row["machine"] == place]
                tables.append(_table(checkpoint, task, rows, timed))
    return tables


def _alike(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in (*_TASK, "base"))


def _table(
    checkpoint: str, task: dict[str, Any] | None, quality: list[dict[str, Any]], speed: list[dict[str, Any]]
) -> dict[str, Any]:
    places = sorted({_place(row) for row in speed})
    names = list(dict.fromkeys(row["plan"] for row in [*quality, *speed]))
    lines = []
    for name in names:
        scored = next((row for row in quality if row["plan"] == name), None)
        timed = {_place(row): row for row in speed if row["plan"] == name}
        lines.append((name, scored, [timed.get(place) for place in places]))
    lines.sort(key=lambda line: (line[1]["loss"] if line[1] else float("inf"), -_last_ratio(line[2])))
    several = len({place[2:] for place in places}) > 1 or len({place[0] for place in places}) > 1
    columns = ["plan"]
    if task is not None:
        unit = f"{task['metric']} %" if task["fraction"] else task["metric"]
        columns += [unit, "difference", "sd", "seeds", "95 %", "verdict"]
    columns += [f"×, {_column(place, several)}" for place in places]
    return {
        "title": "; ".join(_headings(checkpoint, task, speed)),
        "columns": columns,
        "rows": [
            [name, *(_quality_words(scored, task) if task else []), *map(_speed_words, timed)]
            for name, scored, timed in lines
        ],
        "lines": [
            {
                "checkpoint": checkpoint,
                "plan": name,
                **({} if task is None else {key: task[key] for key in (*_TASK, "base")}),
                **({} if scored is None else _quality_values(scored)),
                **({"machine": machine_words(speed[0]["machine"])} if speed else {}),
                **{
                    f"ratio, {_column(place, several)}": row and row["ratio"]
                    for place, row in zip(places, timed, strict=True)
                },
                **next(row["values"] for row in [*quality, *speed] if row["plan"] == name),
            }
            for name, scored, timed in lines
        ],
    }


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    *others, fast = _PLACE
    return (*(str(row[key]) if key not in ("batch", "length") else row[key] for key in others), bool(row.get(fast)))


def _last_ratio(timed: list[dict[str, Any] | None]) -> float:
    return next((row["ratio"] for row in reversed(timed) if row and row["ratio"]), 0.0)


def _column(place: tuple[Any, ...], several: bool) -> str:
    batch, length, inputs, device, dtype, _, fast = place
    setting = f", batch {batch}, {inputs}, {dtype}, {device}" if several else ""
    return f"{length} tokens{setting}" + ", fast products" * fast


def machine_words(place: dict[str, Any]) -> str:
    """Describe the machine of a speed measurement."""
    threads = f"{place['threads']} thread{'s' if place['threads'] != 1 else ''}"
    return ", ".join(
        str(part) for part in (place["gpu"], place["processor"], threads, f"torch {place['torch']}") if part
    )


def _headings(checkpoint: str, task: dict[str, Any] | None, speed: list[dict[str, Any]]) -> list[str]:
    parts = [checkpoint]
    if task is not None:
        scale = wording.scale(task)
        exact = f"{task['base'] * scale:.{1 if scale > 1 else 3}f}"
        parts.append(f"{task['task']}, {task['split']}: {wording.share_of_examples(task)}, exact attention {exact}")
    if speed:
        parts.append(f"times exact attention's speed on {machine_words(speed[0]['machine'])}")
    return parts


def _quality_words(row: dict[str, Any] | None, task: dict[str, Any]) -> list[str]:
    if row is None:
        return [""] * 6
    scale, digits = wording.scale(task), 1 if wording.scale(task) > 1 else 3
    seeds, interval = row["difference"]["seeds"], row["interval"]
    several = len(row["verdicts"]) > 1
    return [
        f"{row['score']['mean'] * scale:.{digits}f}",
        f"{row['difference']['mean'] * scale:+.{digits}f}",
        "" if row["difference"]["sd"] is None else f"{row['difference']['sd'] * scale:.{digits + 1}f}",
        str(seeds) if seeds > 1 else "",
        "" if interval is None else f"{interval[0] * scale:.{digits + 1}f} … {interval[1] * scale:.{digits + 1}f}",
        ", ".join(
            f"{verdict} ({count} of {seeds})" if several else verdict for verdict, count in row["verdicts"].items()
        ),
    ]


def _speed_words(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return wording.times(row["ratio"]) if row["status"] == "ok" and row["ratio"] else row["status"]


def _quality_values(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["interval"] or (None, None)
    return {
        "score": row["score"]["mean"],
        "score_sd": row["score"]["sd"],
        "difference": row["difference"]["mean"],
        "difference_sd": row["difference"]["sd"],
        "seeds": row["difference"]["seeds"],
        "low": low,
        "high": high,
        "verdict": ", ".join(row["verdicts"]),
    }


def comma_separated(results: dict[str, Any]) -> str:
    """Render a sweep as CSV: the lines of all its tables, with a column for each key of the grid."""
    lines = [line for table in layout(results) for line in table["lines"]]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def markdown(results: dict[str, Any]) -> str:
    """Render a sweep as Markdown."""
    parts = [f"# {results['title']}"]
    if results["notice"]:
        parts.append(f"*{results['notice']}*")
    for table in layout(results):
        aligned = ["---"] + ["--:"] * (len(table["columns"]) - 1)
        lines = [table["columns"], aligned, *table["rows"]]
        parts.append("\n".join([f"{table['title']}:", "", *(f"| {' | '.join(map(_cell, line))} |" for line in lines)]))
    if results["failed"]:
        failures = [f"- {one['title']}: {' '.join(one['error'].split())}" for one in results["failed"]]
        parts.append("\n".join(["Failed; the next sweep tries these cells again:", "", *failures]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
