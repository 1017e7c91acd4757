"""Make a report from records: JSON, Markdown, CSV and one offline HTML page."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx.evaluation.record_model import QualityVariant, Record
from approx.evaluation.record_speed import Ratio, Timing
from approx.publishing import page, wording
from approx.publishing.joining import joined
from approx.publishing.tables import plan_words
from approx_kernels.runtime.atomic_file import write_whole

_QUALITY = (
    *("title", "checkpoint", "task", "split", "metric", "examples", "subset", "truncated", "variant"),
    *("base_score", "score", "difference", "low", "high", "confidence", "test", "p_value", "margin", "verdict"),
    *("needed_examples", "p_adjusted", "seeds", "seeds_mean", "seeds_sd"),
    *("approximated_examples", "approximated_tokens", "approximated_pairs"),
    *("settings", "notes", "tokens_median", "tokens_longest", "fast_products", "plan"),
)
_SPEED = (
    *("title", "checkpoint", "processor", "gpu", "device", "dtype", "threads", "batch", "length", "mode", "inputs"),
    *("baseline", "role", "name", "median_ms", "p10_ms", "p90_ms", "samples", "peak_mb", "ratio", "low", "high"),
    *("share_of_ceiling", "verdict", "status", "chosen", "new_tokens", "fast_products", "plan"),
)
_TASK = {"task", "split", "metric", "examples", "subset", "truncated", "fast_products"}

# The mark of a page that `write_report` made.
_MADE = '<meta name="generator" content="approx">'


def write_report(records: list[Record], out: Path, *, force: bool = False) -> list[Path]:
    """Write report.json, report.md, quality.csv, speed.csv and index.html.

    The same records give the same bytes. Records of the same weights and plans share a section; no plot mixes speeds of
    different machines.

    Args:
        records: From `approx.evaluation.record.load`, in the order to show them.
        out: Folder, created if missing. An older report in it is replaced file by file.
        force: Whether to replace files of these names that are not of a report.

    Returns:
        The written files.

    Raises:
        ApproxError: if there are no records, one is there twice, the folder holds other files of these names, or it
            cannot be written.
    """
    if not records:
        raise ApproxError("A report needs records. Give at least one record file.")
    records, out = joined(records), Path(out)
    data = [record.to_data() for record in records]
    files = {
        "report.json": json.dumps(data[0] if len(data) == 1 else data, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n",
        "report.md": page.markdown(records),
        "quality.csv": _csv(_QUALITY, [line for record in records for line in _quality_lines(record)]),
        "speed.csv": _csv(_SPEED, [line for record in records for line in _speed_lines(record)]),
        "index.html": page.html(records),
    }
    if not force:
        _refuse_foreign([out / name for name in files])
    written = []
    try:
        for name, text in files.items():
            write_whole(out / name, text)
            written.append(out / name)
    except OSError as error:
        raise ApproxError(f"The report cannot be written to {out}: {error.strerror}.", Exit.UNAVAILABLE) from None
    return written


def _refuse_foreign(files: list[Path]) -> None:
    """Raise if a file would be replaced that does not stand beside a page of a report."""
    there = [file for file in files if file.exists()]
    page_of = files[0].parent / "index.html"
    if there and not (page_of.is_file() and _MADE in page_of.read_text(encoding="utf-8", errors="replace")):
        raise ApproxError(
            f"{there[0]} exists and is not of a report. Choose another folder, or replace it with --force.",
            Exit.REFUSED,
        )


def _quality_lines(record: Record) -> list[dict[str, Any]]:
    plans = _plans(record)
    return [
        {
            **entry.to_data(),
            **task.model_dump(include=_TASK),
            **_of(record),
            "settings": json.dumps(task.settings, ensure_ascii=False) if task.settings else None,
            "notes": "; ".join(task.notes),
            "tokens_median": task.tokens and task.tokens.median,
            "tokens_longest": task.tokens and task.tokens.longest,
            "plan": plans.get(entry.name),
            "variant": entry.name,
            "base_score": task.base.scores.get(task.metric),
            "score": entry.scores.get(task.metric),
            **_ends(entry.interval),
            **_seeds(entry),
            **_approximated(entry),
        }
        for task in record.quality
        for entry in task.variants
    ]


def _speed_lines(record: Record) -> list[dict[str, Any]]:
    machine, plans = {key: record.environment.get(key) for key in ("processor", "gpu")}, _plans(record)
    lines = []
    for row in record.speed:
        entries: list[tuple[str, str, Timing]] = [("base", row.baseline, row.base)]
        if row.ceiling:
            entries.append(("ceiling", "attention removed", row.ceiling))
        entries += [("variant", entry.name, entry) for entry in row.variants]
        about = {key: value for key, value in row.to_data().items() if key in _SPEED}
        lines += [
            {
                **about,
                **machine,
                **_of(record),
                **entry.to_data(),
                "role": role,
                "name": name,
                "plan": plans.get(name) if role == "variant" else None,
                **_ends(entry.interval if isinstance(entry, Ratio) else None),
                "chosen": wording.implementations(entry),
            }
            for role, name, entry in entries
        ]
    return lines


def _plans(record: Record) -> dict[str, str]:
    return {variant.name: plan_words(variant) for variant in record.variants}


def _of(record: Record) -> dict[str, Any]:
    return {"title": record.title, "checkpoint": record.checkpoint.name}


def _ends(interval: list[float] | None) -> dict[str, Any]:
    low, high = interval or (None, None)
    return {"low": low, "high": high}


def _seeds(entry: QualityVariant) -> dict[str, Any]:
    seeds = entry.seeds
    if not seeds:
        return {"seeds": None}
    return {"seeds": len(seeds.scores), "seeds_mean": seeds.mean, "seeds_sd": seeds.sd}


def _approximated(entry: QualityVariant) -> dict[str, Any]:
    counts = entry.approximated
    if counts is None:
        return {}
    return {
        "approximated_examples": counts.examples,
        "approximated_tokens": counts.tokens,
        "approximated_pairs": counts.pairs,
    }


def _csv(columns: tuple[str, ...], lines: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in line.items()} for line in lines)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula: names may come from models and recipes of others."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
