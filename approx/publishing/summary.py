"""The summary of each variant: is it worth using? Everything comes from the record."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from approx.evaluation.record_model import Quality, QualityVariant, Record, Variant
from approx.evaluation.record_speed import BUSY, Speed, SpeedVariant
from approx.publishing import wording

# Where a variant is worth more than exact attention.
PAYS = ("faster", "exact out of memory")

Entry = TypeVar("Entry", QualityVariant, SpeedVariant)


@dataclass(frozen=True)
class Figure:
    """A highlighted number, its label, and its tone: good, bad or even."""

    value: str
    label: str
    tone: str


@dataclass(frozen=True)
class Answer:
    """The summary of one variant.

    Args:
        name: Name of the variant.
        verified: Whether the conversion passed its checks.
        figures: At most one for speed and one for each task.
        sentences: The same results in sentences, with more detail.
    """

    name: str
    verified: bool
    figures: list[Figure]
    sentences: list[str]


def answers(record: Record) -> list[Answer]:
    """The summary of every variant of a record."""
    return [_answer(variant, record) for variant in record.variants]


def speed_groups(speed: Iterable[Speed]) -> list[list[Speed]]:
    """Group the rows of "speed" that differ only in length, shortest first."""
    groups: dict[tuple, list[Speed]] = {}
    for row in speed:
        key = (row.device, row.dtype, row.threads, row.batch, row.mode, row.inputs, row.fast_products)
        groups.setdefault(key, []).append(row)
    return [sorted(rows, key=lambda row: row.length) for rows in groups.values()]


def variant_of(entries: Iterable[Entry], name: str) -> Entry | None:
    """Return the entry of one variant, or None if it was not measured."""
    return next((entry for entry in entries if entry.name == name), None)


def standing(row: Speed, entry: SpeedVariant | None) -> str:
    """Classify one variant at one length: the label in terminal, report and page.

    The verdicts of older records are made again from their figures.

    Returns:
        A verdict of `Speed.verdict`, "out of memory", "exact out of memory" (only the variant runs) or "not measured".
    """
    if entry is None:
        return "not measured"
    if entry.status != "ok":
        return "out of memory"
    if row.base.status != "ok":
        return "exact out of memory"
    return row.verdict(entry) or "not measured"


def worthwhile_from(rows: list[Speed], name: str) -> int | None:
    """Return the measured length from which the variant beats exact attention at all longer lengths too, or None.

    Lengths that are not settled do not count.
    """
    start = None
    for row in rows:
        kind = standing(row, variant_of(row.variants, name))
        if kind != BUSY:
            start = (start or row.length) if kind in PAYS else None
    return start


def longest_input(task: Quality) -> int | None:
    """Return an upper bound on the length of a task's inputs in tokens, exclusive; None if the record has none."""
    if task.sliced_by not in ("tokens", None):
        return task.tokens.longest + 1 if task.tokens else None
    ends = [part.to for entry in task.variants for part in entry.slices]
    # An open end has no bound.
    return max((end for end in ends if end is not None), default=None) if None not in ends else None


def _answer(variant: Variant, record: Record) -> Answer:
    name = variant.name
    figures, sentences = [], []
    groups = speed_groups(record.speed)
    groups = [rows for rows in groups if any(variant_of(row.variants, name) for row in rows)]
    for rows in groups:
        sentences.append(_speed(rows, name))
    if groups:
        figures.extend(_speed_figure(groups[0], name))
    else:
        sentences.append("Its speed was not measured.")
    tasks = [(task, entry) for task in record.quality if (entry := variant_of(task.variants, name))]
    for task, entry in tasks:
        # Evaluations of one split at several settings have labels of their own.
        alike = sum((other.task, other.split) == (task.task, task.split) for other, _ in tasks)
        which = f", {task.split}" if sum(other.task == task.task for other, _ in tasks) > alike else ""
        which += f", {task.details}" if alike > 1 and task.details else ""
        value, what = wording.change(entry, task), f"{wording.units(task)} on {task.task}{which}"
        if not wording.tested(entry):
            value, what = "not tested", f"quality on {task.task}{which}: attention is exact on nearly all inputs"
        figures.append(Figure(value, what, wording.tone(entry)))
        loss, verdict = wording.loss(entry, task), wording.verdict(entry, task)
        if wording.tested(entry) and entry.approximated:
            verdict += f"; attention is approximated on {wording.approximated(entry, task)}"
        place = f"{task.split}; {task.details}" if alike > 1 and task.details else task.split
        sentences.append(f"It {loss} on {task.task} ({place}): {verdict}.")
    if not tasks:
        sentences.append("Its quality was not measured.")
    if caveat := _beyond_quality([task for task, _ in tasks], groups):
        sentences.append(caveat)
    return Answer(name, variant.verified, figures, sentences)


def _speed(rows: list[Speed], name: str) -> str:
    measured = [row.length for row in rows]
    entries = {row.length: variant_of(row.variants, name) for row in rows}
    by_standing: dict[str, list[int]] = {}
    for row in rows:
        by_standing.setdefault(standing(row, entries[row.length]), []).append(row.length)

    def at(kind: str) -> str:
        return wording.lengths(by_standing[kind], measured)

    def ratios(kind: str) -> str:
        found = [entries[length] for length in by_standing[kind]]
        return wording.span([entry.ratio for entry in found if entry is not None and entry.ratio is not None])

    said = {
        "faster": "{ratios} faster at {at}",
        "slower": "slower at {at} ({ratios} the speed of exact attention)",
        "slight gain": "a slight gain at {at} ({ratios})",
        "no clear gain": "no clear gain at {at} ({ratios})",
        "exact out of memory": "runs at {at}, where exact attention is out of memory",
        "out of memory": "out of memory at {at}",
        BUSY: "not settled at {at}, because the machine was busy",
    }
    parts = [
        text.format(at=at(kind), ratios=ratios(kind) if "{ratios}" in text else "")
        for kind, text in said.items()
        if kind in by_standing
    ]
    return f"On {wording.setting(rows[0])}: {'; '.join(parts) or 'not measured'}."


def _speed_figure(rows: list[Speed], name: str) -> list[Figure]:
    for row in reversed(rows):
        entry = variant_of(row.variants, name)
        if entry and (believed := row.believed(entry)).ratio is not None:
            tone = {"faster": "good", "slower": "bad"}.get(standing(row, entry), "even")
            label = f"the speed of exact attention at {wording.count(row.length)} tokens"
            return [Figure(wording.times(believed.ratio), label, tone)]
    return []


def _beyond_quality(tasks: list[Quality], groups: list[list[Speed]]) -> str | None:
    """Warn if speed was measured on longer inputs than quality."""
    ends = [end for task in tasks if (end := longest_input(task)) is not None]
    timed = [row.length for rows in groups for row in rows]
    if not ends or len(ends) < len(tasks) or not timed or max(timed) < max(ends):
        return None
    return (
        f"Quality was measured on inputs of fewer than {wording.count(max(ends))} tokens, speed at up to "
        f"{wording.count(max(timed))}: the quality on longer inputs is unknown."
    )
