"""Judging measured times: shares of the ceiling, verdicts, and the lengths from which a variant is faster."""

import pytest

from approx.evaluation.bench import crossover
from approx.evaluation.record import BUSY, Crossover, Speed
from typed import known, part_of


def timed(ratio: float | None, interval: list[float] | None = None, **more) -> dict:
    ends = [ratio - 0.1, ratio + 0.1] if ratio and interval is None else interval
    return {"name": "v", "status": "ok", "ratio": ratio, "interval": ends, **more}


def judged(variant: dict, ceiling: dict | None = None, spread: list[float] | None = None, **base) -> Speed:
    noise = {"ratio": 1.0, "interval": spread or [0.99, 1.01]}
    return part_of(Speed, base={"status": "ok"} | base, variants=[variant], ceiling=ceiling, spread=noise)


@pytest.mark.parametrize(
    ("variant", "ceiling", "share"),
    [
        (timed(1.5), timed(2.0), 0.75),
        # Without attention nothing is gained.
        (timed(1.0, [0.98, 1.02]), timed(1.01, [0.99, 1.03]), None),
        (timed(1.5), timed(None), None),
        (timed(1.5), None, None),
        (timed(None), timed(2.0), None),
        # Impossible: removing attention made the model slower, or slower than a variant.
        (timed(1.5), timed(0.04, [0.03, 0.05]), None),
        (timed(3.0), timed(2.0), None),
        (timed(1.5), timed(2.0, samples=3, rejected=21), None),
    ],
)
def test_share_of_the_ceiling(variant: dict, ceiling: dict | None, share: float | None):
    row = judged(variant, ceiling)
    assert row.share(row.variants[0]) == share
    if variant["ratio"] and ceiling and ceiling["ratio"]:
        assert (row.believed(known(row.ceiling)).ratio is None) is (share is None and ceiling["ratio"] != 1.01)


@pytest.mark.parametrize(
    ("variant", "more", "expected"),
    [
        (timed(1.5), {}, "faster"),
        (timed(1.02, [1.01, 1.03]), {"spread": [0.999, 1.001]}, "slight gain"),
        (timed(1.2, [1.1, 1.4]), {"spread": [0.8, 1.01]}, "slight gain"),
        (timed(1.2, [0.98, 1.4]), {}, "no clear gain"),
        (timed(0.95, [0.8, 1.0]), {}, "no clear gain"),
        (timed(0.55, [0.5, 0.6]), {}, "slower"),
        (timed(None), {}, None),
        # Too few repetitions of either, or too wide an interval of either.
        (timed(0.5, [0.45, 0.55], samples=3, rejected=21), {}, BUSY),
        (timed(0.5, [0.45, 0.55], samples=5, rejected=19), {}, "slower"),
        (timed(1.5, samples=2, rejected=1), {}, "faster"),
        (timed(1.5), {"samples": 4, "rejected": 20}, BUSY),
        (timed(2.27, [1.37, 7.33]), {}, BUSY),
        (timed(1.5), {"spread": [0.7, 1.3]}, BUSY),
    ],
)
def test_a_verdict_agrees_with_its_interval_and_a_busy_machine_gives_none(variant, more, expected):
    row = judged(variant, **more)
    assert row.verdict(row.variants[0]) == expected
    assert (row.believed(row.variants[0]).ratio is None) is (expected in (BUSY, None))


def row(length: int, low: float | None, base: str = "ok", status: str = "ok", batch: int = 1) -> Speed:
    interval = None if low is None else [low, low + 0.2]
    variant = {"name": "v", "ratio": low, "interval": interval, "status": status}
    about = {"batch": batch, "dtype": "float32", "device": "cpu", "mode": "forward", "length": length}
    return part_of(Speed, **about, base={"status": base}, variants=[variant])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(128, 0.8), row(256, 1.1), row(512, 1.3)], 256),
        ([row(512, 1.3), row(256, 1.1), row(128, 0.8)], 256),
        ([row(128, 1.2), row(256, 0.9), row(512, 1.3)], 512),
        ([row(128, 1.2), row(256, 0.9)], None),
        ([row(128, 1.0)], None),
        ([row(128, 0.8), row(256, None, base="out of memory")], 256),
        ([row(128, 1.2), row(256, None, status="out of memory")], None),
        # What a busy machine left open does not count.
        ([row(128, 1.2), row(256, 0.1)], 128),
        ([row(128, 0.1)], None),
    ],
)
def test_crossover(rows: list[Speed], expected: int | None):
    (entry,) = crossover(rows)
    assert entry == Crossover(name="v", batch=1, dtype="float32", device="cpu", length=expected)


def test_crossover_of_each_batch_size_and_mode():
    decoded = row(256, 1.5).model_copy(update={"mode": "generate"})
    entries = crossover([row(128, 0.8), row(128, 1.5, batch=8), decoded])
    assert {(entry.batch, entry.mode): entry.length for entry in entries} == {
        (1, "forward"): None,
        (8, "forward"): 128,
        (1, "generate"): 256,
    }
