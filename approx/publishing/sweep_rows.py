"""The results of a sweep: what its cells measured, by plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from approx.evaluation.record_model import Quality, QualityVariant, Record, Scores
from approx.evaluation.record_speed import Speed

# The keys of a task that say which examples were scored, and how.
TASK = ("task", "split", "metric", "fraction", "lower_is_better", "examples", "subset", "truncated", "details")
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep, computed or failed.

    Attributes:
        key: Key of its stage.
        title: Name of its stage.
        kind: `base`, `convert`, `heal`, `evaluate` or `bench`.
        checkpoint: Name of its base.
        plan: Name of its plan; None for the base.
        seed: Seed of the mechanisms; None if nothing is random.
        error: Why it failed; None if it did not.
        exit_code: Exit code of the error.
        record: What it measured.
    """

    key: str
    title: str
    kind: str
    checkpoint: str
    plan: str | None
    seed: int | None
    error: str | None = None
    exit_code: int = 0
    record: Record | None = None


@dataclass(frozen=True)
class OverSeeds:
    """A value over seeds; the standard deviation is None for a single seed."""

    mean: float
    sd: float | None
    seeds: int


@dataclass(frozen=True)
class OfSeed:
    """One seed of a plan on a task; see `approx.evaluation.record_model.QualityVariant`."""

    seed: int | None
    scores: Scores
    difference: float
    interval: list[float] | None
    p_value: float | None
    verdict: str


@dataclass(frozen=True)
class QualityRow:
    """One plan on one task.

    Attributes:
        checkpoint: Name of the base.
        plan: Name of the plan.
        values: The values that the grid chose for the plan.
        base: Score of the base; the keys before it are as in a record.
        score: Score of the plan.
        difference: Its difference from the base.
        loss: The mean difference, positive if the plan is worse.
        interval: Interval of the difference; None with several seeds, whose standard deviation is reported instead.
        verdicts: Verdict -> number of seeds with it.
        by_seed: The seeds.
    """

    checkpoint: str
    plan: str
    values: dict[str, Any]
    task: str
    split: str
    metric: str
    fraction: bool
    lower_is_better: bool
    examples: int
    subset: bool
    truncated: int
    details: str
    base: float
    score: OverSeeds
    difference: OverSeeds
    loss: float
    interval: list[float] | None
    verdicts: dict[str, int]
    by_seed: list[OfSeed]

    @property
    def of(self) -> tuple[Any, ...]:
        """The examples that were scored; rows that differ in them are not compared."""
        return (*(getattr(self, name) for name in TASK), self.base)


@dataclass(frozen=True)
class SpeedRow:
    """One plan at one length and batch size.

    Attributes:
        checkpoint: Name of the base.
        plan: Name of the plan.
        values: The values that the grid chose for the plan.
        base_ms: Median time of the base; the other keys are as in a record.
        machine: The part of the environment that speeds depend on.
    """

    checkpoint: str
    plan: str
    values: dict[str, Any]
    batch: int
    length: int
    inputs: str
    device: str
    dtype: str
    mode: str
    fast_products: bool
    baseline: str
    crowded: bool
    base_ms: float | None
    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    peak_mb: float | None
    ratio: float | None
    interval: list[float] | None
    share_of_ceiling: float | None
    verdict: str | None
    status: str
    machine: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A cell that failed."""

    key: str
    title: str
    checkpoint: str
    error: str
    exit_code: int


@dataclass(frozen=True)
class Results:
    """What the cells of a sweep came to.

    Attributes:
        quality: A row for each checkpoint, task and plan, best first.
        speed: A row for each plan, length and batch size.
        failed: The cells that failed.
    """

    quality: list[QualityRow]
    speed: list[SpeedRow]
    failed: list[Failed]

    def to_data(self) -> dict[str, Any]:
        """As plain data, for `sweep.json`."""
        return asdict(self)


def machine(record: Record) -> dict[str, Any]:
    """The part of a record's environment that speeds depend on; speeds of different machines are not compared."""
    return {key: record.environment.get(key) for key in _MACHINE}


def same_task(one: Quality, other: Quality) -> bool:
    """Whether two quality entries are of the same examples."""
    return _examples(one) == _examples(other)


def collect(cells: Sequence[Cell], values: Mapping[str, dict[str, Any]]) -> Results:
    """Combine the cells of a sweep.

    Args:
        cells: The cells that were computed or failed.
        values: Name of a plan -> the values that the grid chose for it.
    """
    groups: dict[str, list[tuple[Cell, Quality]]] = {}
    speed = []
    for cell in cells:
        if cell.kind not in ("evaluate", "bench") or cell.record is None or cell.plan is None:
            continue
        for entry in cell.record.quality:
            groups.setdefault(str((cell.checkpoint, cell.plan, _examples(entry))), []).append((cell, entry))
        for row in cell.record.speed:
            speed.append(_timed(row, cell.checkpoint, cell.plan, values[cell.plan], machine(cell.record)))
    quality = [_over_seeds(group, values) for group in groups.values()]
    failed = [
        Failed(cell.key, cell.title, cell.checkpoint, cell.error, cell.exit_code)
        for cell in cells
        if cell.error is not None
    ]
    return Results(sorted(quality, key=lambda row: (row.checkpoint, row.task, row.loss)), speed, failed)


def _examples(task: Quality) -> tuple[Any, ...]:
    return (*(getattr(task, name) for name in TASK), task.base.scores, task.base.interval)


def _timed(row: Speed, checkpoint: str, plan: str, values: dict[str, Any], place: dict[str, Any]) -> SpeedRow:
    (timed,) = row.variants
    believed = row.believed(timed)
    return SpeedRow(
        checkpoint=checkpoint,
        plan=plan,
        values=values,
        batch=row.batch,
        length=row.length,
        inputs=row.inputs,
        device=row.device,
        dtype=row.dtype,
        mode=row.mode,
        fast_products=row.fast_products,
        baseline=row.baseline,
        crowded=row.crowded,
        base_ms=row.base.median_ms,
        median_ms=timed.median_ms,
        p10_ms=timed.p10_ms,
        p90_ms=timed.p90_ms,
        peak_mb=timed.peak_mb,
        ratio=believed.ratio,
        interval=believed.interval,
        share_of_ceiling=timed.share_of_ceiling,
        verdict=row.verdict(timed),
        status=timed.status,
        machine=place,
    )


def _over_seeds(group: list[tuple[Cell, Quality]], values: Mapping[str, dict[str, Any]]) -> QualityRow:
    cell, task = group[0]
    entries = [(one.seed, entry.variants[0]) for one, entry in group]
    variants = [variant for _, variant in entries]
    difference = _spread([variant.difference for variant in variants])
    plan = str(cell.plan)
    return QualityRow(
        checkpoint=cell.checkpoint,
        plan=plan,
        values=values[plan],
        task=task.task,
        split=task.split,
        metric=task.metric,
        fraction=task.fraction,
        lower_is_better=task.lower_is_better,
        examples=task.examples,
        subset=task.subset,
        truncated=task.truncated,
        details=task.details,
        base=task.base.scores[task.metric],
        score=_spread([variant.scores[task.metric] for variant in variants]),
        difference=difference,
        loss=difference.mean if task.lower_is_better else -difference.mean,
        interval=variants[0].interval if len(variants) == 1 else None,
        verdicts=dict(Counter(variant.verdict for variant in variants)),
        by_seed=[_of_seed(seed, variant) for seed, variant in entries],
    )


def _of_seed(seed: int | None, entry: QualityVariant) -> OfSeed:
    return OfSeed(seed, entry.scores, entry.difference, entry.interval, entry.p_value, entry.verdict)


def _spread(values: list[float]) -> OverSeeds:
    return OverSeeds(fmean(values), stdev(values) if len(values) > 1 else None, len(values))
