"""Make a report from records: JSON, Markdown, CSV and one offline HTML page."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx.publishing import page, wording
from approx_kernels.runtime.atomic_file import write_whole

_QUALITY = (
    *("title", "checkpoint", "task", "split", "metric", "examples", "subset", "truncated", "variant"),
    *("base_score", "score", "difference", "low", "high", "confidence", "test", "p_value", "margin", "verdict"),
    *("needed_examples", "p_adjusted", "seeds", "seeds_mean", "seeds_sd"),
    *("approximated_examples", "approximated_tokens"),
)
_SPEED = (
    *("title", "checkpoint", "processor", "gpu", "device", "dtype", "threads", "batch", "length", "mode", "inputs"),
    *("baseline", "role", "name", "median_ms", "p10_ms", "p90_ms", "samples", "peak_mb", "ratio", "low", "high"),
    *("share_of_ceiling", "verdict", "status", "chosen"),
)


def write_report(records: list[dict[str, Any]], out: Path) -> list[Path]:
    """Write report.json, report.md, quality.csv, speed.csv and index.html.

    The same records give the same bytes. Each record has its own section, so no plot mixes speeds of different
    machines.

    Args:
        records: From `approx.evaluation.record.load`, in the order to show them.
        out: Folder, created if missing. An older report in it is replaced file by file.

    Returns:
        The written files.

    Raises:
        ApproxError: if there are no records, or the folder cannot be written.
    """
    if not records:
        raise ApproxError("A report needs records. Give at least one record file.")
    data = records[0] if len(records) == 1 else records
    files = {
        "report.json": json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": page.markdown(records),
        "quality.csv": _csv(_QUALITY, [line for record in records for line in _quality_lines(record)]),
        "speed.csv": _csv(_SPEED, [line for record in records for line in _speed_lines(record)]),
        "index.html": page.html(records),
    }
    out = Path(out)
    written = []
    try:
        for name, text in files.items():
            write_whole(out / name, text)
            written.append(out / name)
    except OSError as error:
        raise ApproxError(f"The report cannot be written to {out}: {error.strerror}.", Exit.UNAVAILABLE) from None
    return written


def _quality_lines(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **entry,
            **{key: task[key] for key in ("task", "split", "metric", "examples", "subset", "truncated")},
            **_of(record),
            "variant": entry["name"],
            "base_score": task["base"]["scores"].get(task["metric"]),
            "score": entry["scores"].get(task["metric"]),
            **_ends(entry),
            **_seeds(entry),
            **{f"approximated_{key}": value for key, value in (entry.get("approximated") or {}).items()},
        }
        for task in record["quality"]
        for entry in task["variants"]
    ]


def _speed_lines(record: dict[str, Any]) -> list[dict[str, Any]]:
    machine = {key: record["environment"].get(key) for key in ("processor", "gpu")}
    lines = []
    for row in record["speed"]:
        entries = [{"role": "base", "name": row["baseline"], **row["base"]}]
        if row.get("ceiling"):
            entries.append({"role": "ceiling", "name": "attention removed", **row["ceiling"]})
        entries += [{"role": "variant", **entry} for entry in row["variants"]]
        about = {key: value for key, value in row.items() if key in _SPEED}
        lines += [
            {**about, **machine, **_of(record), **entry, **_ends(entry), "chosen": wording.implementations(entry)}
            for entry in entries
        ]
    return lines


def _of(record: dict[str, Any]) -> dict[str, Any]:
    return {"title": record["title"], "checkpoint": record["checkpoint"]["name"]}


def _ends(entry: dict[str, Any]) -> dict[str, Any]:
    low, high = entry.get("interval") or (None, None)
    return {"low": low, "high": high}


def _seeds(entry: dict[str, Any]) -> dict[str, Any]:
    seeds = entry.get("seeds")
    if not seeds:
        return {"seeds": None}
    return {"seeds": len(seeds["scores"]), "seeds_mean": seeds["mean"], "seeds_sd": seeds["sd"]}


def _csv(columns: tuple[str, ...], lines: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()
