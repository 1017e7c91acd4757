"""Make a report from records: JSON, Markdown, CSV and one offline HTML page, of one record or comparing several."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from approx.errors import ApproxError, Exit
from approx.evaluation.record import (
    BUSY,
    Checkpoint,
    Quality,
    QualityVariant,
    Ratio,
    Record,
    Speed,
    SpeedVariant,
    Timing,
    in_lines,
    lacking,
)
from approx.publishing import wording
from approx.publishing.plots import (
    INK,
    colours,
    quality_figure,
    spans_figure,
    spans_table,
    speed_figure,
    training_figure,
    training_table,
)
from approx.publishing.summary import (
    advice,
    answers,
    apart,
    joined,
    recommendation,
    same_models,
    speed_groups,
    variant_of,
)
from approx.publishing.tables import layer_error_table, plan_lines, plan_words, quality_table, speed_table
from approx_kernels.runtime.atomic_file import write_whole

_ENVIRONMENT_LABELS = {
    "approx": "approx",
    "git_commit": "git commit",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "triton": "Triton",
    "python": "Python",
    "platform": "platform",
    "processor": "processor",
    "cores": "cores",
    "threads": "threads",
    "gpu": "GPU",
}


def html(records: list[Record]) -> str:
    """Render records as one offline page."""
    return _render("page.html.j2", records, autoescape=True)


def markdown(records: list[Record]) -> str:
    """Render records as Markdown: the same words and tables, without the plots."""
    return _render("report.md.j2", records, autoescape=False)


def _render(template: str, records: list[Record], autoescape: bool) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = wording.cell
    titles = [record.title for record in records]
    title = titles[0] if len(titles) == 1 else f"{len(titles)} reports"
    reasons = apart(records)
    sections = [_section(record, f"r{place + 1}") | {"apart": reasons[place]} for place, record in enumerate(records)]
    return environment.get_template(template).render(title=title, sections=sections)


def _notice(record: Record) -> str | None:
    parts = [] if record.notice is None else [record.notice]
    if older := list(lacking(record).values()):
        parts.append(
            f"Made by an earlier version, without {', '.join(older)}: verdicts may be surer than the examples allow. "
            "Measure again."
        )
    return " ".join(parts) or None


def _section(record: Record, identity: str) -> dict[str, Any]:
    """The content of one record's section; `identity` is the prefix of all its ids."""
    groups = speed_groups(record.speed)
    tasks = record.quality
    return {
        "id": identity,
        "title": record.title,
        "notice": _notice(record),
        "checkpoint": _checkpoint(record.checkpoint),
        "colours": colours(record),
        "recommendation": recommendation(record),
        "answers": answers(record),
        "quality": [quality_table(task) for task in tasks],
        "speed": [
            speed_table(rows, record.crossover) | {"figure": speed_figure(rows, record, f"{identity}-speed-{number}")}
            for number, rows in enumerate(groups)
        ],
        "both": _both(record, groups, tasks, identity),
        "trainings": [
            training_table(trained)
            | {
                "figure": training_figure(
                    trained, colours(record).get(trained.name, INK), f"{identity}-training-{number}"
                )
            }
            for number, trained in enumerate(record.trainings)
        ],
        "spans": {
            "rows": spans_table(record.variants),
            "figure": spans_figure(record.variants, f"{identity}-spans"),
        },
        "plans": [
            {
                "name": variant.name,
                "verified": variant.verified,
                "lines": plan_lines(variant),
                "receipt": _pretty(variant.receipt),
            }
            for variant in record.variants
        ],
        "layer_errors": layer_error_table(record.variants),
        "environment": [
            (_ENVIRONMENT_LABELS.get(key, key), wording.NOTHING if value is None else str(value))
            for key, value in record.environment.items()
        ],
        "recipe": record.recipe,
        "command": record.command,
        "seed": record.seed,
    }


def _both(record: Record, groups: list[list[Speed]], tasks: list[Quality], identity: str) -> list[dict[str, Any]]:
    """Plot quality against speed for each task and setting for which a variant has both."""
    figures = []
    for number, task in enumerate(tasks):
        for place, rows in enumerate(groups):
            drawn = quality_figure(task, rows, record, f"{identity}-both-{number}-{place}")
            if drawn:
                figures.append({"figure": drawn[0], "caption": drawn[1]})
    return figures


def _checkpoint(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    return [
        ("checkpoint", checkpoint.name),
        ("revision", checkpoint.revision or wording.NOTHING),
        ("family", checkpoint.family),
        ("parameters", f"{checkpoint.parameters / 1e6:,.1f} million"),
        ("layers", wording.count(checkpoint.layers)),
        ("positions", wording.count(checkpoint.positions)),
        ("weights (sha256)", checkpoint.weights_sha256 or wording.NOTHING),
        *([("runs in", checkpoint.runtime)] if checkpoint.runtime else []),
    ]


def _pretty(receipt: dict[str, Any] | None) -> str | None:
    return None if receipt is None else json.dumps(receipt, indent=2, ensure_ascii=False)


_MACHINE = ("approx", "python", "torch", "transformers", "triton", "platform", "processor", "cores", "threads", "gpu")


@dataclass(frozen=True)
class Row:
    """One figure of both records.

    Attributes:
        what: The task and its metric, or the setting and the length.
        first: Name of the model in the first record.
        second: Name of the model in the second record.
        values: Its score, or its speed relative to exact attention, in both; null if it is not settled.
        words: The same as text, with interval and verdict against exact attention.
        verdict: What the intervals say about the second against the first.
    """

    what: str
    first: str
    second: str
    values: tuple[float | None, float | None]
    words: tuple[str, str]
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """A comparison of two records.

    Attributes:
        differences: What differs in checkpoint, plan, machine or versions: its name, and its value in each record.
        quality: Scores.
        speed: Speeds relative to exact attention.
        advice: Models for which the advice is not the same: name, and the advice in each record.
    """

    differences: list[tuple[str, str, str]]
    quality: list[Row]
    speed: list[Row]
    advice: list[tuple[str, str, str]]

    def to_data(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return asdict(self)


def compare(first: Record, second: Record) -> Comparison:
    """Compare the models of two records: those with the same weights and plan, else the same name, else the only ones."""
    pairs = _pairs(first, second)
    return Comparison(
        differences=_differences(first, second, pairs),
        quality=[
            _quality_row(task, entry, other, of_other)
            for one, two in pairs
            for task in first.quality
            for other in second.quality
            if (task.task, task.split, task.metric) == (other.task, other.split, other.metric)
            and (entry := variant_of(task.variants, one))
            and (of_other := variant_of(other.variants, two))
        ],
        speed=[
            _speed_row(row, entry, other, of_other)
            for one, two in pairs
            for row in first.speed
            for other in second.speed
            if _at(row) == _at(other)
            and (entry := variant_of(row.variants, one))
            and (of_other := variant_of(other.variants, two))
        ],
        advice=_advice(first, second, pairs),
    )


def _pairs(first: Record, second: Record) -> list[tuple[str, str]]:
    same = {one: two for two, one in same_models(first, second).items()}
    names = {variant.name for variant in second.variants}
    pairs = [(one.name, same.get(one.name, one.name)) for one in first.variants]
    pairs = [(one, two) for one, two in pairs if two in names]
    if not pairs and len(first.variants) == len(second.variants) == 1:
        return [(first.variants[0].name, second.variants[0].name)]
    return pairs


def _differences(first: Record, second: Record, pairs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    def facts(record: Record, names: Sequence[str]) -> dict[str, str]:
        found = {
            "base": record.checkpoint.name,
            "weights of the base": _hash(record.checkpoint.weights_sha256),
            "recipe": _hash(record.recipe.sha256 if record.recipe else None),
            "seed": str(record.seed),
        }
        for number, name in enumerate(names):
            variant = next(one for one in record.variants if one.name == name)
            found[f"plan of {pairs[number][0]}"] = plan_words(variant)
            found[f"weights of {pairs[number][0]}"] = _hash(variant.weights_sha256)
            found[f"checks of {pairs[number][0]}"] = "verified" if variant.verified else "not verified"
        return found | {key: str(record.environment.get(key) or wording.NOTHING) for key in _MACHINE}

    one, two = facts(first, [name for name, _ in pairs]), facts(second, [name for _, name in pairs])
    return [(name, one[name], two[name]) for name in one if one[name] != two[name]]


def _advice(first: Record, second: Record, pairs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    advices = [{one.name: f"{one.decision}: {one.reason}" for one in advice(record)} for record in (first, second)]
    pairs_of_advice = (
        (one, advices[0].get(one, wording.NOTHING), advices[1].get(two, wording.NOTHING)) for one, two in pairs
    )
    return [(name, before, after) for name, before, after in pairs_of_advice if before != after]


def _hash(text: str | None) -> str:
    return (text or wording.NOTHING)[:12]


def _at(row: Speed) -> tuple[Any, ...]:
    return wording.setting(row), row.inputs, row.length


def _quality_row(task: Quality, entry: QualityVariant, other: Quality, of_other: QualityVariant) -> Row:
    sign = -1 if task.lower_is_better else 1
    verdict = _verdict(entry.interval, of_other.interval, ("better", "worse")[:: 1 if sign > 0 else -1])
    known = all("settings" in one.model_fields_set for one in (task, other))
    if (task.examples, task.notes) != (other.examples, other.notes) or (known and task.settings != other.settings):
        verdict = "not comparable: other examples"
    elif task.base.scores != other.base.scores:
        verdict = "not comparable: another base"
    digits = 2 if task.fraction else 3

    def words(one: Quality, scored: QualityVariant) -> str:
        score = wording.score(scored.scores.get(one.metric), one)
        return f"{score} ({wording.between(scored.interval, digits, wording.scale(one))}), {scored.verdict}"

    return Row(
        f"{task.task}, {task.split}: {task.metric}",
        entry.name,
        of_other.name,
        (entry.scores.get(task.metric), of_other.scores.get(task.metric)),
        (words(task, entry), words(other, of_other)),
        verdict,
    )


def _speed_row(row: Speed, entry: SpeedVariant, other: Speed, of_other: SpeedVariant) -> Row:
    one, two = row.believed(entry), other.believed(of_other)
    busy = BUSY in (row.verdict(entry), other.verdict(of_other))

    def words(seen: Ratio, verdict: str | None) -> str:
        if not seen.ratio:
            return verdict or wording.NOTHING
        return f"{wording.times(seen.ratio)} ({wording.between(seen.interval)}), {verdict}"

    return Row(
        f"{wording.setting(row)}: {wording.count(row.length)} tokens",
        entry.name,
        of_other.name,
        (one.ratio, two.ratio),
        (words(one, row.verdict(entry)), words(two, other.verdict(of_other))),
        BUSY if busy else _verdict(one.interval, two.interval, ("faster", "slower")),
    )


def _verdict(first: list[float] | None, second: list[float] | None, words: Sequence[str]) -> str:
    """What two intervals say: a difference is clear only if they do not overlap."""
    if first is None or second is None:
        return "not measured"
    if second[0] > first[1]:
        return words[0]
    return words[1] if second[1] < first[0] else "no clear difference"


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
        "report.json": in_lines(data[0] if len(data) == 1 else data) + "\n",
        "report.md": markdown(records),
        "quality.csv": quality_csv(records),
        "speed.csv": speed_csv(records),
        "index.html": html(records),
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
    """Raise if a file would be replaced that is not next to a page of a report."""
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


def quality_csv(records: list[Record]) -> str:
    """A row for each variant and task of some records."""
    return _csv(_QUALITY, [line for record in records for line in _quality_lines(record)])


def speed_csv(records: list[Record]) -> str:
    """A row for each contender, batch size and length of some records."""
    return _csv(_SPEED, [line for record in records for line in _speed_lines(record)])


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
