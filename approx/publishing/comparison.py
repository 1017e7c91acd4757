"""Two records side by side: what differs between them, and what that did to quality and speed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from approx.evaluation.record_model import Quality, QualityVariant, Record
from approx.evaluation.record_speed import BUSY, Ratio, Speed, SpeedVariant
from approx.publishing import wording
from approx.publishing.advice import advice
from approx.publishing.joining import same_models
from approx.publishing.summary import variant_of
from approx.publishing.tables import plan_words

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
        told = {
            "base": record.checkpoint.name,
            "weights of the base": _hash(record.checkpoint.weights_sha256),
            "recipe": _hash(record.recipe.sha256 if record.recipe else None),
            "seed": str(record.seed),
        }
        for number, name in enumerate(names):
            variant = next(one for one in record.variants if one.name == name)
            told[f"plan of {pairs[number][0]}"] = plan_words(variant)
            told[f"weights of {pairs[number][0]}"] = _hash(variant.weights_sha256)
            told[f"checks of {pairs[number][0]}"] = "verified" if variant.verified else "not verified"
        return told | {key: str(record.environment.get(key) or wording.NOTHING) for key in _MACHINE}

    one, two = facts(first, [name for name, _ in pairs]), facts(second, [name for _, name in pairs])
    return [(name, one[name], two[name]) for name in one if one[name] != two[name]]


def _advice(first: Record, second: Record, pairs: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    given = [{one.name: f"{one.decision}: {one.reason}" for one in advice(record)} for record in (first, second)]
    told = ((one, given[0].get(one, wording.NOTHING), given[1].get(two, wording.NOTHING)) for one, two in pairs)
    return [(name, before, after) for name, before, after in told if before != after]


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

    def words(seen: Ratio, said: str | None) -> str:
        if not seen.ratio:
            return said or wording.NOTHING
        return f"{wording.times(seen.ratio)} ({wording.between(seen.interval)}), {said}"

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
