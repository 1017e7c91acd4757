"""The summary of each variant: is it worth using? Everything comes from the record."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from approx.publishing import wording


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


def answers(record: dict[str, Any]) -> list[Answer]:
    """The summary of every variant of a record."""
    return [_answer(variant, record) for variant in record["variants"]]


def speed_groups(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Group the rows of "speed" that differ only in length, shortest first."""
    keys = ("device", "dtype", "threads", "batch", "mode", "inputs")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in record.get("speed") or []:
        # Older records lack "fast_products".
        groups.setdefault((*(row[key] for key in keys), row.get("fast_products", False)), []).append(row)
    return [sorted(rows, key=lambda row: row["length"]) for rows in groups.values()]


def variant_of(entries: Iterable[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the entry of one variant, or None if it was not measured."""
    return next((entry for entry in entries if entry["name"] == name), None)


def standing(row: dict[str, Any], entry: dict[str, Any] | None) -> str:
    """Classify one variant at one length.

    Returns:
        "faster", "slower", "even" (no significant gain), "out of memory", "alone" (only exact attention is out of
        memory) or "missing".
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
    """Return the measured length from which the variant beats exact attention at all longer lengths too, or None."""
    start = None
    for row in rows:
        good = standing(row, variant_of(row["variants"], name)) in ("faster", "alone")
        start = (start or row["length"]) if good else None
    return start


def longest_input(task: dict[str, Any]) -> int | None:
    """Return an upper bound on the length of a task's inputs in tokens, exclusive; None if the record has none."""
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
            value, what = "not tested", f"quality on {task['task']}: attention is exact on nearly all inputs"
        figures.append(Figure(value, what, wording.tone(entry)))
        loss, verdict = wording.loss(entry, task), wording.verdict(entry, task)
        if wording.tested(entry) and entry.get("approximated"):
            verdict += f"; attention is approximated on {wording.approximated(entry, task)}"
        # The notes tell apart evaluations of one split at several lengths.
        alike = sum((other["task"], other["split"]) == (task["task"], task["split"]) for other, _ in tasks)
        notes = task.get("notes", []) if alike > 1 else []
        sentences.append(f"It {loss} on {task['task']} ({'; '.join([task['split'], *notes])}): {verdict}.")
    if not tasks:
        sentences.append("Its quality was not measured.")
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
        parts.append(f"no significant gain at {at('even')} ({ratios('even')})")
    if "alone" in by_standing:
        parts.append(f"runs at {at('alone')}, where exact attention is out of memory")
    if "out of memory" in by_standing:
        parts.append(f"out of memory at {at('out of memory')}")
    sentence = f"On {wording.setting(rows[0])}: {'; '.join(parts) or 'not measured'}."
    start = worthwhile_from(rows, name)
    if start is None:
        advice = "Keep exact attention at every measured length." if parts else ""
        if "faster" in by_standing:
            advice = "The gain does not last to the longest measured length."
    elif start == measured[0]:
        advice = f"It pays from {wording.count(start)} tokens, the shortest measured length."
    else:
        advice = f"Below {wording.count(start)} tokens, keep exact attention."
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
    """Warn if speed was measured on longer inputs than quality."""
    ends = [end for task in tasks if (end := longest_input(task)) is not None]
    timed = [row["length"] for rows in groups for row in rows]
    if not ends or len(ends) < len(tasks) or not timed or max(timed) < max(ends):
        return None
    return (
        f"Quality was measured on inputs of fewer than {wording.count(max(ends))} tokens, speed at up to "
        f"{wording.count(max(timed))}: the quality on longer inputs is unknown."
    )
