"""The summary of each variant: is it worth using? Everything comes from records, joined where they are of the same models."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from approx.errors import ApproxError
from approx.evaluation.record import (
    BUSY,
    HARDLY,
    Quality,
    QualityVariant,
    Record,
    Speed,
    SpeedVariant,
    Variant,
    judge_likelihoods,
)
from approx.publishing import wording

# What speeds depend on; records whose machines differ in it stay apart.
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


def joined(records: Sequence[Record]) -> list[Record]:
    """Join records of the same models, where they can stand in one section.

    Models are the same if their weights and plans are, whatever their names.

    Raises:
        ApproxError: if a record is there twice.
    """
    made: list[Record] = []
    for number, record in enumerate(records):
        if record in records[:number]:
            raise ApproxError(f"The record '{record.title}' was given twice. Give each record once.")
        place = len(made)
        # A merged record may now match another one, so look again.
        while (found := next((n for n, other in enumerate(made) if not hindrance(other, record)), None)) is not None:
            place, record = found, _join(made.pop(found), record)
        made.insert(place, record)
    return made


def apart(records: Sequence[Record]) -> list[list[str]]:
    """Why each record shares its section with none of the others: a sentence for each reason."""
    notes = []
    for one in records:
        reasons: dict[str, list[str]] = {}
        for other in records:
            if other is not one and (reason := hindrance(one, other)):
                reasons.setdefault(reason, []).append(other.title)
        notes.append([f"Apart from {'; '.join(titles)}: {reason}." for reason, titles in reasons.items()])
    return notes


def hindrance(one: Record, other: Record) -> str | None:
    """Why two records cannot share a section; None if they can."""
    names = same_models(one, other)
    if not names:
        return _no_model(one, other)
    if len(names) < min(len(one.variants), len(other.variants)):
        return f"only {', '.join(names)} has the same weights and plan in both"
    if {variant.name for variant in other.variants if variant.name not in names} & {one.name for one in one.variants}:
        return "they give one name to different models"
    if (one.checkpoint.family, one.checkpoint.layers) != (other.checkpoint.family, other.checkpoint.layers):
        return "their bases differ"
    bases = one.checkpoint.weights_sha256, other.checkpoint.weights_sha256
    if one.quality and other.quality and bases[0] != bases[1]:
        return "their scores are compared with different bases"
    if twice := {_examples(task) for task in one.quality} & {_examples(task) for task in other.quality}:
        return f"both have scores of {min(twice)[0]}"
    if one.speed and other.speed and not same_machine(one, other):
        return "their speeds are of different machines or versions"
    if again := {_setting(row) for row in one.speed} & {_setting(row) for row in other.speed}:
        return f"both have speeds at {wording.count(min(again)[-1])} tokens"
    return None


def same_models(one: Record, other: Record) -> dict[str, str]:
    """Names of the models of `other` -> those of `one`, for models with the same weights and plan."""
    known = {_model(variant, one): variant.name for variant in one.variants}
    return {variant.name: known[key] for variant in other.variants if (key := _model(variant, other)) in known}


def same_machine(one: Record, other: Record) -> bool:
    """Whether the speeds of two records can be compared."""
    return all(one.environment.get(key) == other.environment.get(key) for key in _MACHINE)


def _model(variant: Variant, record: Record) -> str:
    return _weights(variant, record) + _plan(variant)


def _weights(variant: Variant, record: Record) -> str:
    # Older records know the weights of the base only.
    return variant.weights_sha256 or record.checkpoint.weights_sha256 or f"unknown, of record {id(record)}"


def _plan(variant: Variant) -> str:
    plan = [layer.model_dump(include={"layer", "heads", "mechanism", "settings"}) for layer in variant.layers]
    return json.dumps(plan, sort_keys=True)


def _no_model(one: Record, other: Record) -> str:
    if not one.variants or not other.variants:
        return "one of them has no converted model"
    plans = [{_plan(variant) for variant in record.variants} for record in (one, other)]
    weights = [{_weights(variant, record) for variant in record.variants} for record in (one, other)]
    if plans[0] & plans[1]:
        return "their models have the same plan, but not the same weights"
    if weights[0] & weights[1]:
        return "their models have the same weights, but not the same plan"
    return "their models have other weights and another plan"


def _examples(task: Quality) -> tuple[Any, ...]:
    return task.task, task.split, task.examples, task.details


def _setting(row: Speed) -> tuple[Any, ...]:
    return row.device, row.dtype, row.threads, row.batch, row.mode, row.inputs, row.fast_products, row.length


def _join(one: Record, other: Record) -> Record:
    names = same_models(one, other)

    def renamed(part: Any) -> Any:
        return part.model_copy(update={"name": names.get(part.name, part.name)})

    def with_names(part: Any) -> Any:
        return part.model_copy(update={"variants": [renamed(entry) for entry in part.variants]})

    # The machine matters for speeds, which scores hardly depend on; the base for scores.
    timed = other if other.speed and not one.speed else one
    scored = other if other.quality and not one.quality else one
    added = [renamed(variant) for variant in other.variants if variant.name not in names]
    return one.model_copy(
        update={
            "title": "; ".join(dict.fromkeys((one.title, other.title))),
            "notice": " ".join(dict.fromkeys(text for text in (one.notice, other.notice) if text)) or None,
            "command": "\n".join(dict.fromkeys((one.command, other.command))),
            "recipe": one.recipe or other.recipe,
            "checkpoint": scored.checkpoint,
            "variants": [*one.variants, *added],
            "quality": judge_likelihoods([*one.quality, *map(with_names, other.quality)]),
            "speed": [*one.speed, *map(with_names, other.speed)],
            "crossover": [*one.crossover, *map(renamed, other.crossover)],
            "trainings": [*one.trainings, *(new for new in map(renamed, other.trainings) if new not in one.trainings)],
            "environment": timed.environment,
        }
    )


# Lengths at which a variant beats exact attention.
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

    sentences = {
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
        for kind, text in sentences.items()
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


Tested = tuple[Quality, QualityVariant]


@dataclass(frozen=True)
class Advice:
    """What to do with one variant.

    Attributes:
        name: Name of the variant.
        decision: `use`, `do not use`, `stay exact` or `not settled`.
        reason: Why, and for `use` where.
        gain: For `use` its speed at the longest length.
    """

    name: str
    decision: str
    reason: str
    gain: float = 1.0

    @property
    def sentence(self) -> str:
        """The advice in one line."""
        joint = " " if self.decision == "use" else ": "
        return f"{self.name}: {self.decision}{joint}{self.reason}."


def advice(record: Record) -> list[Advice]:
    """What to do with every converted variant of a record."""
    return [_advice(variant, record) for variant in record.variants if variant.layers]


@dataclass(frozen=True)
class Conclusion:
    """What a record says as a whole; every recommendation follows from this one.

    Attributes:
        decision: `use` the best of the variants, `stay exact`, or `not settled`.
        best: The fastest variant to use; None for the other decisions.
        advices: The advice on every converted variant.
        ceiling: Why even attention at no cost is not worth it; empty where it is, or was not measured.
    """

    decision: Literal["use", "stay exact", "not settled"]
    best: Advice | None
    advices: list[Advice]
    ceiling: str


def conclude(record: Record) -> Conclusion | None:
    """What to do by a record; None if it has neither a converted variant nor a ceiling that rules all of them out."""
    advices, ceiling = advice(record), _low_ceiling(speed_groups(record.speed))
    usable = [one for one in advices if one.decision == "use"]
    if usable:
        return Conclusion("use", max(usable, key=lambda one: one.gain), advices, ceiling)
    if not advices and not ceiling:
        return None
    settled = all(one.decision != "not settled" for one in advices)
    return Conclusion("stay exact" if settled else "not settled", None, advices, ceiling)


def recommendation(record: Record) -> list[str]:
    """The first lines of a report: which variant is best, then the advice on each."""
    made = conclude(record)
    if made is None:
        return []
    if not made.advices:
        return [f"Stay exact: {made.ceiling}."]
    if len(made.advices) == 1:
        return [made.advices[0].sentence]
    if made.best is not None:
        rest = [one for one in made.advices if one is not made.best]
        return [f"Best: {made.best.sentence}", *(one.sentence for one in rest)]
    head = (
        "Stay exact: no variant is both faster and good enough."
        if made.decision == "stay exact"
        else "Nothing is recommended yet: no variant is known to be both faster and good enough."
    )
    return [head, *(one.sentence for one in made.advices)]


def answer(record: Record, settled_in: Callable[[str, int], str] = lambda name, examples: "") -> str:
    """The conclusion in one sentence, for those who ask which mechanism to take.

    Args:
        record: The record.
        settled_in: Name of a variant and a number of examples -> how long their scores take, in words.
    """
    made = conclude(record)
    if made is None:
        return "Not settled: no mechanism was timed."
    groups, timed = speed_groups(record.speed), sorted({row.length for row in record.speed})
    if made.best is not None:
        name, rows = made.best.name, groups[0]
        start = worthwhile_from(rows, name) or rows[0].length
        below = "" if start == timed[0] else "; below, keep exact attention"
        at = f"at {wording.count(start)} tokens{'' if len(timed) == 1 else ' and above'}"
        kept = "; ".join(
            f"{entry.verdict} on {task.task} (it {wording.loss(entry, task)}, margin {wording.margin(entry, task)})"
            for task, entry in _tested(record, name)
        )
        return f"Use {name} {at}: {wording.times(made.best.gain)} the speed of exact attention, {kept}{below}."
    if made.decision == "stay exact":
        return f"Stay exact: {made.ceiling or _why_exact(record, made.advices)}."
    name, waiting = _nearest(record, [one for one in made.advices if one.decision == "not settled"])
    if waiting is None:
        (one,) = (one for one in made.advices if one.name == name)
        return f"Not settled: {name}: {one.reason}."
    task, entry = waiting
    needs = "no number of examples like these would settle it"
    if entry.needed_examples:
        time = settled_in(name, entry.needed_examples)
        needs = f"needs {wording.needed(entry, task)}{time and f', {time}'}"
    return f"Not settled: {name} {wording.loss(entry, task)} on {task.task} at a margin of {wording.margin(entry, task)}; {needs}."


def _tested(record: Record, name: str) -> list[Tested]:
    return [(task, entry) for task in record.quality if (entry := variant_of(task.variants, name))]


def _why_exact(record: Record, advices: list[Advice]) -> str:
    """Why none of the variants is worth using: none is faster, or what is faster loses too much, at least so much."""
    lengths = wording.lengths(timed := sorted({row.length for row in record.speed}), timed)
    wrong = [one for one in advices if one.decision == "do not use"]
    if not wrong:
        return f"none of {len(advices)} variants is worth it at {lengths}" if len(advices) > 1 else advices[0].reason
    lost = [
        (abs(entry.difference) / (entry.margin or 1e-9), one, task, entry)
        for one in wrong
        for task, entry in _tested(record, one.name)
        if entry.verdict == "loss beyond margin"
    ]
    if not lost:
        return f"{wrong[0].name}: {wrong[0].reason}"
    _, one, task, entry = min(lost, key=lambda found: found[0])
    least = "it" if len(wrong) == 1 else f"the least loss is that of {one.name}, which"
    what = f"{one.name} is faster" if len(wrong) == 1 else f"all {len(wrong)} variants that were scored lose too much"
    return (
        f"{what}, but {least} {wording.loss(entry, task)} on {task.task} at a margin of {wording.margin(entry, task)}"
    )


def _nearest(record: Record, waiting: list[Advice]) -> tuple[str, Tested | None]:
    """Of the variants that are not settled the one that the fewest examples would settle, and where; or the first."""
    open_ = [
        (entry.needed_examples or float("inf"), one.name, (task, entry))
        for one in waiting
        for task, entry in _tested(record, one.name)
        if entry.verdict == "inconclusive"
    ]
    if not open_:
        return waiting[0].name, None
    _, name, found = min(open_, key=lambda one: one[0])
    return name, found


def _low_ceiling(groups: list[list[Speed]]) -> str:
    """Why no mechanism is worth it: at every length the speed without attention is settled, and hardly higher."""
    rows = [row for rows in groups for row in rows]
    ceilings = [(row, row.believed(row.ceiling).ratio) for row in rows if row.ceiling and row.base.status == "ok"]
    if not rows or len(ceilings) < len(rows) or any(ratio is None or ratio >= HARDLY for _, ratio in ceilings):
        return ""
    row, most = max(ceilings, key=lambda one: one[1] or 0.0)
    share = wording.percent(max(1 - 1 / (most or 1.0), 0.0))
    return (
        f"attention is {share} of the time at {wording.count(row.length)} tokens, so that no mechanism can gain more than "
        f"{wording.times(max(most or 1.0, 1.0))}"
    )


def _advice(variant: Variant, record: Record) -> Advice:
    name = variant.name
    tasks = [(task, entry) for task in record.quality if (entry := variant_of(task.variants, name))]
    groups = [rows for rows in speed_groups(record.speed) if any(variant_of(row.variants, name) for row in rows)]
    lost = [(task, entry) for task, entry in tasks if entry.verdict == "loss beyond margin"]
    if lost:
        return Advice(name, "do not use", _lost(lost))
    if ceiling := _low_ceiling(groups):
        return Advice(name, "stay exact", ceiling)
    starts = [(rows, start) for rows in groups if (start := worthwhile_from(rows, name)) is not None]
    kinds = {standing(row, variant_of(row.variants, name)) for rows in groups for row in rows}
    if kinds - {BUSY, "not measured"} and not starts:
        return Advice(name, "stay exact", _no_gain(groups, name))
    if not variant.verified:
        return Advice(name, "do not use", "the checks of its conversion failed or were not run")
    pays = f"it is faster {_where(starts, groups)}" if starts else ""
    unknown = [_unknown_quality(tasks, starts), "" if starts else _unknown_speed(kinds)]
    if any(unknown):
        return Advice(name, "not settled", "; ".join(part for part in (pays, _retained(tasks), *unknown) if part))
    gain = _gain(starts, name)
    return Advice(name, "use", f"{_where(starts, groups)} ({wording.times(gain)}): {_retained(tasks)}", gain)


def _lost(tasks: list[Tested]) -> str:
    """It loses 88.0 ± 4.0 points of accuracy on needle, beyond the margin of 1.0 points: the largest loss, in margins."""
    task, entry = max(tasks, key=lambda one: abs(one[1].difference) / (one[1].margin or 1e-9))
    more = f" (worst of {len(tasks)} evaluations)" if len(tasks) > 1 else ""
    chance = f", and scores no better than chance ({wording.score(task.chance, task)})" if entry.at_chance else ""
    return f"it {wording.loss(entry, task)} on {task.task}{more}, beyond the margin of {wording.margin(entry, task)}{chance}"


def _retained(tasks: list[Tested]) -> str:
    """The quality where it is known: no loss on glue/sst2 at a margin of 0.5 points."""
    texts = [
        f"{entry.verdict} on {task.task} at a margin of {wording.margin(entry, task)}"
        for task, entry in tasks
        if entry.verdict in ("no loss", "loss within margin") and not task.base.at_chance
    ]
    return "; ".join(dict.fromkeys(texts))


def _unknown_quality(tasks: list[Tested], starts: list[tuple[list[Speed], int]]) -> str:
    """What is not known of its quality; empty if it is settled."""
    if not tasks:
        return "its quality was not measured"
    for task, entry in tasks:
        if task.base.at_chance:
            return (
                f"exact attention itself scores no better than chance on {task.task} "
                f"({wording.score(task.chance, task)}), so no loss could show"
            )
        if entry.verdict not in ("no loss", "loss within margin"):
            return f"its quality on {task.task} is {wording.verdict(entry, task)}"
    ends = [longest_input(task) for task, _ in tasks]
    known = [end for end in ends if end is not None]
    if starts and len(known) == len(ends) and max(known) <= min(start for _, start in starts):
        return f"its quality was measured on inputs of fewer than {wording.count(max(known))} tokens only"
    return ""


def _unknown_speed(kinds: set[str]) -> str:
    return "its speed is " + BUSY if BUSY in kinds else "its speed was not measured"


def _where(starts: list[tuple[list[Speed], int]], groups: list[list[Speed]]) -> str:
    """At 1,024 tokens and above; with the setting if several were measured."""
    parts = []
    for rows, start in starts:
        first = start == rows[0].length
        at = "at every measured length" if first else f"at {wording.count(start)} tokens and above"
        parts.append(at + (f" on {wording.setting(rows[0])}" if len(groups) > 1 else ""))
    return ", ".join(parts)


def _no_gain(groups: list[list[Speed]], name: str) -> str:
    longest = max(row.length for rows in groups for row in rows)
    lasting = any(standing(row, variant_of(row.variants, name)) in PAYS for rows in groups for row in rows)
    if lasting:
        return f"its gain does not last to the longest measured length, {wording.count(longest)} tokens"
    return f"no gain at any measured length, up to {wording.count(longest)} tokens"


def _gain(starts: list[tuple[list[Speed], int]], name: str) -> float:
    ratios = [
        ratio
        for rows, _ in starts
        for row in rows
        if (entry := variant_of(row.variants, name)) and (ratio := row.believed(entry).ratio)
    ]
    return ratios[-1] if ratios else 1.0
