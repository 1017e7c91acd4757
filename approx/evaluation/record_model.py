"""What stands in a record, key by key; `docs/schema/record.json` is made of this.

Scores are fractions (0.8956), margins are fractions of the same score (0.005), times are milliseconds, memory is megabytes
(10^6 bytes), a difference is converted minus base, a ratio is base time / variant time, and an interval is [low, high].
Not measured is null, never 0 or NaN. Keys with a default are missing in older records. Further keys may stand beside these;
a reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from approx.evaluation.record_speed import Crossover, Interval, Speed
from approx.evaluation.record_training import Trained
from approx.validation import Written

Scores = dict[str, float | None]
Count = Annotated[int, Field(ge=0)]


class RecipeText(Written):
    """The recipe that the record was made by.

    Attributes:
        text: As it was read.
        sha256: Of the text.
    """

    text: str
    sha256: str


class Checkpoint(Written):
    """The base.

    Attributes:
        name: As it was given.
        revision: Commit of the hub.
        weights_sha256: Of its weights.
        family: As config.json names it.
        parameters: How many.
        layers: How many have self-attention.
        positions: How many it takes; null where there is no limit.
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
        layer: Its number.
        heads: If it is split: numbers and ranges.
        mechanism: Name of the registry.
        settings: Of the mechanism.
    """

    layer: int
    heads: str = "all"
    mechanism: str
    settings: dict[str, Any]


class Variant(Written):
    """What was compared with the base.

    Attributes:
        name: In all tables.
        layers: What was exchanged.
        verified: Whether its conversion passed its checks.
        receipt: Of the conversion (see `approx.checkpoints.receipt`), or null.
    """

    name: str
    layers: list[Layer]
    verified: bool
    receipt: dict[str, Any] | None


class BaseQuality(Written):
    """The scores of the base.

    Attributes:
        scores: Metric -> score.
        interval: Of the metric; null where there is one example or group.
    """

    scores: Scores
    interval: Interval | None


class Approximated(Written):
    """How much of the inputs is approximated at all.

    Attributes:
        examples: On how many of them anything but exact attention is computed, in any window that they are read in.
        tokens: Share of all real tokens in such windows.
    """

    examples: Count
    tokens: float


class Seeds(Written):
    """Draws of the mechanisms; all empty or null where nothing is drawn.

    Attributes:
        seeds: What was added to the seed of each layer, 0 first.
        scores: Of the metric, one a seed.
        mean: Of the scores.
        sd: Of the scores.
        low: The lowest.
        high: The highest.
    """

    seeds: list[int]
    scores: list[float]
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None


class Slice(Written):
    """Examples of some lengths.

    Attributes:
        from_: The shortest.
        to: The first that is longer; null where there is none.
        examples: How many.
        base: Score by the metric of slices.
        converted: The same of the variant.
    """

    from_: int | None = Field(alias="from")
    to: int | None
    examples: Count
    base: float | None
    converted: float | None


class QualityVariant(Written):
    """One variant on one task.

    Attributes:
        name: Of the variant.
        scores: Metric -> score.
        difference: Converted minus base.
        interval: Of the difference.
        confidence: Of the interval, such as 0.95.
        test: That the p-value is of.
        p_value: Of the hypothesis that nothing changed.
        margin: Loss that was acceptable.
        verdict: See `approx.evaluation.statistics.verdict`.
        p_adjusted: p_value raised by Holm over the tasks of the variant, or of its plan where records are read together;
            null if there is one.
        needed_examples: How many would settle an inconclusive verdict.
        approximated: Null for a model that is not converted.
        seeds: Only if asked for.
        slices: By length.
    """

    name: str
    scores: Scores
    difference: float | None
    interval: Interval | None
    confidence: float | None = None
    test: str | None = None
    p_value: float | None = None
    margin: float | None = None
    verdict: str
    p_adjusted: float | None = None
    needed_examples: int | None = None
    approximated: Approximated | None = None
    seeds: Seeds | None = None
    slices: list[Slice] = Field(default_factory=list)


class Tokens(Written):
    """Lengths of the inputs.

    Attributes:
        median: The lower one.
        longest: Of all.
    """

    median: Count
    longest: Count


class Quality(Written):
    """One task.

    Attributes:
        task: Its name.
        split: Its split.
        metric: That verdicts are about.
        fraction: Whether it is told in percent and points.
        lower_is_better: Whether a lower score is a better one.
        examples: How many.
        sliced_by: What the bounds of slices count.
        slice_metric: Metric of the slices.
        subset: Whether examples were left out.
        truncated: Examples that were cut.
        groups: Speakers or documents that are drawn together; null where examples are independent.
        tokens: Lengths of the inputs.
        notes: What was left out or changed when the examples were read.
        base: Scores of the base.
        variants: Of the variants, in order.
        outputs: Name of the parquet of per-example outputs, beside the record.
        fast_products: Whether all models ran within `approx.fast_products()`.
    """

    task: str
    split: str
    metric: str
    fraction: bool = True
    lower_is_better: bool = False
    examples: Count
    sliced_by: str | None = None
    slice_metric: str | None = None
    subset: bool
    truncated: Count
    groups: int | None = None
    tokens: Tokens | None = None
    notes: list[str] = Field(default_factory=list)
    base: BaseQuality
    variants: list[QualityVariant]
    outputs: str | None
    fast_products: bool = False


class RecordModel(Written):
    """A whole run, and the only thing a report is made from.

    Attributes:
        schema_: 1; a reader refuses any other.
        title: Of the report.
        notice: A sentence that stands above everything else, such as "A demonstration, not a benchmark."
        command: What was typed.
        seed: Of everything random.
        recipe: That it was made by.
        checkpoint: The base.
        variants: What was compared with it.
        quality: Tasks.
        speed: Lengths and batch sizes.
        crossover: Where variants begin to be faster.
        trainings: What was trained, in order.
        environment: Machine and versions, as `approx.evaluation.record.environment` returns them.
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
