"""The page about long inputs: what reading more of a text is worth, with exact attention and with others, and what it takes."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from approx.evaluation.record import Quality, Record, Speed
from approx.evaluation.statistics import accuracy_interval
from reports import sources

NAMES = ("long-documents", "genres")
BASE = "exact"


class Point(NamedTuple):
    """One kind of attention that reads so many tokens of each text.

    Attributes:
        name: Of the attention.
        length: Tokens, at most.
        score: Share of the texts that are classified rightly.
        milliseconds: For one text that fills the length; None if it was not timed.
    """

    name: str
    length: int
    score: float
    milliseconds: float | None


def points(task: Quality, length: int, speed: list[Speed]) -> list[Point]:
    """Exact attention and every variant of one task that was read to `length` tokens."""
    row = next((row for row in speed if row.length == length and row.batch == 1), None)
    times: dict[str, float | None] = {}
    if row is not None:
        times = {BASE: row.base.median_ms, **{entry.name: entry.median_ms for entry in row.variants}}
    scores = {BASE: task.base.scores, **{entry.name: entry.scores for entry in task.variants}}
    return [Point(name, length, found[task.metric], times.get(name)) for name, found in scores.items()]


def best(timed: list[Point]) -> list[Point]:
    """The points that no other beats in score without taking more time, quickest first; those that were timed alone."""
    front: list[Point] = []
    for point in sorted((p for p in timed if p.milliseconds is not None), key=lambda p: (p.milliseconds, -p.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front


def newcombe(right: int, of: int, other_right: int, other_of: int) -> tuple[float, float]:
    """The 95 % interval of the difference between two shares of different texts.

    Source: Newcombe, 1998, "Interval estimation for the difference between independent proportions", Statistics in
    Medicine 17, method 10.
    """
    (low, high), (least, most) = (
        accuracy_interval(np.arange(n) < k) for k, n in ((right, of), (other_right, other_of))
    )
    share, other = right / of, other_right / other_of
    return share - other - math.hypot(share - low, most - other), share - other + math.hypot(
        high - share, other - least
    )


def verdict(found: list[Point], examples: int) -> str:
    """Whether longer context and another attention pay off together, and how sure that is, in two sentences."""
    if any(point.milliseconds is None for point in found):
        return "Not timed yet, so nothing is said about what pays off."
    first = min((point for point in found if point.name == BASE), key=lambda point: point.length)
    together = [point for point in best(found) if point.name != BASE and point.length > first.length]
    if not together:
        return (
            "Longer context and another attention pay off together **nowhere**: whatever reads more tokens with another attention "
            "is beaten by something quicker."
        )
    claims, sure = [], []
    for point in together:
        counts = (round(point.score * examples), examples, round(first.score * examples), examples)
        low, high = (100 * end for end in newcombe(*counts))
        claims.append(
            f"`{point.name}` at {point.length:,} tokens ({100 * point.score:.1f} %, {point.milliseconds:.0f} ms; "
            f"{100 * (point.score - first.score):+.1f} ({low:+.1f} … {high:+.1f}) points against exact attention at {first.length:,})"
        )
        if low > 0:
            sure.append(f"`{point.name}` at {point.length:,}")
    certainty = (
        f"More than chance, each taken by itself: {', '.join(sure)}."
        if sure
        else "None of these gains is more than chance may give."
    )
    return (
        f"Longer context and another attention pay off together with {', '.join(claims)}: nothing as quick scores as high. "
        f"{certainty} These intervals do not know that the texts are the same ones, and are too wide rather than too narrow."
    )


def page(made: Record, name: str) -> str:
    """The page in Markdown, of a record of this name."""
    assert made.recipe is not None
    stages = yaml.safe_load(made.recipe.text)["evaluate"]
    texts: dict[str, list[tuple[int, Quality]]] = {}
    for stage, task in zip(stages, made.quality, strict=True):
        texts.setdefault(Path(stage["data"]).name.partition(".")[0], []).append((stage["max_length"], task))
    parts = [
        f"# {made.title}",
        f"A {made.checkpoint.family} of {made.checkpoint.layers} layers with "
        f"{made.checkpoint.positions:,} positions, fine-tuned for minutes with exact attention on texts of which most were read "
        "in part (`examples/long_documents_model.py`); none of the texts below was trained on. Accuracy in per cent; in brackets the "
        "difference from exact attention at the same length, with its 95 % interval, in points. *ms* is the median time of a "
        "forward of one text that fills the length.",
    ]
    for text, entries in texts.items():
        found = [point for length, task in entries for point in points(task, length, made.speed)]
        parts += [f"## {text}", _counts(entries), _table(entries, found), verdict(found, entries[0][1].examples)]
    machine = made.environment
    parts.append(
        f"{machine['processor']}, {machine['threads']} {'thread' if machine['threads'] == 1 else 'threads'}, torch {machine['torch']}. From "
        f"{sources.where(made, name, '..')}."
    )
    return "\n\n".join(parts) + "\n"


def _counts(entries: list[tuple[int, Quality]]) -> str:
    cut = ", ".join(f"{task.truncated:,} at {length:,}" for length, task in entries)
    return f"{entries[0][1].examples:,} texts, of which are cut: {cut}."


def _table(entries: list[tuple[int, Quality]], found: list[Point]) -> str:
    on_front = best(found)
    lines = ["| attention | " + " | ".join(f"{length:,} tokens | ms" for length, _ in entries) + " |"]
    lines.append("|---|" + "---|--:|" * len(entries))
    for name in dict.fromkeys(point.name for point in found):
        cells = []
        for length, task in entries:
            point = next(point for point in found if (point.name, point.length) == (name, length))
            low, high = _interval(task, name)
            score = f"{100 * point.score:.1f}"
            score = f"**{score}**" if point in on_front else score
            sign = "" if name == BASE else "+"
            cells.append(f"{score} ({100 * low:{sign}.1f} … {100 * high:{sign}.1f})")
            cells.append("–" if point.milliseconds is None else f"{point.milliseconds:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = (
        "Bold: nothing that is as quick scores as high; of the scores as measured, so mind the intervals. In the first row the "
        "brackets hold the interval of the score itself."
    )
    return "\n".join([*lines, "", note])


def _interval(task: Quality, name: str) -> list[float]:
    scored = task.base if name == BASE else next(entry for entry in task.variants if entry.name == name)
    assert scored.interval is not None
    return scored.interval


def write(folder: Path, out: Path) -> None:
    """Write the page of each record that is in `folder` into a folder of its name in `out`."""
    for name in NAMES:
        if sources.file(folder, name).is_file():
            (out / name).mkdir(parents=True, exist_ok=True)
            (out / name / "README.md").write_text(page(sources.opened(folder, name), name), encoding="utf-8")
