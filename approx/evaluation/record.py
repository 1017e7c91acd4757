"""The record: one JSON file that holds a whole run, and the only input of a report.

`approx.evaluation.record` describes it; it is validated on reading and on writing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from approx.errors import ApproxError, Exit
from approx.validation import Written, validate
from approx_kernels.runtime.atomic_file import atomic_file
from approx_kernels.runtime.processor import processor_name

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]

BUSY = "not settled: the machine was busy"
# Undisturbed repetitions that a verdict needs; half of them where there are fewer.
ENOUGH = 5
# An interval whose upper end is more than this many times its lower end settles nothing.
WIDEST = 1.5
# Smaller gains are not worth giving up exactness.
WORTHWHILE = 1.03
# Where the model without attention gains less than this, no mechanism is worth it.
HARDLY = 1.1
# The name of the plan that a search found, in its record.
FOUND = "found"


class Timing(Written):
    """Times of one model.

    Attributes:
        median_ms: Median; of the decoding of all new tokens in the mode `generate`.
        p10_ms: First decile.
        p90_ms: Last decile.
        first_ms: Time of the first call.
        peak_mb: Peak memory.
        cache_mb: Memory of the cache after the last token, in the mode `generate`.
        prompt_ms: Median time to read the prompt and write the first token, in the mode `generate`; older records lack it.
        tokens_per_second: Tokens decoded in a second, over the batch, in the mode `generate`.
        chosen: Op -> the implementation it used, such as `cpu` or `triton`; `reference` and `tiles` are plain PyTorch.
        samples: Number of repetitions used.
        rejected: Number of disturbed repetitions.
        status: `ok` or `out of memory`.
    """

    median_ms: float | None
    p10_ms: float | None = None
    p90_ms: float | None = None
    first_ms: float | None = None
    peak_mb: float | None
    cache_mb: float | None = None
    prompt_ms: float | None = None
    tokens_per_second: float | None = None
    chosen: dict[str, str] | None = None
    samples: int = 0
    rejected: int = 0
    status: str

    @property
    def enough(self) -> bool:
        """Whether enough repetitions were undisturbed; older records, without their number, are believed."""
        counted = "samples" in self.model_fields_set
        return not counted or self.samples >= min(ENOUGH, (self.samples + self.rejected) / 2)


class Ratio(Written):
    """The speed of one model relative to that of the base.

    Attributes:
        ratio: Base time / its time.
        interval: Interval of the ratio.
    """

    ratio: float | None
    interval: Interval | None

    @property
    def wide(self) -> bool:
        """Whether the interval is too wide to settle anything."""
        return self.interval is not None and self.interval[1] > WIDEST * self.interval[0]


class Relative(Ratio, Timing):
    """Times of one model, and its speed relative to the base."""


class Named(Written):
    """What has a name.

    Attributes:
        name: Name of the variant.
    """

    name: str


class SpeedVariant(Relative, Named):
    """One variant at one size.

    Attributes:
        share_of_ceiling: Its ratio divided by the ceiling's.
        verdict: As of `Speed.verdict`; null without a ratio.
    """

    share_of_ceiling: float | None = None
    verdict: str | None = None


class Spread(Ratio):
    """The base against itself.

    Attributes:
        ratio: First turns / second turns, near 1.
    """


class Speed(Written):
    """One length and batch size.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: Dtype that the models compute in, `float32 with int8 weights` of quantised ones.
        threads: Threads of torch.
        batch: Sequences per call.
        length: Tokens per sequence; of the prompt in the mode `generate`.
        mode: What is timed: `forward`, or `generate` for greedy decoding after the prompt.
        new_tokens: Tokens decoded after the prompt; null in the mode `forward`.
        inputs: `real` or `synthetic`.
        baseline: The exact attention of the base, the fastest on this machine.
        crowded: Whether other programs used the cores throughout.
        base: Times of the base.
        default: Times of PyTorch's default SDPA; null if that is the base.
        ceiling: Times of the model without attention.
        spread: The base against itself.
        variants: Times of the variants, in order.
        fast_products: Whether all models ran within `approx.fast_products()`.
        seconds: Seconds of sound in a sequence; null if it is not of sound.
    """

    device: str
    dtype: str
    threads: int
    batch: int
    length: int
    mode: str
    new_tokens: int | None = None
    inputs: Literal["real", "synthetic"]
    baseline: str
    crowded: bool = False
    base: Timing
    default: Relative | None = None
    ceiling: Relative | None = None
    spread: Spread | None = None
    variants: list[SpeedVariant]
    fast_products: bool = False
    seconds: float | None = None

    def settled(self, entry: Relative) -> bool:
        """Whether the machine was quiet enough for the ratio of one model to mean anything.

        Both need enough undisturbed repetitions and narrow intervals, the base against itself too. A ceiling must be
        possible as well: removing attention does not slow a model down, and no variant is faster.
        """
        quiet = self.base.enough and entry.enough and not entry.wide and not (self.spread and self.spread.wide)
        if entry is not self.ceiling or entry.interval is None or not quiet:
            return quiet
        faster = (one.interval[0] for one in self.variants if one.interval and self.settled(one))
        return entry.interval[1] >= max([1.0, *faster])

    def believed(self, entry: Relative) -> Ratio:
        """The ratio of one model and its interval; null if they are not settled."""
        settled = self.settled(entry)
        return Ratio(ratio=entry.ratio if settled else None, interval=entry.interval if settled else None)

    def share(self, entry: Relative) -> float | None:
        """The ratio of one model as a share of the ceiling; None if one is not settled or the ceiling gains nothing."""
        if self.ceiling is None:
            return None
        ratio, ceiling = self.believed(entry), self.believed(self.ceiling)
        if ratio.ratio is None or ceiling.ratio is None or ceiling.interval is None or ceiling.interval[0] <= 1:
            return None
        return ratio.ratio / ceiling.ratio

    def verdict(self, entry: Relative) -> str | None:
        """What the interval of a ratio says; None without a ratio.

        Returns:
            `faster`: above 1, with a gain of at least 3 % that exceeds the difference of the base from itself.
            `slight gain`: above 1, but a smaller gain. `no clear gain`: the interval includes 1. `slower`: below 1.
            `not settled: the machine was busy`: see `settled`.
        """
        if entry.ratio is None or entry.interval is None:
            return None
        if not self.settled(entry):
            return BUSY
        low, high = entry.interval
        if low <= 1:
            return "slower" if high < 1 else "no clear gain"
        ends = self.spread.interval if self.spread and self.spread.interval else [1.0, 1.0]
        noise = max(ends[1], 1 / ends[0])
        return "faster" if entry.ratio >= WORTHWHILE and entry.ratio > noise else "slight gain"


class Crossover(Written):
    """The length from which a variant is faster.

    Attributes:
        name: Name of the variant.
        batch: Sequences per call.
        dtype: Dtype that the models compute in, `float32 with int8 weights` of quantised ones.
        device: `cpu` or `cuda`.
        mode: What is timed: `forward` or `generate`.
        length: First length from which on the ratio interval is above 1; null if there is none.
    """

    name: str
    batch: int
    dtype: str
    device: str
    mode: str = "forward"
    length: int | None


Count = Annotated[int, Field(ge=0)]


class Point(Written):
    """A point of a training curve.

    Attributes:
        step: Number of steps done.
        loss: Mean loss since the previous point; null at points that have only a validation.
        learning_rate: Highest learning rate of all parameters.
        validation: Value of the measure on the held-out examples.
    """

    step: Count
    loss: float | None = None
    learning_rate: float | None = None
    validation: float | None = None


class TrainingPhase(Written):
    """One mode of a training.

    Attributes:
        mode: Name of the mode.
        steps: Number of steps.
        best_step: Step whose weights were kept; 0 if none was better than those before the first.
        parameters: Number of trained parameters.
        tokens: Number of training tokens.
        seconds: Duration.
        measure: Measure that chose the best step: a metric, or `loss`.
        curve: Points in the order of the steps.
        ended: Reason for the end: `steps`, `time`, `patience` or `budget`.
    """

    mode: str
    steps: Count
    best_step: Count
    parameters: Count
    tokens: Count
    seconds: float
    measure: str
    curve: list[Point]
    ended: str


class LayerDivergence(Written):
    """How far one converted layer alone moves the outputs of a model.

    Attributes:
        layer: Its number.
        mechanism: Name of its mechanism; several if its heads differ.
        divergence: Mean divergence from the exact model, with every other layer exact.
        kept: Whether the layer was made exact again.
    """

    layer: Count
    mechanism: str
    divergence: float
    kept: bool


class KeptExact(Written):
    """The layers that were made exact again before a training, since they move the outputs most.

    Attributes:
        unit: Unit of the divergences, in words.
        inputs: Number of training inputs that they were measured on.
        layers: All layers that were converted until then.
        steps: Steps of transfer that mechanisms were fitted by before that, and only for that.
    """

    unit: str
    inputs: Count
    layers: list[LayerDivergence]
    steps: Count


class Trained(Written):
    """The training of a variant, or of the base.

    Attributes:
        name: Name of the variant.
        recover: Names of the modes, in order.
        phases: Outcome of each mode; empty if the budget was met before training.
        measure: Measure of the held-out examples.
        exact: Its value with exact attention before training.
        before: Its value before training.
        after: Its value after training.
        held_out: Number of held-out examples, which chose the best step.
        examples: Number of training examples.
        data_sha256: Hash of all these examples.
        approximated: Share of the training inputs on which the variant approximates; null for the base.
        fitted: What its mechanisms were fitted to again before the first step, in words; null if they were not.
        helped: Whether the result is better than what training began with; null if nothing was trained, or it was not
            noted.
        kept_exact: The layers that were made exact again before it; null if there are none.
    """

    name: str
    recover: list[str]
    phases: list[TrainingPhase]
    measure: str
    exact: float | None
    before: float | None
    after: float | None
    held_out: Count
    examples: Count
    data_sha256: str
    approximated: float | None = None
    fitted: str | None = None
    helped: bool | None = None
    kept_exact: KeptExact | None = None


class _Measured(BaseModel):
    errors: dict[int, float] | None = None
    captured_mass: dict[int, float] | None = None
    measured_on: str | None = None


def _readable(receipt: dict[str, Any]) -> dict[str, Any]:
    try:
        _Measured.model_validate(receipt)
    except ValidationError:
        raise ValueError("a receipt whose errors and captured_mass are one number for each layer") from None
    return receipt


Receipt = Annotated[dict[str, Any], AfterValidator(_readable)]


AT_CHANCE = "the base is at chance"
"""The verdict where the base is no better than guessing, so that no loss could show."""

LIKELIHOOD_ONLY = "likelihood only: generation not measured"
"""The verdict on likelihoods where there would be no loss, but no task of the record lets the model generate its answer."""

Scores = dict[str, float]


class RecipeText(Written):
    """The recipe of the run.

    Attributes:
        text: The text of the file.
        sha256: Hash of the text.
    """

    text: str
    sha256: str


class Checkpoint(Written):
    """The base checkpoint.

    Attributes:
        name: Its name, as given.
        revision: Commit on the hub.
        weights_sha256: Hash of its weights.
        family: Model type in config.json.
        parameters: Number of parameters.
        layers: Number of layers with self-attention.
        positions: Maximum number of positions; null if unlimited.
        runtime: What runs it, if it is an exported program or was quantised, and the precision of its weights; null for PyTorch
            alone.
    """

    name: str
    revision: str | None
    weights_sha256: str | None
    family: str
    parameters: Count
    layers: Count
    positions: int | None
    runtime: str | None = None


class Layer(Written):
    """A converted layer, or a group of its heads.

    Attributes:
        layer: Number of the layer.
        heads: Numbers and ranges of the heads; `all` if the layer is not split.
        mechanism: Name of the mechanism.
        settings: Settings of the mechanism.
        spans: Learned span of each head, in tokens; only of mechanisms with spans.
        operations: Floating-point operations with these spans on an input as long as the model's positions, as a share
            of those of exact attention.
    """

    layer: int
    heads: str = "all"
    mechanism: str
    settings: dict[str, Any]
    spans: list[float] | None = None
    operations: float | None = None


class Variant(Written):
    """A model compared with the base.

    Attributes:
        name: Its name in all tables.
        layers: The converted layers.
        verified: Whether its conversion passed its checks.
        receipt: Receipt of the conversion (see `approx.checkpoints.history`), or null.
        weights_sha256: Hash of its weights; older records lack it.
        runtime: What runs it, if it is an exported program or was quantised, and the precision of its weights; null for PyTorch
            alone.
    """

    name: str
    layers: list[Layer]
    verified: bool
    receipt: Receipt | None
    weights_sha256: str | None = None
    runtime: str | None = None


class CarriedState(Written):
    """What a model kept from one segment to the next of texts that it read in order, and how long it took.

    Attributes:
        tokens: Tokens that were scored.
        state_bytes: The largest state, in bytes, at the ends of examples.
        reached: Tokens of a text read when the state was first that large: it did not grow after them.
        seconds: Time to read all tokens; of stored outputs that of the run that computed them.
    """

    tokens: Count
    state_bytes: Count
    reached: Count
    seconds: float


class BaseQuality(Written):
    """The scores of the base.

    Attributes:
        scores: Metric -> score.
        interval: Interval of the metric; null for a single example or group.
        at_chance: Whether the interval of the score reaches the chance level.
        carried: What it kept while it read texts in order; null for tasks that do not.
    """

    scores: Scores
    interval: Interval | None
    at_chance: bool = False
    carried: CarriedState | None = None


class Approximated(Written):
    """The share of the inputs on which attention is approximated.

    Attributes:
        examples: Number of examples with attention approximated in any of their windows.
        tokens: Share of all real tokens in such windows.
        pairs: Share of the pairs of tokens whose weight is not exact, in the heads that were converted, averaged over
            the inputs; older records lack it.
    """

    examples: Count
    tokens: float
    pairs: float | None = None


class Seeds(Written):
    """Scores over random seeds of the mechanisms; all empty or null if nothing is random.

    Attributes:
        seeds: Offsets added to the seed of each layer, 0 first.
        scores: Score of each seed.
        mean: Mean score.
        sd: Standard deviation of the scores.
        low: Lowest score.
        high: Highest score.
    """

    seeds: list[int]
    scores: list[float]
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None


class Slice(Written):
    """Examples in a range of lengths.

    Attributes:
        from_: Lower end, inclusive.
        to: Upper end, exclusive; null if open.
        examples: Number of examples.
        base: Score of the base, by the metric of slices.
        converted: Score of the variant.
    """

    from_: int | None = Field(alias="from")
    to: int | None
    examples: Count
    base: float | None
    converted: float | None

    @classmethod
    def of(cls, start: int | None, to: int | None, **more: Any) -> Slice:
        """Make a slice; `from` is a word of Python, so no keyword can have its name."""
        return cls(**{"from": start, "to": to, **more})


class Ablated(Written):
    """A variant with the estimates of its mechanisms switched off, so that only their exact keys are left.

    Attributes:
        part: What was switched off: `linear part` or `estimated part`.
        layers: Numbers of the layers in which it was; empty if there is nothing to switch off.
        scores: Metric -> score without it; empty if there is nothing to switch off.
        difference: Score of the variant minus the score without it; null if there is nothing to switch off.
        interval: Interval of the difference; null for a single example or group, or if nothing was switched off.
        verdict: Whether the part is used, in words; see `approx.evaluation.statistics.use_of`.
    """

    part: str
    layers: list[int]
    scores: Scores
    difference: float | None = None
    interval: Interval | None = None
    verdict: str


class WorstExample(Written):
    """An example on which a variant does worse than the base, in words; long texts are cut.

    Attributes:
        id: Name of the example.
        input: The input; empty if it is no text.
        target: The correct prediction; empty if it says nothing, such as the size of a text.
        base: Prediction of the base; empty if its score says it all, such as a loss.
        converted: Prediction of the variant.
        base_score: Score of the base on this example alone; null if the metric has none, such as a correlation.
        converted_score: Score of the variant on it.
    """

    id: str
    input: str
    target: str
    base: str
    converted: str
    base_score: float | None
    converted_score: float | None


class QualityVariant(Written):
    """One variant on one task.

    Attributes:
        name: Name of the variant.
        scores: Metric -> score.
        difference: Converted minus base.
        interval: Interval of the difference.
        confidence: Confidence of the interval, such as 0.95.
        test: Name of the statistical test.
        p_value: p-value under the hypothesis of no change.
        margin: Acceptable loss.
        verdict: See `approx.evaluation.statistics.verdict`.
        needed_examples: Number of examples that would settle an inconclusive verdict.
        approximated: Inputs with attention approximated; null for a model that is not converted.
        slices: Scores by length.
        seeds: Scores over seeds; null if only one was scored.
        ablated: Scores with its estimates switched off; null if nobody asked for them.
        at_chance: Whether the interval of its own score reaches the chance level.
        p_adjusted: p_value, Holm-adjusted over the tasks of the variant, or of its plan in a report of several records;
            null for a single task.
        rare: How far the interval reaches for losses so rare that no example shows them, in the units of the score;
            null without an interval; older records lack it.
        carried: What it kept while it read texts in order; null for tasks that do not.
        worst: Up to 10 examples on which the variant loses most against the base, the worst first; older records lack
            them, and what is published leaves them out.
    """

    name: str
    scores: Scores
    difference: float
    interval: Interval | None
    confidence: float | None = None
    test: str | None = None
    p_value: float | None = None
    margin: float | None = None
    verdict: str
    needed_examples: int | None = None
    approximated: Approximated | None = None
    slices: list[Slice] = Field(default_factory=list)
    seeds: Seeds | None = None
    ablated: Ablated | None = None
    at_chance: bool = False
    p_adjusted: float | None = None
    rare: float | None = None
    carried: CarriedState | None = None
    worst: list[WorstExample] = Field(default_factory=list)


class Tokens(Written):
    """Lengths of the inputs: what a model read at once, the longest of each example.

    Attributes:
        median: Lower median.
        longest: Maximum.
        windows: Most inputs that an example was read in. Older records lack it; there, the lengths of all windows of an
            example are added, and their overlaps are counted twice.
    """

    median: Count
    longest: Count
    windows: Count | None = None


class Rows(Written):
    """What was read of the data.

    Attributes:
        read: Rows that hold an example.
        skipped: Why rows hold none -> their number.
    """

    read: Count
    skipped: dict[str, Count] = Field(default_factory=dict)


class Quality(Written):
    """One task.

    Attributes:
        task: Name of the task.
        split: Name of the split.
        examples: Number of examples.
        subset: Whether examples were left out.
        truncated: Number of truncated examples.
        measures: Of decoders: `likelihood` of given text, or `generation`, where the model writes its answer; null for other
            tasks, and in older records.
        settings: Settings of the task, as they were chosen; older records lack them.
        notes: What was left out or changed when the examples were read, and how the labels of the model are taken.
        rows: Rows read and skipped; null if examples are not read from rows, and in older records.
        tokens: Lengths of the inputs.
        metric: Metric of differences and verdicts.
        fraction: Whether the score is a fraction, shown in percent and points.
        lower_is_better: Whether lower scores are better.
        sliced_by: Unit of the bounds of slices.
        slice_metric: Metric of the slices.
        chance: Score of the best answer that ignores its input; null if it is not known.
        groups: Number of speakers or documents that are resampled as a whole; null if examples are independent. Fewer
            than 5 give no interval.
        grouped_by: What the examples of a group share, such as `article`; null if examples are independent.
        stake: What the intervals assume of an example that is wholly lost: the loss of the score for each unit of the
            share of such examples; older records lack it.
        base: Scores of the base.
        variants: Scores of the variants, in order.
        outputs: Name of the parquet file of per-example outputs, next to the record.
        fast_products: Whether all models ran within `approx.fast_products()`.
    """

    task: str
    split: str
    examples: Count
    subset: bool
    truncated: Count
    measures: Literal["likelihood", "generation"] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    rows: Rows | None = None
    tokens: Tokens | None = None
    metric: str
    fraction: bool = True
    lower_is_better: bool = False
    sliced_by: str | None = None
    slice_metric: str | None = None
    chance: float | None = None
    groups: int | None = None
    grouped_by: str | None = None
    stake: float | None = None
    base: BaseQuality
    variants: list[QualityVariant]
    outputs: str | None
    fast_products: bool = False

    @property
    def details(self) -> str:
        """What distinguishes evaluations of one split, in words: the settings of the task, and the notes."""
        chosen = (
            f"{name} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name} {value}"
            for name, value in self.settings.items()
            # Names of columns say nothing about the examples.
            if name != "columns"
        )
        return "; ".join([*chosen, *self.notes])


# Verdicts on losses within the margin: there is none, or a small one.
_SMALL = ("no loss", "loss within margin")


def judge_likelihoods(quality: Sequence[Quality]) -> list[Quality]:
    """Let likelihoods of a variant show no loss only where a task has measured its generation too.

    A model can be as good at rating given text and far worse at writing its own. May be called again when tasks are added.
    """
    writing = {entry.name for task in quality if task.measures == "generation" for entry in task.variants}

    def judged(entry: QualityVariant) -> QualityVariant:
        if entry.name not in writing:
            verdict = LIKELIHOOD_ONLY if entry.verdict in _SMALL else entry.verdict
        elif entry.verdict == LIKELIHOOD_ONLY:
            # Losses are positive differences of likelihoods, where lower is better, and otherwise negative ones.
            low, high = entry.interval or (0.0, 0.0)
            verdict = _SMALL[(low > 0) if task.lower_is_better else (high < 0)]
        else:
            return entry
        return entry.model_copy(update={"verdict": verdict})

    made = []
    for task in quality:
        likely = task.measures == "likelihood"
        made.append(task.model_copy(update={"variants": [judged(one) for one in task.variants]}) if likely else task)
    return made


class Record(Written):
    """A whole run, and the only input of a report.

    Attributes:
        schema_: 1; readers reject any other.
        title: Title of the report.
        notice: A sentence shown above everything else, such as "A demonstration, not a benchmark."
        command: The command as typed.
        seed: Seed of all random choices.
        recipe: The recipe of the run.
        checkpoint: The base.
        variants: Models compared with the base.
        quality: Scores of each task.
        speed: Times at each length and batch size.
        crossover: Lengths from which variants are faster.
        trainings: Trainings of variants, in order.
        environment: Machine and versions, from `approx.evaluation.record.environment`.
    """

    schema_: Literal[1] = Field(alias="schema")
    title: str
    notice: str | None
    command: str
    seed: int
    recipe: RecipeText | None
    checkpoint: Checkpoint
    variants: list[Variant]
    quality: list[Quality]
    speed: list[Speed]
    crossover: list[Crossover]
    trainings: list[Trained] = Field(default_factory=list)
    environment: dict[str, Any]


SCHEMA: Final = 1
# The kind of a record that is none of these, see `approx.arena.results`.
FROM_SCRATCH: Final = "long-range-arena"
# Mistakes of a damaged record that its error lists.
_SHOWN = 12
# Characters of a line of JSON: a row of figures, of a variant at a length.
_WIDTH = 500
# The mark of a parquet file that this tool wrote.
_MADE = {b"approx": b"outputs of each example"}


def save(path: Path, record: Record) -> None:
    """Write a record atomically.

    Args:
        path: The file; its folder is created. An older record is replaced.
        record: The record. Keys that it was not made with are left out.

    Raises:
        ApproxError: if the record is invalid, a number is not finite, or the file cannot be written.
    """
    data = record.to_data()
    # Parts may have been changed since they were validated.
    validated(data, f"The record for {path}", Exit.INTERNAL)
    try:
        text = in_lines(data) + "\n"
    except ValueError as error:
        raise ApproxError(f"The record for {path} cannot be stored: {error}.", Exit.INTERNAL) from None
    _write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ApproxError: if the record is missing, damaged, invalid, or of another schema; lists what is wrong.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ApproxError(f"The record {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    except (ValueError, RecursionError) as error:
        raise ApproxError(
            f"The record {path} is damaged: {error}. Make it again with the command that made it.",
            Exit.UNAVAILABLE,
        ) from None
    return validated(data, f"The record {path}", Exit.UNAVAILABLE)


def validated(data: Any, what: str, exit_code: Exit) -> Record:
    """Make a record from plain data.

    Args:
        data: The content of a file, or the stored result of a stage.
        what: Begins the error: `The record speed.json`.
        exit_code: Exit code of the error.

    Raises:
        ApproxError: if the data are invalid or of another schema; lists what is wrong.
    """
    if isinstance(data, dict) and data.get("kind") == FROM_SCRATCH:
        raise ApproxError(
            f"{what} holds scores of models trained from scratch, by approx lra, which never stand beside scores of "
            "conversions. Its page is lra.md in its folder; leave it out here.",
            exit_code,
        )
    if not isinstance(data, dict) or "schema" not in data:
        raise ApproxError(f"{what} is not a record: it has no key 'schema'.", exit_code)
    if data["schema"] != SCHEMA:
        raise ApproxError(
            f"{what} has schema {data['schema']}, but this version of approx reads schema {SCHEMA}. "
            "Make the record again, or use the version that made it.",
            exit_code,
        )
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApproxError(
            f"{what} is damaged: it holds half of a surrogate pair, which is not a character. Make it again with the "
            "command that made it.",
            exit_code,
        ) from None
    record, mistakes = validate(Record, data, "record")
    if record is None:
        listed = "; ".join(one.text.rstrip(".") for one in mistakes[:_SHOWN])
        more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        raise ApproxError(f"{what} is damaged: {listed}{more}. Make it again with the command that made it.", exit_code)
    return record


_LATER: dict[str, tuple[str, Callable[[Quality], bool]]] = {
    "rare": (
        "intervals that count rare losses",
        lambda task: all("rare" in one.model_fields_set for one in task.variants),
    ),
    "pairs": (
        "the share of pairs that was approximated",
        lambda task: all(
            "approximated" in one.model_fields_set and (one.approximated is None or one.approximated.pairs is not None)
            for one in task.variants
        ),
    ),
    "chance": ("the score of guessing", lambda task: "chance" in task.model_fields_set),
    "grouped_by": ("what examples were resampled by", lambda task: "grouped_by" in task.model_fields_set),
    "windows": ("the length of the longest input", lambda task: task.tokens is None or task.tokens.windows is not None),
}


def lacking(made: Record) -> dict[str, str]:
    """The fields of its quality that a record is older than, with what they hold in words."""
    return {name: words for name, (words, known) in _LATER.items() if not all(map(known, made.quality))}


def environment(threads: int | None = None, gpu: str | None = None) -> dict[str, Any]:
    """Describe the machine and the versions of a measurement.

    Args:
        threads: Threads of torch; None if torch was not used.
        gpu: Torch's name of the device; None on a CPU.
    """
    packages = {"approx": "approx-attention", "torch": "torch", "transformers": "transformers", "triton": "triton"}
    return {
        **{key: _version(package) for key, package in packages.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "gpu": gpu,
        "git_commit": _git_commit(),
    }


def write_outputs(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    """Write per-example outputs as parquet, atomically.

    Args:
        path: The file; its folder is created.
        columns: Name -> one value per example.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: list(values) for name, values in columns.items()}).replace_schema_metadata(_MADE)
    _write(Path(path), lambda temporary: pyarrow.parquet.write_table(table, temporary))


def refuse_foreign_outputs(path: Path) -> None:
    """Check that a file of per-example outputs, which no option names, was written by approx before it is replaced.

    Args:
        path: The parquet file. Earlier versions did not mark it, but the record next to it names it.

    Raises:
        ApproxError: if approx did not write it (exit code 8).
    """
    if not path.exists():
        return
    import pyarrow
    import pyarrow.parquet

    with contextlib.suppress(OSError, pyarrow.ArrowException):
        if _MADE.items() <= (pyarrow.parquet.read_schema(path).metadata or {}).items():
            return
    with contextlib.suppress(ApproxError):
        if path.name in [one.outputs for one in load(path.with_suffix(".json")).quality]:
            return
    raise ApproxError(
        f"{path} would hold the outputs of each example, but exists and was not written by approx; --force replaces "
        "only the record. Move it away, or choose another output.",
        Exit.REFUSED,
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        with atomic_file(path) as temporary:
            write(temporary)
    except OSError as error:
        raise ApproxError(f"{path} cannot be written: {error.strerror or error}.", Exit.UNAVAILABLE) from None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed has no metadata.
        return getattr(sys.modules.get("approx"), "__version__", None) if package == "approx-attention" else None


def _git_commit() -> str | None:
    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return process.stdout.strip()

    try:
        # An environment inside another repository would give that repository's commit.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None


def in_lines(made: Any, depth: int = 0) -> str:
    """JSON in which what fits into a line is one, so that rows of figures can be read and compared.

    Args:
        made: What `json` can write, without NaN.
        depth: How deep it is inside of others, which indents it.
    """
    whole = json.dumps(made, ensure_ascii=False, allow_nan=False)
    if len(whole) + depth <= _WIDTH or not isinstance(made, dict | list):
        return whole
    left, right = "{}" if isinstance(made, dict) else "[]"
    if isinstance(made, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {in_lines(value, depth + 1)}" for key, value in made.items()]
    else:
        inner = [in_lines(value, depth + 1) for value in made]
    between = "\n" + " " * (depth + 1)
    return f"{left}{between}{f',{between}'.join(inner)}\n{' ' * depth}{right}"
