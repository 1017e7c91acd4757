"""What records say of a converted model, for its card: metadata, tables, and when not to use it.

`_of_record` alone reads a record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from jinja2 import Environment, StrictUndefined

from approx.checkpoints.history import Receipt
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.record import Quality, Record, Speed
from approx.publishing import wording
from approx.publishing.summary import answers, speed_groups, variant_of, worthwhile_from
from approx.publishing.tables import quality_table, speed_table
from approx.tasks import TASKS, open_task
from approx.tasks.glue import GLUE
from approx.tasks.librispeech import LIBRISPEECH

# Tasks that read one dataset of the hub; others read the user's files or generate examples.
_OFFICIAL = ("glue/", "squad", "librispeech/")
# Name of a metric -> its name on the hub.
_METRICS = {
    "answer_f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}


@dataclass
class Results:
    """What records say of one model.

    Attributes:
        evaluations: One for each metric of the model.
        sections: The tables of each record, for the template.
        cautions: When not to use the model, one sentence each.
        datasets: Ids of the datasets.
    """

    evaluations: list[EvalResult] = field(default_factory=list)
    sections: list[dict[str, Any]] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)

    @property
    def markdown(self) -> str:
        """The tables; empty without records."""
        if not self.sections:
            return ""
        environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters["cell"] = wording.cell
        template = (resources.files("approx.pushing") / "results.md.j2").read_text(encoding="utf-8")
        return environment.from_string(template).render(sections=self.sections).strip()

    @property
    def metrics(self) -> list[str]:
        """Ids of the metrics, each once."""
        return list(dict.fromkeys(one.metric_type for one in self.evaluations))


def results_of(records: Iterable[Path], receipt: Receipt, pipeline: str | None) -> Results:
    """Read what records say of the model with a receipt.

    Args:
        records: Files of records, scrubbed.
        receipt: Receipt of the model, which identifies its variant in a record.
        pipeline: The hub's name of what the model does.

    Raises:
        ApproxError: if a record cannot be read, or none of its variants has the receipt.
    """
    made = Results()
    for path in records:
        _of_record(path, record.load(path), receipt, pipeline, made)
    if made.sections:
        made.cautions += [
            f"Its {what} was not measured: measure it on your data before you use it."
            for what in ("quality", "speed")
            if not any(section[what] for section in made.sections)
        ]
    return made


def dataset_of(task: str | None) -> str | None:
    """The hub's id of a task's dataset; None if its examples are the user's files or generated."""
    return open_task(task).dataset if task is not None and task in TASKS and task.startswith(_OFFICIAL) else None


def _of_record(path: Path, read: Record, receipt: Receipt, pipeline: str | None, made: Results) -> None:
    name = _variant(path, read, receipt)
    selected = read.model_copy(
        update={
            "variants": [one for one in read.variants if one.name == name],
            "quality": [_quality_of(task, name) for task in read.quality if variant_of(task.variants, name)],
            "speed": [_speed_of(row, name) for row in read.speed if variant_of(row.variants, name)],
        }
    )
    groups, environment = speed_groups(selected.speed), selected.environment
    made.sections.append(
        {
            "file": path.name,
            # Another record may have that measurement.
            "sentences": [one for one in answers(selected)[0].sentences if not one.endswith(" was not measured.")],
            "quality": [quality_table(task) for task in selected.quality],
            "speed": [speed_table(rows, selected.crossover) for rows in groups],
            "hardware": environment.get("gpu") or f"{environment.get('processor')}, {environment.get('cores')} cores",
            "versions": f"PyTorch {environment.get('torch')}, transformers {environment.get('transformers')}",
        }
    )
    for task in selected.quality:
        made.evaluations += _evaluations(task, pipeline)
        made.datasets += [one for one in [dataset_of(task.task)] if one and one not in made.datasets]
        entry = task.variants[0]
        if entry.verdict == "loss beyond margin":
            made.cautions.append(
                f"On {task.task} it {wording.loss(entry, task)}: more than the margin of {wording.margin(entry, task)}."
            )
        elif entry.verdict != "no loss":
            made.cautions.append(f"On {task.task} the loss is not settled: {wording.verdict(entry, task)}.")
    # Speed does not matter if the model loses too much.
    if not any(task.variants[0].verdict == "loss beyond margin" for task in selected.quality):
        for rows in groups:
            made.cautions += _too_slow(rows, name)


def _variant(path: Path, read: Record, receipt: Receipt) -> str:
    """Name of the variant with a receipt."""
    wanted = receipt.model_dump(mode="json")
    for one in read.variants:
        if one.receipt is not None and Receipt.model_validate(one.receipt).model_dump(mode="json") == wanted:
            return one.name
    named = ", ".join(f"'{one.name}'" for one in read.variants) or "none"
    raise ApproxError(
        f"The record {path.name} is not about this folder: its variants are {named}, and none has the receipt of the folder. "
        "Evaluate the folder itself with -o, and give that record.",
        Exit.REFUSED,
    )


def _quality_of(task: Quality, name: str) -> Quality:
    return task.model_copy(update={"variants": [one for one in task.variants if one.name == name]})


def _speed_of(row: Speed, name: str) -> Speed:
    return row.model_copy(update={"variants": [one for one in row.variants if one.name == name]})


def _evaluations(task: Quality, pipeline: str | None) -> list[EvalResult]:
    """The scores of a model on one task."""
    name, split = task.task, task.split
    config = name.partition("/")[2] or None
    if name.startswith("librispeech/") and config in LIBRISPEECH:
        config, split, _ = LIBRISPEECH[config]
    elif name.startswith("glue/") and config in GLUE:
        config, split = GLUE[config].hub, split.replace("dev", "validation")
    elif dataset_of(name):
        split = split.replace("dev", "validation")
    # Only scores of this model: the hub would list the base's score as another result of it.
    return [
        EvalResult(
            task_type=pipeline or "other",
            dataset_type=dataset_of(name) or name,
            dataset_name=name,
            dataset_config=config,
            dataset_split=split,
            metric_type=str(_METRICS.get(metric, metric)),
            metric_name=metric,
            metric_value=score,
        )
        for metric, score in task.variants[0].scores.items()
        if score is not None
    ]


def _too_slow(rows: list[Speed], name: str) -> list[str]:
    """The lengths at which exact attention is at least as fast."""
    start, setting = worthwhile_from(rows, name), wording.setting(rows[0])
    longest = wording.count(rows[-1].length)
    if start is None:
        return [f"No gain in speed was measured up to {longest} tokens ({setting}): keep exact attention there."]
    if start == rows[0].length:
        return []
    return [f"On inputs of fewer than {wording.count(start)} tokens, keep exact attention ({setting})."]
