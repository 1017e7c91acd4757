"""The recommendation: whether to use each variant, from its quality and its speed together, and which one is best."""

from dataclasses import dataclass

from approx.evaluation.record_model import Quality, QualityVariant, Record, Variant
from approx.evaluation.record_speed import BUSY, Speed
from approx.publishing import wording
from approx.publishing.summary import PAYS, longest_input, speed_groups, standing, variant_of, worthwhile_from

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


def recommendation(record: Record) -> list[str]:
    """The first lines of a report: which variant is best, then the advice on each."""
    given = advice(record)
    if len(given) < 2:
        return [one.sentence for one in given]
    usable = [one for one in given if one.decision == "use"]
    if usable:
        best = max(usable, key=lambda one: one.gain)
        head = f"Best: {best.sentence}"
        rest = [one for one in given if one is not best]
    else:
        settled = all(one.decision != "not settled" for one in given)
        head = (
            "Stay exact: no variant is both faster and good enough."
            if settled
            else "Nothing is recommended yet: no variant is known to be both faster and good enough."
        )
        rest = given
    return [head, *(one.sentence for one in rest)]


def _advice(variant: Variant, record: Record) -> Advice:
    name = variant.name
    tasks = [(task, entry) for task in record.quality if (entry := variant_of(task.variants, name))]
    groups = [rows for rows in speed_groups(record.speed) if any(variant_of(row.variants, name) for row in rows)]
    lost = [(task, entry) for task, entry in tasks if entry.verdict == "loss beyond margin"]
    if lost:
        return Advice(name, "do not use", _lost(lost))
    if not variant.verified:
        return Advice(name, "do not use", "the checks of its conversion failed or were not run")
    starts = [(rows, start) for rows in groups if (start := worthwhile_from(rows, name)) is not None]
    kinds = {standing(row, variant_of(row.variants, name)) for rows in groups for row in rows}
    if kinds - {BUSY, "not measured"} and not starts:
        return Advice(name, "stay exact", _no_gain(groups, name))
    pays = f"it is faster {_where(starts, groups)}" if starts else ""
    unknown = [_unknown_quality(tasks, starts), "" if starts else _unknown_speed(kinds)]
    if any(unknown):
        return Advice(name, "not settled", "; ".join(part for part in (pays, _kept(tasks), *unknown) if part))
    gain = _gain(starts, name)
    return Advice(name, "use", f"{_where(starts, groups)} ({wording.times(gain)}): {_kept(tasks)}", gain)


def _lost(tasks: list[Tested]) -> str:
    """It loses 88.0 ± 4.0 points of accuracy on needle, beyond the margin of 1.0 points: the largest loss, in margins."""
    task, entry = max(tasks, key=lambda one: abs(one[1].difference) / (one[1].margin or 1e-9))
    more = f" (worst of {len(tasks)} evaluations)" if len(tasks) > 1 else ""
    chance = f", and scores no better than chance ({wording.score(task.chance, task)})" if entry.at_chance else ""
    return f"it {wording.loss(entry, task)} on {task.task}{more}, beyond the margin of {wording.margin(entry, task)}{chance}"


def _kept(tasks: list[Tested]) -> str:
    """The quality where it is known: no loss on glue/sst2 at a margin of 0.5 points."""
    kept = [
        f"{entry.verdict} on {task.task} at a margin of {wording.margin(entry, task)}"
        for task, entry in tasks
        if entry.verdict in ("no loss", "loss within margin") and not task.base.at_chance
    ]
    return "; ".join(dict.fromkeys(kept))


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
