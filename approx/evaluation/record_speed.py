"""What a record says of speed, key by key: times are milliseconds, a ratio is base time / variant time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from approx.validation import Written

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class Timing(Written):
    """Times of one model.

    Attributes:
        median_ms: Median.
        p10_ms: First decile.
        p90_ms: Last decile.
        first_ms: Of the first call.
        samples: How many were kept.
        rejected: How many were disturbed.
        peak_mb: Memory at most.
        status: `ok` or `out of memory`.
        chosen: Op -> the implementation that it ran in, such as `cpu` or `triton`; `reference` and `tiles` are plain PyTorch.
    """

    median_ms: float | None
    p10_ms: float | None = None
    p90_ms: float | None = None
    first_ms: float | None = None
    samples: int = 0
    rejected: int = 0
    peak_mb: float | None
    status: str
    chosen: dict[str, str] | None = None


class Relative(Timing):
    """Times of one model, and its speed relative to the base.

    Attributes:
        ratio: Base time / its time.
        interval: Of the ratio.
    """

    ratio: float | None
    interval: Interval | None


class SpeedVariant(Relative):
    """One variant at one size.

    Attributes:
        name: Of the variant.
        share_of_ceiling: How much of what attention could give was obtained.
        verdict: `faster` or `exact is better here`; null without a ratio.
    """

    name: str
    share_of_ceiling: float | None = None
    verdict: str | None = None


class Spread(Written):
    """The base against itself.

    Attributes:
        ratio: Near 1.
        interval: Of the ratio.
    """

    ratio: float | None
    interval: Interval | None


class Speed(Written):
    """One length and batch size.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: That the models compute in.
        threads: Of torch.
        batch: Sequences per call.
        length: Tokens per sequence.
        mode: What a run is.
        inputs: `real` or `synthetic`.
        baseline: The exact attention that is the base, the fastest of all tried.
        crowded: Whether other programs used the cores all the while.
        fast_products: Whether all models ran within `approx.fast_products()`.
        base: The base.
        default: PyTorch's default SDPA; null where that is the base.
        ceiling: The model without attention.
        spread: The base against itself.
        variants: In order.
    """

    device: str
    dtype: str
    threads: int
    batch: int
    length: int
    mode: str
    inputs: Literal["real", "synthetic"]
    baseline: str
    crowded: bool = False
    fast_products: bool = False
    base: Timing
    default: Relative | None = None
    ceiling: Relative | None = None
    spread: Spread | None = None
    variants: list[SpeedVariant]


class Crossover(Written):
    """Where a variant begins to be faster.

    Attributes:
        name: Of the variant.
        batch: Sequences per call.
        dtype: That the models compute in.
        device: `cpu` or `cuda`.
        length: First length with a ratio interval above 1; null where there is none.
    """

    name: str
    batch: int
    dtype: str
    device: str
    length: int | None
