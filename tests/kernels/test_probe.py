"""Findings of a probe; no test asserts how fast this machine is."""

import time

import pytest
import torch

from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.exact.compiled import obstacle as c_obstacle
from approx_kernels.ops.fastest import probe, ways
from approx_kernels.ops.fastest.choice import Case
from approx_kernels.ops.fastest.probe import measure


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(probe, "crowded", lambda: False)
    # The choice depends only on the timed implementations.
    monkeypatch.setattr(probe, "SHORT", 16)
    monkeypatch.setattr(probe, "SECONDS", 0.0)


def delayed(seconds, change=lambda out: out):
    def way(q, k, v, key_mask, *, causal, scale):
        # Enough arithmetic would take as long; a thread that sleeps uses no time of its own.
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return change(exact_attention(q, k, v, key_mask, causal=causal, scale=scale))

    return way


def failing(*args, **kwargs):
    raise RuntimeError("No available kernel. Aborting execution.\nmore")


def choose_among(monkeypatch, **others):
    known = {ways.DEFAULT: delayed(0.01), **others}
    monkeypatch.setattr(probe, "ways", lambda device, *, padded, few: known)
    return known


def small(**changed):
    return Case("cpu", torch.float32, 32, **changed)


def test_chooses_the_fastest_way_and_records_all(monkeypatch):
    choose_among(
        monkeypatch,
        quick=delayed(0.002),
        wrong=delayed(0.0, lambda out: out * (1 + 1e-4)),
        absent=failing,
        hopeless=delayed(0.05),
    )
    finding = measure(small())
    assert finding["way"] == "quick"
    assert finding["errors"]["quick"] < 1e-6
    assert "error 1.0e-04 is above 1.0e-06" in finding["refused"]["wrong"]
    assert finding["refused"]["absent"] == "No available kernel. Aborting execution."
    assert "times the default's time" in finding["refused"]["hopeless"]


def test_the_default_keeps_its_place_against_a_small_gain(monkeypatch):
    choose_among(monkeypatch, other=delayed(0.0098))
    assert measure(small())["way"] == ways.DEFAULT


def test_a_way_that_was_held_up_once_is_not_hopeless(monkeypatch):
    # The second call is the first that is timed.
    seconds = iter([0.002, 0.2])

    def held_up(*inputs, **settings):
        return delayed(next(seconds, 0.002))(*inputs, **settings)

    choose_among(monkeypatch, quick=held_up)
    finding = measure(small())
    assert (finding["way"], finding["refused"]) == ("quick", {})


@pytest.mark.parametrize(
    "form", [{}, {"few": True}, {"causal": True}, {"padded": True}, {"training": True, "padded": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_on_a_cpu_runs_and_is_exact_in_its_dtype(form, dtype):
    case = Case("cpu", dtype, 32, **form)
    finding = measure(case)
    known = set(ways.ways("cpu", padded=case.padded, few=case.few))
    # Without a C compiler one of them is refused.
    assert finding["errors"].keys() == known - ({"compiled C"} if c_obstacle(torch.ones(1)) else set())
    assert max(finding["errors"].values()) <= probe.LABEL[dtype]
    assert not [why for why in finding["refused"].values() if "error" in why]


def test_a_probe_draws_nothing_and_leaves_the_modes_around_it(monkeypatch):
    choose_among(monkeypatch, quick=delayed(0.0))
    before = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert measure(small(training=True))["way"] == "quick"
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_machine_that_others_use_is_measured_on_one_thread(monkeypatch):
    monkeypatch.setattr(probe, "crowded", lambda: True)
    choose_among(monkeypatch, quick=delayed(0.0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with probe.clock() as now:
            assert (torch.get_num_threads(), now) == (1, time.thread_time)
        assert torch.get_num_threads() == 2
        assert measure(small())["crowded"]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_on_cuda_times_every_back_end_and_lengths(monkeypatch):
    monkeypatch.setattr(ways, "triton", None)
    plain = ways.ways("cuda", padded=False, few=False)
    assert {ways.DEFAULT, "cudnn SDPA", "flash SDPA", "efficient SDPA", "math SDPA", ways.LIBRARY} == plain.keys()
    padded = ways.ways("cuda", padded=True, few=False)
    assert {"varlen", "flash SDPA by lengths", *plain} < padded.keys()
    # Preferring a back end leaves the others open, so each of these runs on a CPU too.
    q, k, v = torch.randn(3, 2, 2, 20, 8).unbind()
    mask = torch.arange(20) < torch.tensor([[20], [12]])
    expected = exact_attention(q, k, v, mask, causal=True, scale=0.3).transpose(1, 2)[mask]
    for name, way in padded.items():
        if name not in ("varlen", ways.LIBRARY):
            torch.testing.assert_close(way(q, k, v, mask, causal=True, scale=0.3).transpose(1, 2)[mask], expected)
    for name in ("varlen", ways.LIBRARY):
        with pytest.raises(RuntimeError, match="needs CUDA"):
            padded[name](q, k, v, mask, causal=True, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_on_cuda_times_our_kernels_with_triton(causal, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "own flash" not in ways.ways("cuda", padded=False, few=True)
    assert "own flash" not in ways.ways("cpu", padded=True, few=False)
    flash = ways.ways("cuda", padded=True, few=False)["own flash"]
    mask = torch.arange(20) < torch.tensor([[20], [12]])
    for size in (16, 24):
        leaves = [x.requires_grad_() for x in torch.randn(3, 2, 2, 20, size).unbind()]
        outs = [
            way(*leaves, mask, causal=causal, scale=0.3).transpose(1, 2)[mask]
            for way in (flash, ways.ways("cpu", padded=True, few=False)[ways.DEFAULT])
        ]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(*grads)
    with pytest.raises(RuntimeError, match="allowed are float16"):
        flash(*torch.randn(3, 1, 1, 20, 16, dtype=torch.float64), None, causal=causal, scale=0.3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"padded": True}, {"padded": True, "training": True}])
def test_on_cuda_the_ways_that_run_are_exact(form):
    finding = measure(Case("cuda", torch.bfloat16, 512, **form))
    assert finding["errors"][finding["way"]] <= probe.LABEL[torch.bfloat16]
    assert ("varlen" in finding["milliseconds"]) == ("padded" in form)
