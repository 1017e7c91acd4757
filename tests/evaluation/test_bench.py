"""The calculations of bench; nothing here depends on the speed of this machine."""

import time

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.bench import Contender, _paired, _ratio, bench, crossover
from approx.evaluation.options import BenchStage
from approx.evaluation.record import Ratio, Speed, Spread
from approx.evaluation.timing import Runner, Sample
from typed import known


def attend(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def make_inputs(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 2, length, 16)


def run_bench(contenders: list[Contender], **settings) -> list[Speed]:
    settings = {"lengths": [16, 32], "batches": [1, 2], "rounds": 4, "seconds": 0.0} | settings
    options = BenchStage(**{key: settings.pop(key) for key in BenchStage.model_fields if key in settings})
    rows = bench(
        contenders,
        options,
        make_inputs=settings.pop("make_inputs", make_inputs),
        device="cpu",
        dtype=torch.float32,
        warm_up_seconds=0.0,
        **settings,
    )
    return list(rows)


def test_a_bench_has_a_row_for_every_batch_and_length():
    seen: list[tuple[int, int, str]] = []
    contenders = [
        Contender("exact", attend, "base"),
        Contender("free", lambda q: q, "ceiling"),
        Contender("variant", lambda q: attend(q[:, :, ::2])),
    ]
    results = run_bench(contenders, progress=lambda *where: seen.append(where))
    assert [(row.batch, row.length) for row in results] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    # Each row begins anew and ends with all of its turns: a warm-up and four rounds or more of each of the three.
    rows = [[(done, total) for done, total, what in seen if what.endswith(f"({row} of 4)")] for row in (1, 2, 3, 4)]
    assert sum(map(len, rows)) == len(seen)
    for steps in rows:
        assert steps[0] == (0, 1)
        assert [done for done, _ in steps[1:]] == list(range(len(steps) - 1))
        assert all(done <= total for done, total in steps)
        assert steps[1][1] == 3 + 4 * 4
        assert steps[-1][0] >= 3 + 4 * 4
    for row in results:
        assert row.device == "cpu"
        assert row.dtype == "float32"
        assert row.threads == torch.get_num_threads()
        assert row.baseline in ("default SDPA", "math SDPA")
        for entry in (row.base, known(row.ceiling), *row.variants):
            assert entry.status == "ok"
            assert known(entry.p10_ms) <= known(entry.median_ms) <= known(entry.p90_ms)
            assert entry.samples >= 1
            assert 4 <= entry.samples + entry.rejected <= 8
        assert all(entry.peak_mb is not None and known(entry.first_ms) > 0 for entry in (row.base, *row.variants))
        for entry in (row.ceiling, row.spread, *row.variants):
            low, high = known(known(entry).interval)
            assert low <= high
    assert {(entry.name, entry.batch) for entry in crossover(results)} == {("variant", 1), ("variant", 2)}


def test_records_implementations_once_and_outside_timing():
    calls_by_round, calls = [], []

    def chosen_in(call) -> dict[str, str]:
        before = len(calls)
        call()
        calls_by_round.append(calls[before:])
        return {"attention": calls[-1]}

    def run(name: str):
        return lambda q: calls.append(name) or attend(q)

    contenders = [Contender("exact", run("exact"), "base"), Contender("variant", run("variant"))]
    (row,) = run_bench(contenders, lengths=[16], batches=[1], chosen_in=chosen_in)
    assert row.base.chosen == {"attention": "exact"}
    assert row.variants[0].chosen == {"attention": "variant"}
    # If another back end is the base, the default is timed too.
    assert calls_by_round[:2] == [["exact"], ["variant"]]
    assert calls[-len(calls_by_round) :] == [name for names in calls_by_round for name in names]
    assert run_bench(contenders, lengths=[16], batches=[1])[0].base.chosen is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 34359738368 bytes."),
        MemoryError(),
    ],
)
@pytest.mark.sample(2)
def test_out_of_memory_is_a_data_point(error: Exception):
    def greedy(q: torch.Tensor) -> torch.Tensor:
        if q.shape[2] > 16:
            raise error
        return q

    results = run_bench([Contender("exact", attend, "base"), Contender("greedy", greedy)], batches=[1])
    short, long = (row.variants[0] for row in results)
    assert short.status == "ok"
    assert long.status == "out of memory"
    assert all(
        getattr(long, key) is None
        for key in ("median_ms", "ratio", "interval", "share_of_ceiling", "verdict", "chosen")
    )
    assert results[1].base.status == "ok"


def test_times_the_variant_where_exact_runs_out_of_memory():
    def exact(q: torch.Tensor) -> torch.Tensor:
        if q.shape[2] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return q

    contenders = [Contender("exact", exact, "base"), Contender("slow", lambda q: [attend(q) for _ in range(20)])]
    results = run_bench(contenders, batches=[1])
    row = results[1]
    assert row.base.status == "out of memory"
    assert row.baseline == "default SDPA"
    assert row.spread == Spread(ratio=None, interval=None)
    assert known(row.variants[0].median_ms) > 0
    assert row.variants[0].ratio is None
    assert crossover(results)[0].length == 32


def test_drops_only_the_contender_that_runs_out_of_memory_between_rounds():
    calls = 0

    def tiring(q: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return q

    results = run_bench([Contender("exact", attend, "base"), Contender("tiring", tiring)], lengths=[16], batches=[1])
    assert results[0].variants[0].status == "out of memory"
    assert results[0].base.samples >= 1
    # Without a ceiling.
    assert results[0].ceiling is None


def test_faster_exact_implementation_becomes_the_base_and_the_default_is_still_timed():
    contenders = [
        Contender("exact", lambda q: [attend(q) for _ in range(50)], "base"),
        Contender("another way", lambda q: q, "exact"),
        Contender("variant", attend),
    ]
    row = run_bench(contenders, lengths=[16], batches=[1])[0]
    assert row.baseline == "another way"
    default = known(row.default)
    assert known(default.ratio) < 1
    assert known(default.median_ms) > known(row.base.median_ms)
    assert [entry.name for entry in row.variants] == ["variant"]
    slower = [contenders[0], Contender("another way", lambda q: [attend(q) for _ in range(500)], "exact")]
    row = run_bench(slower, lengths=[16], batches=[1])[0]
    assert row.baseline != "another way"
    assert (row.default is None) == (row.baseline == "default SDPA")


def test_inputs_that_do_not_fit_are_a_row_too():
    def too_big(batch: int, length: int) -> torch.Tensor:
        return torch.empty(batch * length * 2**50, dtype=torch.uint8)

    results = run_bench([Contender("exact", attend, "base"), Contender("v", attend)], make_inputs=too_big)
    assert all(row.base.status == "out of memory" for row in results)


def test_other_errors_are_not_swallowed():
    def broken(q: torch.Tensor) -> torch.Tensor:
        return q @ q

    with pytest.raises(RuntimeError, match="Expected size"):
        run_bench([Contender("exact", attend, "base"), Contender("broken", broken)])
    with pytest.raises(RuntimeError, match="Expected size"):
        run_bench([Contender("exact", broken, "base")])


def test_gradients_are_off():
    seen = []

    def exact(q: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return q

    run_bench([Contender("exact", exact, "base")], lengths=[16], batches=[1])
    assert set(seen) == {False}


def test_a_time_budget_leaves_out_sizes_that_would_end_after_it_and_names_them(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def slow(batch: int, length: int) -> torch.Tensor:
        # A row takes a second per 16 tokens.
        clock[0] += length / 16
        return make_inputs(batch, length)

    def lengths(budget: str) -> list[int]:
        how = {"lengths": [16, 32, 64], "batches": [1], "rounds": 3, "make_inputs": slow, "time_budget": budget}
        clock[0] = 0.0
        caplog.clear()
        return [row.length for row in run_bench([Contender("exact", attend, "base")], **how)]

    # Rows of 1, 2 and 4 seconds: the next one is expected to take as long per token as the last one.
    assert lengths("7s") == [16, 32, 64]
    assert caplog.messages == []
    assert lengths("6.9s") == [16, 32]
    assert "used up after 2 of 3 sizes. Not timed, as batch × tokens: 1 × 64." in caplog.text
    # The first is always timed.
    assert lengths("0.5s") == [16]
    assert "1 × 32, 1 × 64" in caplog.text


@pytest.mark.parametrize(
    ("contenders", "settings", "words"),
    [
        ([Contender("a", attend)], {}, "One base|one base"),
        ([Contender("a", attend, "base"), Contender("a", attend)], {}, "unique"),
        ([Contender("a", attend, "base"), *(Contender(n, attend, "ceiling") for n in "bc")], {}, "ceiling"),
        ([Contender("default SDPA", attend, "base")], {}, "other than 'default SDPA'"),
    ],
)
def test_what_cannot_be_timed_is_refused(contenders: list[Contender], settings: dict, words: str):
    with pytest.raises(ApproxError, match=words):
        run_bench(contenders, **settings)


def test_other_devices_are_refused():
    with pytest.raises(ApproxError, match="cpu or cuda") as caught:
        next(
            bench(
                [Contender("a", attend, "base")],
                BenchStage(lengths=[1]),
                make_inputs=make_inputs,
                device="meta",
                dtype="float32",
            )
        )
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_ratio_uses_rounds_where_both_are_undisturbed():
    base, other = torch.tensor([2.0, 2.0, 2.0, 80.0]).numpy(), torch.ones(4).numpy()
    good = torch.tensor([True, True, True, False]).numpy()
    assert _paired(base, other, good, 0) == Ratio(ratio=2.0, interval=[2.0, 2.0])
    # With fewer than half of the rounds left, all of them count.
    assert (_paired(base, other, ~good, 0).interval or [])[1] > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_events_and_memory():
    device = torch.device("cuda")
    (row,) = bench(
        [Contender("exact", attend, "base"), Contender("free", lambda q: q, "ceiling")],
        BenchStage(lengths=[512], rounds=4, seconds=0.0),
        make_inputs=lambda batch, length: torch.randn(batch, 2, length, 64, device=device, dtype=torch.float16),
        device=device,
        dtype="float16",
    )
    assert known(row.base.median_ms) > 0
    assert known(row.base.peak_mb) >= 512 * 64 * 2 * 2 / 1e6


def test_a_round_counts_only_where_neither_of_the_two_was_disturbed():
    """Each runner is disturbed in 12 of 40 rounds, never at the same time, so most rounds have a disturbed one."""
    base, other = Runner(lambda: None), Runner(lambda: None)
    base.rounds = [[Sample(20.0, 0.2)]] * 12 + [[Sample(2.0, 1.0)]] * 28
    other.rounds = [[Sample(1.0, 1.0)]] * 28 + [[Sample(50.0, 0.2)]] * 12
    assert _ratio(base, other, seed=0) == Ratio(ratio=2.0, interval=[2.0, 2.0])
    assert _ratio(other, base, seed=0) == Ratio(ratio=0.5, interval=[0.5, 0.5])
