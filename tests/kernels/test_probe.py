"""What a probe chooses and keeps; nothing here asserts how fast this machine is."""

import time
import warnings

import pytest
import torch

from approx_kernels import c_language, findings
from approx_kernels.exact import exact_attention, fastest_attention, probe, ways
from approx_kernels.exact.compiled import obstacle as c_obstacle
from approx_kernels.exact.probe import Case, case_of, fastest, measure

CASE = Case("cpu", torch.float32, 64, 512)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, own_cache):
    monkeypatch.setattr(findings, "_known", {})
    monkeypatch.setattr(findings, "crowded", lambda: False)
    monkeypatch.setattr(probe, "crowded", lambda: False)
    # Small and quick: what is chosen depends on the ways alone.
    monkeypatch.setattr(probe, "SHORT", 16)
    monkeypatch.setattr(probe, "LENGTHS", (32, 64))
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
    return Case("cpu", torch.float32, 64, 32, **changed)


def test_the_fastest_way_is_chosen_and_every_other_is_told(monkeypatch):
    known = choose_among(
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
    assert fastest(small()) == ("quick", known["quick"])


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
    case = Case("cpu", dtype, 64, 32, **form)
    finding = measure(case)
    known = set(ways.ways("cpu", padded=case.padded, few=case.few))
    # Without a C compiler one of them is refused.
    assert finding["errors"].keys() == known - ({"compiled C"} if c_obstacle(torch.ones(1)) else set())
    assert max(finding["errors"].values()) <= probe.LABEL[dtype]
    assert not [why for why in finding["refused"].values() if "error" in why]


def test_a_probe_repeats_nothing_and_draws_nothing(monkeypatch):
    choose_among(monkeypatch, quick=delayed(0.0))
    before = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert fastest(small(training=True))[0] == "quick"
    assert torch.equal(torch.random.get_rng_state(), before)
    choose_among(monkeypatch, quick=failing)
    assert fastest(small(training=True))[0] == "quick", "it was measured again"


def test_a_failing_probe_says_so_once_and_the_default_runs(monkeypatch):
    monkeypatch.setattr(probe, "ways", lambda device, *, padded, few: {ways.DEFAULT: failing})
    told = r"could not be measured for exact attention, float32, .*: No available kernel.*approx doctor --probe"
    with pytest.warns(UserWarning, match=told):
        assert fastest(small())[0] == ways.DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastest(small())[0] == ways.DEFAULT


def test_kinds_of_input():
    def kind(length, keys, **more):
        x = torch.zeros(1, 1, max(length, keys), 24, requires_grad=more.pop("training", False))
        mask = torch.ones(1, keys, dtype=torch.bool) if more.pop("padded", False) else None
        return case_of(x[:, :, :length], x[:, :, :keys], mask, causal=more.pop("causal", False))

    assert kind(31, 31) is None
    assert kind(40, 40) == small()
    assert kind(100, 1000) == Case("cpu", torch.float32, 64, 64)
    assert kind(1, 40, causal=True) == small(few=True)
    assert kind(40, 40, causal=True, padded=True, training=True) == small(causal=True, padded=True, training=True)
    with torch.no_grad():
        assert kind(40, 40, training=True) == small()
    x = torch.zeros(1, 1, 40, 8, dtype=torch.float64)
    assert case_of(x, x, None, causal=False) is None


@pytest.mark.parametrize("way", ["chunks of 256", "default SDPA by lengths"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_was_chosen_runs(monkeypatch, way, causal):
    monkeypatch.setattr(probe, "find", lambda *_, **__: {"way": way})
    q, k, v = torch.randn(3, 2, 2, 70, 8).unbind()
    mask = torch.arange(70) < torch.tensor([[70], [40]])
    found = fastest_attention(q, k, v, mask, causal=causal, scale=0.3)
    plain = exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl="reference")
    torch.testing.assert_close(found.transpose(1, 2)[mask], plain.transpose(1, 2)[mask])
    # Nothing but SDPA drops weights; the mean of the dropped ones is right in any case.
    assert torch.isfinite(fastest_attention(q, k, v, mask, causal=causal, scale=0.3, dropout=0.5)).all()


def test_few_queries_that_the_chosen_way_cannot_take_go_another(monkeypatch):
    monkeypatch.setattr(probe, "find", lambda *_, **__: {"way": "compiled C"})
    for size, grad in ((16, False), (24, False), (16, True)):
        q, k = torch.randn(1, 2, 1, size), torch.randn(1, 2, 70, size)
        v = torch.randn(1, 2, 70, size, requires_grad=grad)
        found = fastest_attention(q, k, v, causal=True, scale=0.3)
        torch.testing.assert_close(found, exact_attention(q, k, v, causal=True, scale=0.3, impl="reference"))


@pytest.fixture
def compiling(monkeypatch):
    """Turns compiling C on or off, as if in another process."""
    compiler, why = c_language.find_compiler()
    if compiler is None:
        pytest.skip(why)

    def turn(on):
        monkeypatch.setenv("APPROX_COMPILE_C", str(int(on)))
        monkeypatch.setattr(findings, "_known", {})
        c_language.library.cache_clear()

    yield turn
    monkeypatch.delenv("APPROX_COMPILE_C", raising=False)
    c_language.library.cache_clear()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("later", [False, True], ids=["C goes", "C comes"])
def test_what_was_found_with_c_or_without_it_is_measured_anew_after_a_change(compiling, later, rows):
    asked = str(Case("cpu", torch.bfloat16, 64, 32, few=rows == 1))
    q, k, v = torch.randn(1, 2, rows, 64), *torch.randn(2, 1, 2, 40, 64)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    compiling(not later)
    findings.find("cpu", asked, lambda: {"way": ways.DEFAULT if later else "compiled C"})
    compiling(later)
    out = fastest_attention(q, k, v, causal=False, scale=0.1)
    exact = exact_attention(q, k, v, causal=False, scale=0.1, impl="reference")
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=2e-2)
    finding = findings.found("cpu")[asked]
    assert ("compiled C" in finding["errors"]) == later
    compiling(not later)
    assert "errors" not in findings.found("cpu")[asked], "what was found before the change holds after it is undone"


@pytest.mark.parametrize("rows", [1, 40])
def test_c_that_was_chosen_and_no_longer_compiles_leaves_the_default(monkeypatch, rows):
    monkeypatch.setattr(probe, "find", lambda *_, **__: {"way": "compiled C"})
    monkeypatch.setattr(ways, "c_obstacle", lambda *_: "the folder is full.")
    q, k, v = torch.randn(1, 2, rows, 16), *torch.randn(2, 1, 2, 40, 16)
    found = fastest_attention(q, k, v, causal=False, scale=0.3)
    torch.testing.assert_close(found, exact_attention(q, k, v, causal=False, scale=0.3, impl="reference"))


def test_on_cuda_every_back_end_and_lengths_are_asked(monkeypatch):
    monkeypatch.setattr(ways, "triton", None)
    plain = ways.ways("cuda", padded=False, few=False)
    assert {ways.DEFAULT, "cudnn SDPA", "flash SDPA", "efficient SDPA", "math SDPA"} == plain.keys()
    padded = ways.ways("cuda", padded=True, few=False)
    assert {"varlen", "flash SDPA by lengths", *plain} < padded.keys()
    # Preferring a back end leaves the others open, so each of these runs on a CPU too.
    q, k, v = torch.randn(3, 2, 2, 20, 8).unbind()
    mask = torch.arange(20) < torch.tensor([[20], [12]])
    expected = exact_attention(q, k, v, mask, causal=True, scale=0.3).transpose(1, 2)[mask]
    for name, way in padded.items():
        if name != "varlen":
            torch.testing.assert_close(way(q, k, v, mask, causal=True, scale=0.3).transpose(1, 2)[mask], expected)
    with pytest.raises(RuntimeError, match="needs CUDA"):
        padded["varlen"](q, k, v, mask, causal=True, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_on_cuda_the_own_kernels_are_asked_where_triton_is(causal, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "own flash" not in ways.ways("cuda", padded=False, few=True)
    assert "own flash" not in ways.ways("cpu", padded=True, few=False)
    own = ways.ways("cuda", padded=True, few=False)["own flash"]
    mask = torch.arange(20) < torch.tensor([[20], [12]])
    for size in (16, 24):
        leaves = [x.requires_grad_() for x in torch.randn(3, 2, 2, 20, size).unbind()]
        outs = [
            way(*leaves, mask, causal=causal, scale=0.3).transpose(1, 2)[mask]
            for way in (own, ways.ways("cpu", padded=True, few=False)[ways.DEFAULT])
        ]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(*grads)
    with pytest.raises(RuntimeError, match="allowed are float16"):
        own(*torch.randn(3, 1, 1, 20, 16, dtype=torch.float64), None, causal=causal, scale=0.3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"padded": True}, {"padded": True, "training": True}])
def test_on_cuda_the_ways_that_run_are_exact(form):
    finding = measure(Case("cuda", torch.bfloat16, 64, 512, **form))
    assert finding["errors"][finding["way"]] <= probe.LABEL[torch.bfloat16]
    assert ("varlen" in finding["milliseconds"]) == ("padded" in form)
