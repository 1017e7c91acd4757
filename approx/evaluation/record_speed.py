"""The keys of a record about speed: times are in milliseconds, a ratio is base time / variant time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from approx.validation import Written

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]

BUSY = "not settled: the machine was busy"
# Undisturbed repetitions that a verdict needs; half of them where there are fewer.
ENOUGH = 5
# An interval whose upper end is more than this many times its lower end settles nothing.
WIDEST = 1.5
# Smaller gains are not worth giving up exactness.
WORTHWHILE = 1.03


class Timing(Written):
    """Times of one model.

    Attributes:
        median_ms: Median; of the decoding of all new tokens in the mode `generate`.
        p10_ms: First decile.
        p90_ms: Last decile.
        first_ms: Time of the first call.
        peak_mb: Peak memory.
        cache_mb: Memory of the cache after the last token, in the mode `generate`.
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
        dtype: Dtype that the models compute in.
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
        """The ratio of one model as a share of the ceiling; None if either is not settled, or without attention no gain is left."""
        if self.ceiling is None:
            return None
        own, most = self.believed(entry), self.believed(self.ceiling)
        if own.ratio is None or most.ratio is None or most.interval is None or most.interval[0] <= 1:
            return None
        return own.ratio / most.ratio

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
        dtype: Dtype that the models compute in.
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
