"""The answer to "shall I use it?", one a variant, drawn from the record and nothing else."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from approx.publishing import wording


@dataclass(frozen=True)
class Figure:
    """One number that stands out: the number, what it is of, and whether it is good news."""

    value: str
    label: str
    tone: str


@dataclass(frozen=True)
class Answer:
    """What the report says first about one variant.

    Args:
        name: The variant's.
        verified: Whether the conversion passed its checks.
        figures: At most one on speed and one for each task.
        sentences: The same in words, with what they leave out.
    """

    name: str
    verified: bool
    figures: list[Figure]
    sentences: list[str]


def answers(record: dict[str, Any]) -> list[Answer]:
    """Answer for every variant of a record."""
    return [_answer(variant, record) for variant in record["variants"]]


def speed_groups(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Put together the rows of "speed" that differ in their length alone, shortest first."""
    keys = ("device", "dtype", "threads", "batch", "mode", "inputs")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in record.get("speed") or []:
        # Older records lack the last.
        groups.setdefault((*(row[key] for key in keys), row.get("fast_products", False)), []).append(row)
    return [sorted(rows, key=lambda row: row["length"]) for rows in groups.values()]


def variant_of(entries: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the entry of one variant, or None where it was not measured."""
    return next((entry for entry in entries if entry["name"] == name), None)


def standing(row: dict[str, Any], entry: dict[str, Any] | None) -> str:
    """Class one variant at one length.

    Returns:
        "faster", "slower", "even" (no sure gain worth having), "out of memory", "alone" (exact attention is out of
        memory and this is not) or "missing".
    """
    if entry is None:
        return "missing"
    if entry["status"] != "ok":
        return "out of memory"
    if row["base"]["status"] != "ok":
        return "alone"
    if entry["ratio"] is None or entry["interval"] is None:
        return "missing"
    if entry["interval"][0] > 1 and entry.get("verdict", "faster") == "faster":
        return "faster"
    return "slower" if entry["interval"][1] < 1 else "even"


def worthwhile_from(rows: list[dict[str, Any]], name: str) -> int | None:
    """Return the shortest measured length from which on the variant is always the better choice."""
    found = None
    for row in rows:
        good = standing(row, variant_of(row["variants"], name)) in ("faster", "alone")
        found = (found or row["length"]) if good else None
    return found


def longest_input(task: dict[str, Any]) -> int | None:
    """Return the tokens that every input of a task has fewer of, where the record says so."""
    if task.get("sliced_by", "tokens") != "tokens":
        return task["tokens"]["longest"] + 1 if "tokens" in task else None
    return max((part["to"] for entry in task["variants"] for part in entry.get("slices") or []), default=None)


def _answer(variant: dict[str, Any], record: dict[str, Any]) -> Answer:
    name = variant["name"]
    figures, sentences = [], []
    groups = [rows for rows in speed_groups(record) if any(variant_of(row["variants"], name) for row in rows)]
    for rows in groups:
        sentences.append(_speed(rows, name))
    if groups:
        figures.extend(_speed_figure(groups[0], name))
    else:
        sentences.append("Its speed was not measured.")
    tasks = [(task, entry) for task in record.get("quality") or [] if (entry := variant_of(task["variants"], name))]
    for task, entry in tasks:
        value, what = wording.change(entry, task), f"{wording.units(task)} on {task['task']}"
        if not wording.tested(entry):
            value, what = "not tested", f"quality on {task['task']}: hardly an input is approximated"
        figures.append(Figure(value, what, wording.tone(entry)))
        loss, verdict = wording.loss(entry, task), wording.verdict(entry, task)
        if wording.tested(entry) and entry.get("approximated"):
            verdict += f"; attention is approximated on {wording.approximated(entry, task)}"
        # One split may be read to several lengths; its notes then tell which score is meant.
        alike = sum((other["task"], other["split"]) == (task["task"], task["split"]) for other, _ in tasks)
        notes = task.get("notes", []) if alike > 1 else []
        sentences.append(f"It {loss} on {task['task']} ({'; '.join([task['split'], *notes])}): {verdict}.")
    if not tasks:
        sentences.append("What it costs in quality was not measured.")
    if caveat := _beyond_quality([task for task, _ in tasks], groups):
        sentences.append(caveat)
    return Answer(name, bool(variant["verified"]), figures, sentences)


def _speed(rows: list[dict[str, Any]], name: str) -> str:
    measured = [row["length"] for row in rows]
    entries = {row["length"]: variant_of(row["variants"], name) for row in rows}
    by_standing: dict[str, list[int]] = {}
    for row in rows:
        by_standing.setdefault(standing(row, entries[row["length"]]), []).append(row["length"])

    def at(kind: str) -> str:
        return wording.lengths(by_standing[kind], measured)

    def ratios(kind: str) -> str:
        return wording.span([entry["ratio"] for length in by_standing[kind] if (entry := entries[length])])

    parts = []
    if "faster" in by_standing:
        parts.append(f"{ratios('faster')} faster at {at('faster')}")
    if "slower" in by_standing:
        parts.append(f"slower at {at('slower')} ({ratios('slower')} the speed of exact attention)")
    if "even" in by_standing:
        parts.append(f"no sure gain worth having at {at('even')} ({ratios('even')})")
    if "alone" in by_standing:
        parts.append(f"runs at {at('alone')}, where exact attention is out of memory")
    if "out of memory" in by_standing:
        parts.append(f"out of memory at {at('out of memory')}")
    sentence = f"On {wording.setting(rows[0])}: {'; '.join(parts) or 'not measured'}."
    start = worthwhile_from(rows, name)
    if start is None:
        advice = "Keep exact attention at every length measured." if parts else ""
        if "faster" in by_standing:
            advice = "It does not stay ahead up to the longest length measured."
    elif start == measured[0]:
        advice = f"It pays from {wording.count(start)} tokens, the shortest length measured."
    else:
        advice = f"Below {wording.count(start)} tokens keep exact attention."
    return f"{sentence} {advice}".strip()


def _speed_figure(rows: list[dict[str, Any]], name: str) -> list[Figure]:
    for row in reversed(rows):
        entry = variant_of(row["variants"], name)
        kind = standing(row, entry)
        if entry and kind in ("faster", "slower", "even"):
            tone = {"faster": "good", "slower": "bad", "even": "even"}[kind]
            label = f"the speed of exact attention at {wording.count(row['length'])} tokens"
            return [Figure(wording.times(entry["ratio"]), label, tone)]
    return []


def _beyond_quality(tasks: list[dict[str, Any]], groups: list[list[dict[str, Any]]]) -> str | None:
    """Warn where speeds are of inputs longer than any that quality was measured on."""
    ends = [end for task in tasks if (end := longest_input(task)) is not None]
    timed = [row["length"] for rows in groups for row in rows]
    if not ends or len(ends) < len(tasks) or not timed or max(timed) < max(ends):
        return None
    return (
        f"Quality was measured on inputs of fewer than {wording.count(max(ends))} tokens, speed at up to "
        f"{wording.count(max(timed))}: the quality at longer inputs is not known."
    )
