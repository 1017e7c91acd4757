"""The summary of each variant: is it worth using? Everything comes from records, joined where they are of the same models."""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from approx.errors import ApproxError
from approx.evaluation.record import (
    BUSY,
    FOUND,
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
from approx.registry import class_defaults

# What speeds depend on; records whose machines differ in it stay apart.
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


def joined(records: Sequence[Record]) -> list[Record]:
    """Join records of the same models, where they can stand in one section.

    Models are the same if their weights, their plans and what runs them are, whatever their names.

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
    bases = [(record.checkpoint.weights_sha256, record.checkpoint.runtime) for record in (one, other)]
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
    """Names of the models of `other` -> those of `one`, for models with the same weights, in the same precision, and plan."""
    known = {_model(variant, one): variant.name for variant in one.variants}
    return {variant.name: known[key] for variant in other.variants if (key := _model(variant, other)) in known}


def same_machine(one: Record, other: Record) -> bool:
    """Whether the speeds of two records can be compared."""
    return all(one.environment.get(key) == other.environment.get(key) for key in _MACHINE)


def _model(variant: Variant, record: Record) -> str:
    return f"{_weights(variant, record)} {variant.runtime} {_plan(variant)}"


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
    if plans[0] & plans[1] and weights[0] & weights[1]:
        runs = [sorted({variant.runtime or "PyTorch" for variant in record.variants}) for record in (one, other)]
        return f"their models run in {', and in '.join(sorted(map(' and '.join, runs)))}"
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
Tested = tuple[Quality, QualityVariant]


@dataclass(frozen=True)
class Figure:
    """A highlighted number, its label, and its tone: good, bad or even."""

    value: str
    label: str
    tone: str


@dataclass(frozen=True)
class Answer:
    """The results of one variant in sentences.

    Args:
        name: Name of the variant.
        verified: Whether the conversion passed its checks.
        sentences: Its speed in each setting, then each task.
    """

    name: str
    verified: bool
    sentences: list[str]


def answers(record: Record) -> list[Answer]:
    """The results of every variant of a record in sentences."""
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
    sentences = []
    groups = speed_groups(record.speed)
    groups = [rows for rows in groups if any(variant_of(row.variants, name) for row in rows)]
    for rows in groups:
        sentences.append(_speed(rows, name))
    if not groups:
        sentences.append("Its speed was not measured.")
    tasks = _tested(record, name)
    for task, entry in tasks:
        alike = sum((other.task, other.split) == (task.task, task.split) for other, _ in tasks)
        loss, verdict = wording.loss(entry, task), wording.verdict(entry, task)
        if wording.tested(entry) and entry.approximated:
            verdict += f"; attention is approximated on {wording.approximated(entry, task)}"
        place = f"{task.split}; {task.details}" if alike > 1 and task.details else task.split
        sentences.append(f"It {loss} on {task.task} ({place}): {verdict}.")
    if not tasks:
        sentences.append("Its quality was not measured.")
    if caveat := _beyond_quality([task for task, _ in tasks], groups):
        sentences.append(caveat)
    return Answer(name, variant.verified, sentences)


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


def figures(record: Record, name: str) -> list[Figure]:
    """The three numbers of a variant: its speed, its quality where that decides, and its share of what attention could give."""
    found, shown = [], _timed(record, name)
    if shown is not None:
        row, entry = shown
        believed = row.believed(entry)
        tone = {"faster": "good", "slower": "bad"}.get(standing(row, entry), "even")
        label = (
            f"the speed of exact attention at {wording.count(row.length)} tokens ({wording.between(believed.interval)})"
        )
        found.append(Figure(wording.times(believed.ratio), label, tone))
    if worst := _worst(_tested(record, name)):
        task, entry = worst
        if wording.tested(entry):
            ends = wording.between(entry.interval, 1 if task.fraction else 3, wording.scale(task))
            label = f"{wording.units(task)} on {which(task, record)} ({ends}): {entry.verdict}"
            found.append(Figure(wording.change(entry, task), label, wording.tone(entry)))
        else:
            found.append(Figure("not tested", f"quality on {which(task, record)}", "even"))
    if shown is not None and (share := shown[0].share(shown[1])) is not None and shown[0].ceiling is not None:
        most = wording.times(shown[0].believed(shown[0].ceiling).ratio)
        found.append(Figure(wording.percent(share), f"of the ceiling, {most} without any attention", "even"))
    elif (start := _starts(record, name)) is not None:
        found.append(Figure(wording.count(start), "tokens from which it pays", "even"))
    return found


def which(task: Quality, record: Record) -> str:
    """The name of a task, with what tells it from others of that name in the record: its split, its settings."""
    same = [other for other in record.quality if other.task == task.task]
    split = f" ({task.split})" if len({other.split for other in same}) > 1 else ""
    alike = [set(other.details.split("; ")) for other in same if other.split == task.split]
    own = [part for part in task.details.split("; ") if part and not all(part in other for other in alike)]
    return f"{task.task}{split}{', '.join(['', *own])}"


@dataclass(frozen=True)
class Overview:
    """A variant in the table that a page begins with.

    Attributes:
        name: Its name.
        decision: That of its advice; `exact` for a variant without a converted layer.
        reason: That of its advice.
        tone: Tone of the decision: good, bad or even.
        task: The task that decides about it, in words; None if it was not scored.
        change: Its difference there, and that as a number, larger where better.
        interval: The interval of the difference.
        verdict: The verdict there, and its tone.
        ratio: Its speed at its longest settled length, and that as a number.
        at: That length, in words.
        standing: What that speed is called, and its tone.
    """

    name: str
    decision: str
    reason: str
    tone: str
    task: str | None
    change: tuple[str, float | None]
    interval: str
    verdict: tuple[str, str]
    ratio: tuple[str, float | None]
    at: str
    standing: tuple[str, str]


_DECISIONS = {"use": "good", "not settled": "even", "stay exact": "even", "do not use": "bad"}


def overview(record: Record) -> list[Overview]:
    """All variants: the one that the conclusion is about, those to use, then the others, each by speed."""
    advised = {one.name: one for one in advice(record)}
    rows = []
    for variant in record.variants:
        made, worst, shown = (
            advised.get(variant.name),
            _worst(_tested(record, variant.name)),
            _timed(record, variant.name),
        )
        task, entry = worst or (None, None)
        change: tuple[str, float | None] = (wording.NOTHING, None)
        interval, verdict = "", ("not measured", "even")
        if task is not None and entry is not None:
            sign = -1 if task.lower_is_better else 1
            verdict = entry.verdict, wording.tone(entry)
            if wording.tested(entry):
                change = wording.change(entry, task), sign * entry.difference * wording.scale(task)
                interval = wording.between(entry.interval, 1 if task.fraction else 3, wording.scale(task))
        ratio = None if shown is None else shown[0].believed(shown[1]).ratio
        kind = "not measured" if shown is None else standing(*shown)
        if shown is None and any(variant_of(row.variants, variant.name) for row in record.speed):
            kind = "not settled"
        rows.append(
            Overview(
                variant.name,
                made.decision if made else "exact",
                made.reason if made else "no layer is converted",
                _DECISIONS.get(made.decision if made else "", "even"),
                None if task is None else which(task, record),
                change,
                interval,
                verdict,
                (wording.times(ratio), ratio),
                "" if shown is None else f"{wording.count(shown[0].length)} tokens",
                (kind, {"faster": "good", "slower": "bad"}.get(kind, "even")),
            )
        )
    order = list(_DECISIONS)
    place = {one: number for number, one in enumerate(order)}
    about = None if (concluded := conclude(record)) is None else concluded.chosen

    def rank(row: Overview) -> tuple[bool, int, float]:
        return row.name != about, place.get(row.decision, len(order)), -(row.ratio[1] or 0.0)

    return sorted(rows, key=rank)


def _timed(record: Record, name: str) -> tuple[Speed, SpeedVariant] | None:
    """The longest length of the first setting at which the speed of a variant is settled."""
    for rows in speed_groups(record.speed):
        for row in reversed(rows):
            entry = variant_of(row.variants, name)
            if entry is not None and row.believed(entry).ratio is not None:
                return row, entry
    return None


def _worst(tasks: list[Tested]) -> Tested | None:
    """What decides about a variant: its largest loss beyond the margin, else what is open, else its largest loss, in margins."""

    def weight(one: Tested) -> tuple[int, float]:
        entry = one[1]
        settled = entry.verdict in ("no loss", "loss within margin")
        kind = 3 if entry.verdict == "loss beyond margin" else 0 if settled else 2 if wording.tested(entry) else 1
        return kind, _in_margins(one)

    return max(tasks, key=weight, default=None)


def _in_margins(one: Tested) -> float:
    task, entry = one
    return (1 if task.lower_is_better else -1) * entry.difference / (entry.margin or 1e-9)


def _starts(record: Record, name: str) -> int | None:
    return next((start for rows in speed_groups(record.speed) if (start := worthwhile_from(rows, name))), None)


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
        chosen: The variant that it is about: the best, else the most promising of those that are not settled.
    """

    decision: Literal["use", "stay exact", "not settled"]
    best: Advice | None
    advices: list[Advice]
    ceiling: str
    chosen: str | None = None


def conclude(record: Record) -> Conclusion | None:
    """What to do by a record; None if it has neither a converted variant nor a ceiling that rules all of them out."""
    advices, ceiling = advice(record), _low_ceiling(speed_groups(record.speed))
    usable = [one for one in advices if one.decision == "use"]
    if usable:
        best = max(usable, key=lambda one: one.gain)
        return Conclusion("use", best, advices, ceiling, best.name)
    if not advices and not ceiling:
        return None
    waiting = [one for one in advices if one.decision == "not settled"]
    if not waiting:
        return Conclusion("stay exact", None, advices, ceiling)
    return Conclusion("not settled", None, advices, ceiling, _nearest(record, waiting))


def recommendation(record: Record) -> list[str]:
    """The conclusion in a sentence, then the advice on each variant, where there are several."""
    made = conclude(record)
    if made is None:
        return []
    rest = made.advices if len(made.advices) > 1 else []
    return [answer(record), *(one.sentence for one in rest)]


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
    name = str(made.chosen)
    open_ = _open(record, name)
    if open_ is None:
        (one,) = (one for one in made.advices if one.name == name)
        return f"Not settled: {name}: {one.reason}."
    task, entry = open_
    needs = "no number of examples like these would settle it"
    if entry.needed_examples:
        time = settled_in(name, entry.needed_examples)
        needs = f"needs {wording.needed(entry, task)}{time and f', {time}'}"
    return f"Not settled: {name} {wording.loss(entry, task)} on {task.task} at a margin of {wording.margin(entry, task)}; {needs}."


@dataclass(frozen=True)
class Step:
    """What would settle what is open.

    Attributes:
        text: What it does, in words.
        command: The command; empty if the record does not say how its models are made.
    """

    text: str
    command: str


def next_step(record: Record) -> Step | None:
    """What to run where nothing can be said; None if the record says what to do, or holds nothing converted."""
    made = conclude(record)
    if made is None or made.decision != "not settled":
        return None
    name, commands = str(made.chosen), [shlex.split(line) for line in record.command.splitlines()]
    if (open_ := _open(record, name)) is not None:
        return _more_examples(record, name, *open_, commands)
    if not any(variant_of(row.variants, name) for row in record.speed):
        return _other_command(record, commands, "evaluate", "bench", "Its speed was not measured. This does it:")
    if not _tested(record, name):
        return _other_command(record, commands, "bench", "evaluate", "Its quality was not measured. This does it:")
    if _timed(record, name) is None:
        again = "\n".join(shlex.join(_replacing(words)) for words in commands)
        return Step("The machine was busy. Once it is quiet, run again:", again)
    # Measured, and still open: on other inputs, or on longer ones.
    return Step("The same measurement, on inputs as long as those that were timed, would settle it.", "")


def _more_examples(record: Record, name: str, task: Quality, entry: QualityVariant, commands: list[list[str]]) -> Step:
    """More examples of the same kind, with the time that they take."""
    if not entry.needed_examples:
        return Step(f"No number of examples of {task.task} like these would settle it: choose a wider margin.", "")
    needed = -(-entry.needed_examples // 100) * 100
    names = [name]
    words = next((words for words in commands if words[:2] in (["approx", one] for one in _LIMITS)), [])
    if "examples" in task.settings and (made := _converted(record, name)):
        # The task makes its examples, so the variant alone can be scored again.
        settings = [
            part
            for key, value in (task.settings | {"examples": needed}).items()
            for part in ("--set", f"{key}={value}")
        ]
        command = f"{made} && {shlex.join(['approx', 'evaluate', 'converted', '--task', task.task, *settings])}"
    elif words and (task.subset or words[1] == "recommend"):
        names = [name] if words[1] in ("evaluate", "recommend") else [one.name for one in record.variants]
        option, more = _LIMITS[words[1]]
        command = shlex.join(_replacing([*_with(words, option, str(needed)), *more]))
    else:
        command = ""
    seconds = _scoring_seconds(record, names, task, needed)
    time = "" if seconds is None else f", about {wording.duration(seconds)} on this machine"
    text = f"Scoring {wording.count(needed)} examples would settle it{time}:"
    if not command:
        all_of = (
            ""
            if task.subset
            else f" all {wording.count(task.examples)} examples of {task.split} were scored, so measure"
        )
        text = f"{text[:-1]};{all_of or ' measure'} on more data." if not task.subset else f"{text[:-1]}."
    return Step(text, command)


# Commands that score: the option for the number of examples, and where the results go.
_LIMITS = {
    "run": ("--limit", ["-o", "runs/more-examples"]),
    "evaluate": ("--limit", []),
    "search": ("--proof", ["--force"]),
    "recommend": ("--examples", []),
}


def _with(words: list[str], option: str, value: str) -> list[str]:
    """A command with an option set, in place of its earlier value."""
    kept = [word for word in words if not word.startswith(f"{option}=")]
    if option in kept:
        at = kept.index(option)
        return [*kept[: at + 1], value, *kept[at + 2 :]]
    return [*kept, option, value]


# Commands that refuse to replace the file that they wrote.
_REFUSING = ("evaluate", "bench", "recommend")


def _replacing(words: list[str]) -> list[str]:
    """A command that may replace what it wrote the first time."""
    writes = any(word in ("-o", "--output") or word.startswith("--output=") for word in words)
    refuses = words[:1] == ["approx"] and words[1:2] and words[1] in _REFUSING
    return [*words, "--force"] if refuses and writes and "--force" not in words else words


def _converted(record: Record, name: str) -> str:
    """The command that converts a variant again; empty if it was trained, or is not one mechanism."""
    (variant,) = (one for one in record.variants if one.name == name)
    rules = {(one.mechanism, one.heads, json.dumps(one.settings, sort_keys=True)) for one in variant.layers}
    if len(rules) != 1 or variant.runtime or any(one.name == name for one in record.trainings):
        return ""
    first, layers = variant.layers[0], [one.layer for one in variant.layers]
    defaults = class_defaults("approx.mechanisms", "BUILT_IN").get(first.mechanism, {})
    changed = {key: value for key, value in first.settings.items() if value not in (None, defaults.get(key))}
    settings = [part for key, value in changed.items() for part in ("--set", f"{key}={value}")]
    chosen = [] if len(layers) == record.checkpoint.layers else ["--layers", ",".join(map(str, layers))]
    words = ["approx", "convert", record.checkpoint.name, "-m", first.mechanism, *settings, *chosen, "-o", "converted"]
    return shlex.join(words) if first.heads == "all" else ""


def _other_command(record: Record, commands: list[list[str]], had: str, wanted: str, text: str) -> Step:
    """The command that measures what is missing, of the models of the one that was run."""
    # What follows an option may be its value, and not the model.
    named = (words for words in commands if words[:2] == ["approx", had] and not "".join(words[2:3]).startswith("-"))
    words = next((words for words in named if len(words) > 2), None)
    if words is None:
        what = "bench" if wanted == "bench" else "evaluate"
        return Step(text.replace("This does it:", f"Add '{what}' to what is run."), "")
    against = words[words.index("--against") : words.index("--against") + 2] if "--against" in words else []
    ends = {task.tokens.longest for task in record.quality if task.tokens}
    more = ["--lengths", ",".join(map(str, sorted(ends)))] if wanted == "bench" else ["--task", "NAME"]
    return Step(
        text, shlex.join(["approx", wanted, words[2], *against, *(more if wanted == "evaluate" or ends else [])])
    )


def _scoring_seconds(record: Record, names: list[str], task: Quality, examples: int) -> float | None:
    """The time to score examples with the base and some variants, by their speeds at the nearest measured length."""
    if not record.speed or task.tokens is None or task.measures == "generation":
        return None
    tokens = task.tokens.median
    row = min(record.speed, key=lambda row: abs(row.length - tokens))
    times = [row.base.median_ms, *(one.median_ms for one in row.variants if one.name in names)]
    known = [one for one in times if one is not None]
    if row.mode != "forward" or len(known) < 2:
        return None
    # Variants without a time take as long as the others, on average.
    total = sum(known) * (len(names) + 1) / len(known)
    return examples * total / row.batch * (tokens / row.length) / 1000


def _tested(record: Record, name: str) -> list[Tested]:
    return [(task, entry) for task in record.quality if (entry := variant_of(task.variants, name))]


def _why_exact(record: Record, advices: list[Advice]) -> str:
    """Why none of the variants is worth using: none is faster, or what is faster loses too much, at least so much."""
    lengths = wording.lengths(timed := sorted({row.length for row in record.speed}), timed)
    wrong = [one for one in advices if one.decision == "do not use"]
    if not wrong:
        return f"none of {len(advices)} variants is worth it at {lengths}" if len(advices) > 1 else advices[0].reason
    # Of each its largest loss: losses of different tasks compare in margins.
    lost = [
        (_in_margins(worst), one, *worst)
        for one in wrong
        if (worst := _worst(_tested(record, one.name))) and worst[1].verdict == "loss beyond margin"
    ]
    if not lost:
        return f"{wrong[0].name}: {wrong[0].reason}"
    _, one, task, entry = min(lost, key=lambda found: found[0])
    loses = f"{wording.loss(entry, task)} on {task.task} at a margin of {wording.margin(entry, task)}"
    if len(wrong) > 1:
        return f"all {len(wrong)} variants that were scored lose too much; the least loss is that of {one.name}, which {loses}"
    faster = any(standing(row, variant_of(row.variants, one.name)) in PAYS for row in record.speed)
    return f"{one.name} is faster, but it {loses}" if faster else f"{one.name} {loses}"


def _open(record: Record, name: str) -> Tested | None:
    """The inconclusive task of a variant that takes the most examples to settle; None if there is none."""
    tasks = [one for one in _tested(record, name) if one[1].verdict == "inconclusive"]
    # A single example or group says nothing, not even how many would.
    tasks = [one for one in tasks if one[1].interval is not None] or tasks
    return max(tasks, key=lambda one: one[1].needed_examples or math.inf, default=None)


def _nearest(record: Record, waiting: list[Advice]) -> str:
    """Of the variants that are not settled the most promising: faster, within the margin so far, settled by the fewest examples.

    What a search found comes first, since the page is about it.
    """

    def promise(one: Advice) -> tuple[bool, bool, bool, float]:
        worst, open_ = _worst(_tested(record, one.name)), _open(record, one.name)
        lost = True
        if worst is not None:
            task, entry = worst
            lost = (1 if task.lower_is_better else -1) * entry.difference > (entry.margin or 0.0)
        needed = math.inf if open_ is None else open_[1].needed_examples or math.inf
        return one.name != FOUND, _starts(record, one.name) is None, lost, needed

    return min(waiting, key=promise).name


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
    tasks = _tested(record, name)
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
    for task, _ in tasks:
        if task.base.at_chance:
            return (
                f"exact attention itself scores no better than chance on {task.task} "
                f"({wording.score(task.chance, task)}), so no loss could show"
            )
    unknown = [one for one in tasks if one[1].verdict not in ("no loss", "loss within margin")]
    if unknown:
        task, entry = max(unknown, key=lambda one: (one[1].verdict == "inconclusive", one[1].needed_examples or 0))
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
