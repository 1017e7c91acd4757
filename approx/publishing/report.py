"""Make a report from records: JSON, Markdown, CSV and one offline HTML page, of one record or comparing several."""

import base64
import csv
import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from approx.errors import ApproxError, Exit
from approx.evaluation.record import (
    BUSY,
    FOUND,
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
    alone,
    colours,
    layers_figure,
    lengths_figure,
    memory_figure,
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
    conclude,
    figures,
    joined,
    next_step,
    overview,
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
    return _render("page.html.j2", _sections(records))


def markdown(records: list[Record]) -> str:
    """Render records as Markdown: the same words and tables, without the plots."""
    return _render("report.md.j2", _sections(records))


def _sections(records: list[Record]) -> list[dict[str, Any]]:
    reasons = apart(records)
    several = len(records) > 1
    return [
        _section(record, f"r{place + 1}", several) | {"apart": reasons[place]} for place, record in enumerate(records)
    ]


def _render(template: str, sections: list[dict[str, Any]]) -> str:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": wording.cell, "tex": _tex}
    title = sections[0]["title"] if len(sections) == 1 else f"{len(sections)} reports"
    # The one script of a page, which sorts its table, is named by its hash: nothing else may run.
    script = (here / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        title=title, sections=sections, script=Markup(script), script_hash=Markup(digest)
    )


def _tex(text: object) -> str:
    """Escape text for LaTeX."""
    named = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "−": "$-$",
        "×": r"$\times$",
    }
    named |= {one: f"\\{one}" for one in "&%$#_{}"} | {
        "–": "--",
        "…": r"\ldots{}",
        "±": r"$\pm$",
        "<": "$<$",
        ">": "$>$",
    }
    return re.sub(r"[\\~^−×&%$#_{}–…±<>]", lambda found: named[found[0]], " ".join(str(text).split()))


def _notice(record: Record) -> str | None:
    # What a search found is said by the conclusion, which may see it otherwise than the search.
    searched = any(variant.name == FOUND for variant in record.variants)
    return None if searched else record.notice


def _older(record: Record) -> str | None:
    if not (older := list(lacking(record).values())):
        return None
    return (
        f"Made by an earlier version, without {', '.join(older)}: verdicts may be surer than the examples allow. "
        "Measure again."
    )


def _section(record: Record, identity: str, several: bool) -> dict[str, Any]:
    """The content of one record's section, of several or alone; `identity` is the prefix of all its ids."""
    groups, made = speed_groups(record.speed), conclude(record)
    tasks, known, drawn = record.quality, colours(record), dict[str, Markup]()
    chosen = None if made is None else made.chosen

    def kept(name: str, drawing: Markup | None) -> Markup | None:
        if drawing is not None:
            drawn[f"{identity}-{name}" if several else name] = drawing
        return drawing

    both = _both(record, groups, tasks, identity, chosen)
    for number, one in enumerate(both):
        kept(f"quality-against-speed-{number}", one["figure"])
    return {
        "id": identity,
        "title": record.title,
        "notice": _notice(record),
        "older": _older(record),
        "checkpoint": _checkpoint(record.checkpoint),
        "colours": known,
        "recommendation": recommendation(record),
        "next": next_step(record),
        "chosen": chosen,
        "figures": figures(record, chosen) if chosen else [],
        "overview": overview(record),
        "answers": answers(record),
        "quality": [
            quality_table(task)
            | {"lengths": kept(f"lengths-{number}", lengths_figure(task, record, f"{identity}-lengths-{number}"))}
            for number, task in enumerate(tasks)
        ],
        "speed": [
            speed_table(rows, record.crossover)
            | {
                "figure": kept(f"speed-{number}", speed_figure(rows, record, f"{identity}-speed-{number}")),
                "memory": kept(f"memory-{number}", memory_figure(rows, record, f"{identity}-memory-{number}")),
            }
            for number, rows in enumerate(groups)
        ],
        "both": both,
        "trainings": [
            training_table(trained)
            | {
                "figure": kept(
                    f"training-{number}",
                    training_figure(trained, known.get(trained.name, INK), f"{identity}-training-{number}"),
                )
            }
            for number, trained in enumerate(record.trainings)
        ],
        "spans": {
            "rows": spans_table(record.variants),
            "figure": kept("spans", spans_figure(record.variants, f"{identity}-spans")),
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
        "layers": kept("layers", layers_figure(record.variants, f"{identity}-layers")),
        "environment": [
            (_ENVIRONMENT_LABELS.get(key, key), wording.NOTHING if value is None else str(value))
            for key, value in record.environment.items()
        ],
        "recipe": record.recipe,
        "command": record.command,
        "seed": record.seed,
        "drawn": drawn,
    }


def _both(
    record: Record, groups: list[list[Speed]], tasks: list[Quality], identity: str, chosen: str | None
) -> list[dict[str, Any]]:
    """Plot quality against speed for each task and setting for which a variant has both, those of the chosen variant first."""
    found = []
    for number, task in enumerate(tasks):
        for place, rows in enumerate(groups):
            drawn = quality_figure(task, rows, record, f"{identity}-both-{number}-{place}", chosen)
            if drawn:
                open_ = (
                    entry := variant_of(task.variants, chosen or "")
                ) is not None and entry.verdict == "inconclusive"
                found.append((not open_, {"figure": drawn[0], "caption": drawn[1]}))
    return [one for _, one in sorted(found, key=lambda one: one[0])]


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
_LAYERS = ("title", "variant", "layer", "error", "captured_mass", "measured_on")
_SPANS = ("title", "variant", "layer", "head", "span")
_TRAINING = ("title", "name", "mode", "step", "loss", "learning_rate", "validation", "measure", "best_step")
_LENGTHS = ("title", "task", "split", "notes", "sliced_by", "variant", "from", "to", "examples", "base", "converted")
_TASK = {"task", "split", "metric", "examples", "subset", "truncated", "fast_products"}

# The mark of a page that `write_report` made.
_MADE = '<meta name="generator" content="approx">'


def write_report(records: list[Record], out: Path, *, force: bool = False, formats: Sequence[str] = ()) -> list[Path]:
    """Write report.json, report.md, index.html, and the data of its plots: quality.csv, speed.csv, and where there is something
    in them lengths.csv, layers.csv, training.csv and spans.csv.

    The same records give the same bytes. Records of the same weights and plans share a section; no plot mixes speeds of
    different machines.

    Args:
        records: From `approx.evaluation.record.load`, in the order to show them.
        out: Folder, created if missing. An older report in it is replaced file by file.
        force: Whether to replace files of these names that are not of a report.
        formats: What else to write: `latex` for the tables as tables.tex, `svg` for the plots in the folder `plots`.

    Returns:
        The written files.

    Raises:
        ApproxError: if there are no records, one is there twice, a format is unknown, the folder holds other files of
            these names, or it cannot be written.
    """
    if not records:
        raise ApproxError("A report needs records. Give at least one record file.")
    if unknown := sorted(set(formats) - {"latex", "svg"}):
        raise ApproxError(f"A report has no format {unknown[0]!r}. Choose from latex, svg.")
    records, out = joined(records), Path(out)
    data, sections = [record.to_data() for record in records], _sections(records)
    more = {
        "lengths.csv": _csv(_LENGTHS, [line for record in records for line in _length_lines(record)]),
        "layers.csv": _csv(_LAYERS, [line for record in records for line in _layer_lines(record)]),
        "training.csv": _csv(_TRAINING, [line for record in records for line in _training_lines(record)]),
        "spans.csv": _csv(_SPANS, [line for record in records for line in _span_lines(record)]),
    }
    files = {
        "report.json": in_lines(data[0] if len(data) == 1 else data) + "\n",
        "report.md": _render("report.md.j2", sections),
        "quality.csv": quality_csv(records),
        "speed.csv": speed_csv(records),
        **{name: text for name, text in more.items() if text.count("\n") > 1},
        "index.html": _render("page.html.j2", sections),
    }
    if "latex" in formats:
        files["tables.tex"] = _render("report.tex.j2", sections)
    if "svg" in formats:
        drawn = {name: drawing for section in sections for name, drawing in section["drawn"].items()}
        files |= {f"plots/{name}.svg": alone(drawing) for name, drawing in drawn.items()}
    ours = not force and _refuse_foreign(out, [out / name for name in files])
    written = []
    try:
        for name, text in files.items():
            write_whole(out / name, text)
            written.append(out / name)
        for name in more:
            # Of an earlier report, which had more to show.
            if ours and name not in files:
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ApproxError(f"The report cannot be written to {out}: {error.strerror}.", Exit.UNAVAILABLE) from None
    return written


def _refuse_foreign(out: Path, files: list[Path]) -> bool:
    """Raise if a file would be replaced that is not next to a page of a report; return whether there is such a page."""
    there = [file for file in files if file.exists()]
    page_of = out / "index.html"
    ours = page_of.is_file() and _MADE in page_of.read_text(encoding="utf-8", errors="replace")
    if there and not ours:
        raise ApproxError(
            f"{there[0]} exists and is not of a report. Choose another folder, or replace it with --force.",
            Exit.REFUSED,
        )
    return ours


def _length_lines(record: Record) -> list[dict[str, Any]]:
    return [
        {
            **task.model_dump(include={"task", "split", "sliced_by"}),
            **part.model_dump(by_alias=True),
            "title": record.title,
            "notes": "; ".join(task.notes),
            "variant": entry.name,
        }
        for task in record.quality
        for entry in task.variants
        for part in entry.slices
    ]


def _layer_lines(record: Record) -> list[dict[str, Any]]:
    lines = []
    for variant in record.variants:
        receipt = variant.receipt or {}
        about = {"title": record.title, "variant": variant.name, "measured_on": receipt.get("measured_on")}
        masses = receipt.get("captured_mass") or {}
        lines += [
            about | {"layer": layer, "error": error, "captured_mass": masses.get(layer)}
            for layer, error in (receipt.get("errors") or {}).items()
        ]
    return lines


def _training_lines(record: Record) -> list[dict[str, Any]]:
    return [
        {
            **point.to_data(),
            **phase.model_dump(include={"mode", "measure", "best_step"}),
            "title": record.title,
            "name": trained.name,
        }
        for trained in record.trainings
        for phase in trained.phases
        for point in phase.curve
    ]


def _span_lines(record: Record) -> list[dict[str, Any]]:
    return [
        {"title": record.title, "variant": variant.name, "layer": layer.layer, "head": head, "span": span}
        for variant in record.variants
        for layer in variant.layers
        for head, span in enumerate(layer.spans or [])
    ]


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
