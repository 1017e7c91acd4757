"""Running, timing and comparing contenders; nothing here depends on the speed of this machine."""

import math
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from approx.evaluation import evaluate as baselines
from approx.evaluation.timing import (
    Neighbours,
    Runner,
    Sample,
    _order,
    is_out_of_memory,
    memory_limit,
    peak_mb,
    race,
    repeats_for,
    timed,
    undisturbed,
    wait_idle,
    warm_up,
)

CPU = torch.device("cpu")


def test_turns_are_interleaved_and_rotate_and_the_base_has_two(monkeypatch: pytest.MonkeyPatch):
    runners = [Runner(lambda: None) for _ in "ABC"]
    runners[0].turns = 2
    names = {runner.call: name for runner, name in zip(runners, "ABC", strict=True)}
    order = ""

    def note(call: Callable[[], object], repeats: int, device: torch.device) -> Sample:
        nonlocal order
        order += names[call]
        return timed(call, repeats, device)

    monkeypatch.setattr("approx.evaluation.timing.timed", note)
    race(runners, CPU, rounds=4, seconds=0.0, warm_up_seconds=0.0)
    # Before the race, each is called to see how long it takes.
    assert "ABAC" + "BACA" + "ACAB" + "CABA" in order
    for runner in runners:
        assert all(len(turns) == runner.turns for turns in runner.rounds)


def test_a_race_lasts_for_its_rounds_and_for_its_seconds():
    for rounds, seconds in ((4, 0.0), (2, 0.3)):
        runner, begun = Runner(lambda: None), time.perf_counter()
        race([runner], CPU, rounds=rounds, seconds=seconds, warm_up_seconds=0.0, block_ms=0.1, memory=False)
        assert len(runner.rounds) >= rounds
        assert time.perf_counter() - begun >= seconds


def test_the_second_turn_of_the_base_is_half_a_round_away():
    runners = [Runner(lambda: None) for _ in range(4)]
    runners[0].turns = 2
    names = ["ABCD"[runners.index(runner)] for runner in _order(runners)]
    assert "".join(names) == "ABCAD"


def test_disturbed_repetitions_are_rejected_but_never_all():
    assert undisturbed([Sample(1, 0.99), Sample(1, 0.97), Sample(2, 0.5)]).tolist() == [True, True, False]
    # A call that uses one of two threads is compared with itself.
    assert undisturbed([Sample(1, 0.5), Sample(1, 0.49)]).all()
    assert undisturbed([Sample(1, 0.0)]).all()
    # Most repetitions may be disturbed: the reference is the call's best share.
    assert undisturbed([Sample(2, 0.5)] * 7 + [Sample(1, 1.0)] * 3).tolist() == [False] * 7 + [True] * 3
    assert len(undisturbed([])) == 0


def test_a_believable_turn_stands_for_its_round():
    runner = Runner(lambda: None, turns=2)
    runner.rounds = [[Sample(1, 1.0), Sample(3, 1.0)], [Sample(1, 1.0), Sample(9, 0.2)]]
    ms, good = runner.by_round()
    assert ms.tolist() == [2.0, 1.0]
    assert good.all()
    assert runner.by_turn()[0].tolist() == [[1.0, 1.0], [3.0, 9.0]]
    # If all turns of a round are disturbed, all of them count, and the round is marked as disturbed.
    runner.rounds += [[Sample(4, 0.1), Sample(8, 0.1)], [Sample(5, 1.0), Sample(7, 1.0)]]
    ms, good = runner.by_round()
    assert ms.tolist() == [2.0, 1.0, 6.0, 6.0]
    assert good.tolist() == [True, True, False, True]


def test_timing_counts_calls():
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    assert timed(call, 7, CPU).ms >= 0
    assert calls == 7
    warm_up(call, CPU, 0.0)
    assert calls > 8
    assert repeats_for(50.0) == 1
    assert repeats_for(0.0) == repeats_for(1e-3) == 10_000
    assert repeats_for(3.0) == 4


@pytest.mark.parametrize(
    ("times", "calls", "middle"),
    [
        # The first call is reported separately; then two medians of three calls must agree.
        ([100, 5, 5, 5, 5, 5, 5], 7, 5),
        ([100, 9, 9, 9, 5, 5, 5, 5, 5], 9, 5),
        ([5, 5.09, 5.09, 5.09, 5, 5, 5], 7, 5),
        ([5, 5.11, 5.11, 5.11, 5, 5, 5, 5, 5], 9, 5),
        ([5, 4.89, 4.89, 4.89, 5, 5, 5, 5, 5], 9, 5),
        ([5, 1, 5, 9, 5, 2, 9], 7, 5),
    ],
)
def test_warm_up_ends_when_two_medians_agree(monkeypatch: pytest.MonkeyPatch, times, calls, middle):
    left = [float(ms) for ms in times] + [1000.0 * 2**more for more in range(9)]
    waiting = len(left)
    monkeypatch.setattr("approx.evaluation.timing.timed", lambda call, repeats, device: Sample(left.pop(0), 1.0))
    assert warm_up(lambda: None, CPU, 60.0) == (times[0], middle)
    assert waiting - len(left) == calls


def test_warm_up_that_never_agrees_ends_with_its_time(monkeypatch: pytest.MonkeyPatch):
    growing = iter(2.0**number for number in range(1000))
    monkeypatch.setattr("approx.evaluation.timing.timed", lambda call, repeats, device: Sample(next(growing), 1.0))
    assert warm_up(lambda: None, CPU, 0.0) == (1.0, 2.0)


def test_neighbours_watch_the_whole_machine(monkeypatch: pytest.MonkeyPatch):
    # Ten seconds of wall clock: this process uses 10 core-seconds, the others use `others`.
    for others, crowded in ((0.0, False), (10.0 * (psutil.cpu_count() or 1), True)):
        neighbours = Neighbours()
        wall, busy, mine = neighbours._begun
        monkeypatch.setattr(Neighbours, "_now", lambda _, t=(wall + 10, busy + 10 + others, mine + 10): t)
        assert neighbours.crowded() is crowded
        monkeypatch.undo()


def test_waiting_for_an_idle_machine_ends_when_it_is_idle_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    looks = iter([True, True, False])
    monkeypatch.setattr(Neighbours, "crowded", lambda _: next(looks))
    assert wait_idle(60.0, look=0.0)
    assert next(looks, None) is None
    monkeypatch.setattr(Neighbours, "crowded", lambda _: True)
    assert not wait_idle(0.0, look=0.0)


def test_peak_memory_counts_temporaries_only():
    q = torch.randn(64, 1024)

    def call() -> torch.Tensor:
        return (q + 1) * (q + 2)

    assert math.isclose(peak_mb(call, CPU), 3 * 64 * 1024 * 4 / 1e6, rel_tol=0.01)
    assert peak_mb(call, CPU) == peak_mb(call, CPU)


@pytest.mark.skipif(not psutil.LINUX, reason="Linux alone hands out memory that it does not have")
def test_refuses_missing_memory_and_restores_the_limit():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit(CPU):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(int(psutil.virtual_memory().available * 1.5), dtype=torch.uint8)
        torch.empty(2**20)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid"))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_faster_back_end_becomes_the_baseline(monkeypatch: pytest.MonkeyPatch):
    state = {"inside": False}

    def through(back_end: object, call: object) -> object:
        def run() -> None:
            state["inside"] = True
            slow()
            state["inside"] = False

        return run

    def slow() -> None:
        time.sleep(0.001 if state["inside"] else 0.02)

    monkeypatch.setattr(baselines, "_through", through)
    assert baselines.best_exact(slow, CPU)[0] == "math SDPA"


def test_a_back_end_that_refuses_the_inputs_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    def through(back_end: object, call: object) -> object:
        def run() -> None:
            raise RuntimeError("No available kernel. Aborting execution.")

        return run

    monkeypatch.setattr(baselines, "_through", through)
    assert baselines.best_exact(lambda: None, CPU)[0] == "default SDPA"


@pytest.mark.parametrize(
    ("default", "other", "math", "chosen"),
    [
        (10.0, 7.0, 9.0, "way"),
        (10.0, 9.0, 7.0, "math SDPA"),
        # Noise must not choose the baseline: without a gain of 2 % the default stays.
        (10.0, 9.9, 9.9, "default SDPA"),
        (10.0, 9.7, 10.0, "way"),
        # Candidates 1.5 times slower are not timed further.
        (15.1, 10.0, 30.0, "way"),
        (10.0, 30.0, 30.0, "default SDPA"),
    ],
)
def test_the_baseline_is_the_fastest_by_a_clear_gain(monkeypatch: pytest.MonkeyPatch, default, other, math, chosen):
    calls: dict[str, Callable[[], object]] = {name: lambda: None for name in ("default SDPA", "way", "math SDPA")}
    took = dict(zip(calls.values(), (default, other, math), strict=True))
    timings: list[tuple[str, int]] = []
    names = {call: name for name, call in calls.items()}

    def clock(call: Callable[[], object], repeats: int, device: torch.device) -> Sample:
        timings.append((names[call], repeats))
        return Sample(took[call], 1.0)

    monkeypatch.setattr(baselines, "_through", lambda back_end, call: calls["math SDPA"])
    monkeypatch.setattr(baselines, "timed", clock)
    best = baselines.best_exact(calls["default SDPA"], CPU, {"way": calls["way"]})
    assert best == (chosen, calls[chosen])
    # One call rules out slow candidates; if several remain, each has five turns.
    assert timings[:3] == [("default SDPA", 1), ("way", 1), ("math SDPA", 1)]
    near = [name for name, call in calls.items() if took[call] < 1.5 * min(took.values())]
    assert [name for name, _ in timings[3:]] == (near * 5 if len(near) > 1 else [])
