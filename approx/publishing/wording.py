"""The wording of numbers and results, the same in every table, sentence and figure."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from approx.evaluation.record import AT_CHANCE, LIKELIHOOD_ONLY, Ablated, Quality, QualityVariant, Speed, Timing

MINUS = "−"
NOTHING = "–"
# Names of the plain PyTorch implementations in records.
PLAIN = ("reference", "tiles")


class Scored(Protocol):
    """A task and its examples, in a record or a sweep."""

    @property
    def fraction(self) -> bool:
        """Whether the score is a fraction."""
        ...

    @property
    def examples(self) -> int:
        """Number of examples."""
        ...

    @property
    def subset(self) -> bool:
        """Whether examples were left out."""
        ...

    @property
    def truncated(self) -> int:
        """Number of truncated examples."""
        ...

    @property
    def details(self) -> str:
        """The settings in which evaluations of one split differ."""
        ...


def count(value: float | None) -> str:
    """Write a whole number with thousands separators: 1,024."""
    return NOTHING if value is None else f"{value:,.0f}"


def length(positions: str, seconds: float | None) -> str:
    """Add the seconds to a length in positions of sound: 512 (10.2 s)."""
    return positions + ("" if seconds is None else f" ({seconds:.3g} s)")


def roughly(value: int) -> str:
    """Write an estimate rounded up to two significant digits: 1,600 for 1,509."""
    step = 10 ** max(len(str(value)) - 2, 0)
    return count(-(-value // step) * step)


def decimal(value: float | None, digits: int = 2) -> str:
    """Write a number with a true minus sign; never minus zero."""
    if value is None:
        return NOTHING
    text = f"{abs(value):,.{digits}f}"
    return MINUS + text if value < 0 and float(text.replace(",", "")) else text


def signed(value: float | None, digits: int = 2) -> str:
    """Write a difference: +0.12, −0.12, 0.00."""
    text = decimal(value, digits)
    return "+" + text if value is not None and value > 0 and text != decimal(0.0, digits) else text


def percent(value: float | None, digits: int = 0) -> str:
    """Write a fraction as a percentage."""
    return NOTHING if value is None else f"{decimal(value * 100, digits)} %"


def score(value: float | None, task: Quality, digits: int = 2) -> str:
    """Write a score of a task: a fraction as a percentage, anything else in its own units."""
    return percent(value, digits) if task.fraction else decimal(value, digits + 1)


def scale(task: Scored) -> float:
    """Factor from a task's scores to the units of its differences: 100 for fractions, shown in points."""
    return 100.0 if task.fraction else 1.0


def units(task: Quality) -> str:
    """The units of a task's differences: points of accuracy; bits per byte."""
    metric = task.metric.replace("_", " ")
    return f"points of {metric}" if task.fraction else metric


def change(entry: QualityVariant, task: Quality) -> str:
    """Write a difference of scores with its sign, rounded."""
    return signed(entry.difference * scale(task), 1 if task.fraction else 3)


def milliseconds(value: float | None) -> str:
    """Write a time with three significant digits, or whole milliseconds when it is long."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """Write a ratio of speeds: 1.83×."""
    return NOTHING if value is None else f"{decimal(value, 2 if value < 10 else 1)}×"


def between(interval: Sequence[float] | None, digits: int = 2, scale: float = 1.0) -> str:
    """Write an interval: 0.95 to 1.20."""
    if interval is None:
        return NOTHING
    return " to ".join(decimal(end * scale, digits) for end in interval)


def measured(receipt: dict[str, Any]) -> str:
    """The inputs that layer errors were measured on: 512 tokens a row, built-in English text."""
    return receipt.get("measured_on") or "unknown"


def share_of_examples(task: Scored) -> str:
    """Say which examples a score is based on: how many, whether they are a subset or truncated, settings and notes."""
    text = f"{count(task.examples)} examples"
    if task.subset:
        text += ", a subset"
    if task.truncated:
        text += f", {count(task.truncated)} of them truncated"
    return f"{text}; {task.details}" if task.details else text


def rows(task: Quality) -> list[str]:
    """Say how many rows were read and skipped: 12 rows read, 2 skipped (empty lines: 2); nothing if it is not known."""
    if task.rows is None:
        return []
    reasons = ", ".join(f"{reason}: {count(number)}" for reason, number in task.rows.skipped.items())
    skipped = count(sum(task.rows.skipped.values()))
    return [f"{count(task.rows.read)} rows read, {skipped} skipped{f' ({reasons})' if reasons else ''}"]


def lengths(chosen: Iterable[int], measured: Sequence[int]) -> str:
    """Write lengths as ranges of the measured ones: 128–512 and 2,048 tokens."""
    places = sorted(measured.index(length) for length in chosen)
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [count(measured[run[0]]) + (f"–{count(measured[run[-1]])}" if len(run) > 1 else "") for run in runs]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) + " tokens"


def span(values: Sequence[float]) -> str:
    """Write the range of ratios: 1.20–1.83×."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low.removesuffix('×')}–{high}"


def layer_ranges(layers: Sequence[int]) -> str:
    """Write layers as ranges: 0–5, 8."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def setting(row: Speed) -> str:
    """The setting of a speed measurement: CPU, float32, 2 threads, batch 1."""
    parts = [row.device.upper(), row.dtype]
    if row.device == "cpu":
        parts.append("1 thread" if row.threads == 1 else f"{row.threads} threads")
    parts.append(f"batch {row.batch}")
    if row.mode == "generate":
        parts.append(f"decoding {row.new_tokens} tokens")
    if row.fast_products:
        parts.append("fast products")
    return ", ".join(parts)


def implementations(entry: Timing) -> str:
    """The implementation that each op used: cluster_queries cpu, lsh_attention plain PyTorch."""
    ran = {op: "plain PyTorch" if way in PLAIN else way for op, way in (entry.chosen or {}).items()}
    return ", ".join(f"{op} {way}" for op, way in sorted(ran.items()))


def needed(entry: QualityVariant, task: Quality) -> str | None:
    """Write how many examples, and groups if they are grouped, would settle a verdict; None if unknown."""
    examples, groups = entry.needed_examples, task.groups
    if not examples:
        return None
    text = f"about {roughly(examples)} examples"
    return f"{text} of {roughly(math.ceil(examples * groups / task.examples))} groups" if groups else text


def loss(entry: QualityVariant, task: Quality) -> str:
    """Say what a difference of scores means: loses 0.3 ± 0.7 points of accuracy.

    An interval that reaches much farther to one side, as where rare losses may hide, is written with both ends.
    """
    difference, within, between, alone = entry.difference * scale(task), "", "", ""
    if entry.interval is None:
        digits, alone = (1 if task.fraction else 3), ", measured on a single example or group,"
    else:
        low, high = (end * scale(task) for end in entry.interval)
        near, half = sorted((high - difference, difference - low))
        lopsided = half > _LOPSIDED * near > 0
        digits = 1 if (near if lopsided else half) >= 0.05 else 2 if task.fraction else 3
        if lopsided:
            between = f" (between {signed(low, digits)} and {signed(high, digits)})"
        else:
            within = f" ± {decimal(half, digits)}"
    amount = decimal(abs(difference), digits)
    if amount == decimal(0.0, digits):
        return f"scores the same{alone}" if alone else f"scores the same{within}{between} {units(task)}"
    if task.lower_is_better:
        counted = task.fraction or " per " in units(task)
        direction = "more" if difference > 0 else "fewer" if counted else "less"
        return f"has {amount}{within} {direction} {units(task)}{between}{alone}"
    return f"{'loses' if difference < 0 else 'gains'} {amount}{within} {units(task)}{between}{alone}"


# One side of an interval that is so many times as long as the other is not written as ±.
_LOPSIDED = 5


def tested(entry: QualityVariant) -> bool:
    """Whether a loss could show: the variant approximates enough of attention, and the base does better than guessing."""
    return not entry.verdict.startswith("not tested") and entry.verdict != AT_CHANCE


def tone(entry: QualityVariant) -> str:
    """Tone of a verdict: good, bad or even."""
    return {"no loss": "good", "loss beyond margin": "bad"}.get(entry.verdict, "even")


def approximated(entry: QualityVariant, task: Quality) -> str:
    """Write how much of attention was approximated: 100 % of inputs, 3 % of pairs."""
    # Null says that the model is not converted; older records lack the key.
    if "approximated" not in entry.model_fields_set:
        return "unknown"
    counts = entry.approximated
    if counts is None:
        return NOTHING
    pairs = "pairs not recorded" if counts.pairs is None else f"{part(counts.pairs)} of pairs"
    return f"{part(counts.examples / task.examples)} of inputs, {pairs}"


def part(share: float) -> str:
    """Write a share; 0 % means exactly none and 100 % exactly all."""
    if 0 < share < 0.01:
        return "< 1 %"
    return percent(min(share, 0.99) if share < 1 else share)


def margin(entry: QualityVariant, task: Quality) -> str:
    """Write an acceptable loss: 0.5 points; 0.014 bits per byte (1.0 %), as a share of exact attention's score."""
    if entry.margin is None:
        return NOTHING
    if task.fraction:
        return f"{decimal(entry.margin * scale(task), 1)} points"
    base = task.base.scores.get(task.metric)
    share = f" ({percent(entry.margin / abs(base), 1)})" if base else ""
    return f"{decimal(entry.margin, 3)} {units(task)}{share}"


def verdict(entry: QualityVariant, task: Quality) -> str:
    """Say what a verdict means, with its margin."""
    if not tested(entry):
        return entry.verdict
    allowed = margin(entry, task)
    if entry.verdict == "inconclusive":
        settling = needed(entry, task)
        more = f"; {settling} would settle it" if settling else ""
        return f"inconclusive at a margin of {allowed}{more}"
    if entry.verdict == LIKELIHOOD_ONLY:
        return f"{LIKELIHOOD_ONLY} (approx evaluate MODEL --task passkey measures it)"
    meaning = {
        "no loss": f"no loss, at a margin of {allowed}",
        "loss within margin": f"a loss, within the margin of {allowed}",
        "loss beyond margin": f"a loss beyond the margin of {allowed}",
    }
    return meaning[entry.verdict]


def use(cut: Ablated, task: Quality) -> str:
    """Say what the estimates of a variant add: the linear part helps; with it +1.20 points of accuracy (0.40 to 2.00)."""
    if cut.difference is None or cut.interval is None:
        return cut.verdict
    digits = 2 if task.fraction else 3
    change, ends = signed(cut.difference * scale(task), digits), between(cut.interval, digits, scale(task))
    return f"{cut.verdict}; with it {change} {units(task)} ({ends})"


def duration(seconds: float) -> str:
    """Write a time in seconds, or in minutes if it is longer than two."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


ENDED = {
    "steps": "its steps",
    "time": "the time budget",
    "patience": "no progress",
    "budget": "the budget, which was met",
}
"""Why a mode of training ended."""


def cell(text: object) -> str:
    """Escape text for a line or a table cell of Markdown."""
    plain = " ".join(str(text).split())
    for character in "\\`*_[]<>|#":
        plain = plain.replace(character, "\\" + character)
    return plain
