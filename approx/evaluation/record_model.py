"""The keys of a record; `docs/schema/record.json` is generated from this.

Scores are fractions (0.8956), margins are fractions of the same score (0.005), times are in milliseconds, memory is in
megabytes (10^6 bytes), a difference is converted minus base, a ratio is base time / variant time, an interval is
[low, high]. Values that were not measured are null, never 0 or NaN. Keys with a default may be missing in older records.
Records may have further keys; readers ignore keys that they do not know. The models have their keys in the order of the
files, so that a record is written as it was read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from approx.evaluation.record_receipt import Receipt
from approx.evaluation.record_speed import Crossover, Interval, Speed
from approx.evaluation.record_training import Trained
from approx.validation import Written

AT_CHANCE = "the base is at chance"
"""The verdict where the base cannot be told from guessing, so that no loss could show."""

Scores = dict[str, float]
Count = Annotated[int, Field(ge=0)]


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
    """

    name: str
    revision: str | None
    weights_sha256: str | None
    family: str
    parameters: Count
    layers: Count
    positions: int | None


class Layer(Written):
    """A converted layer, or a group of its heads.

    Attributes:
        layer: Number of the layer.
        heads: Numbers and ranges of the heads; `all` if the layer is not split.
        mechanism: Name of the mechanism.
        settings: Settings of the mechanism.
        spans: Learned span of each head, in tokens; only of mechanisms with spans.
        operations: Floating-point operations with these spans on an input as long as the model's positions, as a share of
            those of exact attention.
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
        receipt: Receipt of the conversion (see `approx.checkpoints.receipt`), or null.
        weights_sha256: Hash of its weights; older records lack it.
    """

    name: str
    layers: list[Layer]
    verified: bool
    receipt: Receipt | None
    weights_sha256: str | None = None


class BaseQuality(Written):
    """The scores of the base.

    Attributes:
        scores: Metric -> score.
        interval: Interval of the metric; null for a single example or group.
        at_chance: Whether the interval of the score reaches the chance level.
    """

    scores: Scores
    interval: Interval | None
    at_chance: bool = False


class Approximated(Written):
    """The share of the inputs on which attention is approximated.

    Attributes:
        examples: Number of examples with attention approximated in any of their windows.
        tokens: Share of all real tokens in such windows.
        pairs: Share of the pairs of tokens whose weight is not exact, in the heads that were converted, averaged over the
            inputs; older records lack it.
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
        at_chance: Whether the interval of its own score reaches the chance level.
        p_adjusted: p_value, Holm-adjusted over the tasks of the variant, or of its plan in a report of several records;
            null for a single task.
        rare: How far the interval reaches for losses so rare that no example shows them, in the units of the score; null
            without an interval; older records lack it.
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
    at_chance: bool = False
    p_adjusted: float | None = None
    rare: float | None = None


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
        groups: Number of speakers or documents that are resampled as a whole; null if examples are independent. Fewer than 5
            give no interval.
        grouped_by: What the examples of a group share, such as `article`; null if examples are independent.
        stake: What the intervals assume of an example that is wholly lost: the loss of the score for each unit of the share of
            such examples; older records lack it.
        base: Scores of the base.
        variants: Scores of the variants, in order.
        outputs: Name of the parquet file of per-example outputs, beside the record.
        fast_products: Whether all models ran within `approx.fast_products()`.
    """

    task: str
    split: str
    examples: Count
    subset: bool
    truncated: Count
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
        """What tells evaluations of one split apart, in words: the settings of the task, and the notes."""
        chosen = (
            f"{name} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name} {value}"
            for name, value in self.settings.items()
            # Names of columns say nothing about the examples.
            if name != "columns"
        )
        return "; ".join([*chosen, *self.notes])


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
