"""Collect the content of the page and the Markdown; the templates lay it out."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from approx.evaluation.record import lacking
from approx.evaluation.record_model import Checkpoint, Quality, Record
from approx.evaluation.record_speed import Speed
from approx.publishing import wording
from approx.publishing.advice import recommendation
from approx.publishing.drawing import INK
from approx.publishing.joining import apart
from approx.publishing.plots import colours, quality_figure, speed_figure
from approx.publishing.spans import spans_figure, spans_table
from approx.publishing.summary import answers, speed_groups
from approx.publishing.tables import layer_error_table, plan_lines, quality_table, speed_table
from approx.publishing.training import training_figure, training_table

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
            f"Made by an earlier version, without {', '.join(older)}: verdicts may be surer than the examples allow. Measure again."
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
    ]


def _pretty(receipt: dict[str, Any] | None) -> str | None:
    return None if receipt is None else json.dumps(receipt, indent=2, ensure_ascii=False)
