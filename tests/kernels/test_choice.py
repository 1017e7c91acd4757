"""The choice of a way for exact attention: from the probe, else fixed defaults, and never by measuring in a call."""

import pytest
import torch

from approx_kernels.cpu import compile
from approx_kernels.dispatch import findings
from approx_kernels.dispatch.implementation import chosen_in
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.fastest import choice, ways
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.fastest.choice import DEFAULTS, LENGTHS, Case, case_of, chosen, default

with_c = pytest.mark.skipif(compile.find_compiler()[0] is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, own_cache):
    monkeypatch.setattr(findings, "_known", {})


def keep(case, way):
    findings.keep("cpu", str(case), {"way": way})


def test_kinds_of_input():
    def kind(length, keys, dtype=torch.float32, **more):
        x = torch.zeros(1, 1, max(length, keys), 24, requires_grad=more.pop("training", False), dtype=dtype)
        mask = torch.ones(1, keys, dtype=torch.bool) if more.pop("padded", False) else None
        return case_of(x[:, :, :length], x[:, :, :keys], mask, causal=more.pop("causal", False))

    def small(**changed):
        return Case("cpu", torch.float32, 128, **changed)

    assert kind(127, 127) is None
    assert kind(128, 128) == kind(511, 511) == small()
    assert kind(100, 1000) == Case("cpu", torch.float32, 512)
    assert kind(9, 5000, torch.float16) == Case("cpu", torch.float16, 2048)
    assert kind(8, 140, causal=True) == small(few=True)
    assert kind(140, 140, causal=True, padded=True, training=True) == small(causal=True, padded=True, training=True)
    with torch.no_grad():
        assert kind(140, 140, training=True) == small()
    assert kind(140, 140, torch.float64) is None


@pytest.mark.parametrize(
    ("processor", "compiled"),
    [
        # Fewest keys for C in float32 and bfloat16 with many queries, and in bfloat16 with few; None if C is never used.
        ("AVX2", (None, None, None)),
        ("DEFAULT", (None, None, None)),
        ("AVX512", (512, None, None)),
        ("AVX512 and AMX", (512, 512, None)),
        ("AVX512 and BF16", (512, 128, 128)),
    ],
)
def test_without_a_probe_the_table_decides(monkeypatch, processor, compiled):
    monkeypatch.setattr(choice, "instructions", lambda: processor)
    for (dtype, few), least in zip(
        ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)), compiled, strict=True
    ):
        for length in LENGTHS:
            expected = ways.COMPILED if least is not None and length >= least else ways.DEFAULT
            assert default(Case("cpu", dtype, length, few=few)) == expected
            assert default(Case("cpu", dtype, length, few=few, padded=True, training=True)) == expected
            assert few or default(Case("cpu", dtype, length, causal=True)) == expected
    for case in (Case("cuda", torch.bfloat16, 2048), Case("cpu", torch.float16, 2048)):
        assert default(case) == ways.DEFAULT
    assert default(Case("cpu", torch.float32, 2048, few=True)) == ways.DEFAULT


@with_c
def test_findings_of_a_probe_override_the_table(monkeypatch):
    monkeypatch.setattr(choice, "instructions", lambda: "AVX512 and BF16")
    case = Case("cpu", torch.float32, 512)
    assert chosen(case)[0] == ways.COMPILED
    keep(case, ways.DEFAULT)
    assert chosen(case)[0] == ways.DEFAULT
    keep(case, "chunks of 256")
    assert chosen(case)[0] == "chunks of 256"
    # An implementation of another version.
    keep(case, "magic")
    assert chosen(case)[0] == ways.COMPILED


@pytest.mark.parametrize("way", ["chunks of 256", "default SDPA by lengths"])
@pytest.mark.parametrize("causal", [False, True])
def test_runs_the_found_implementation(way, causal):
    keep(Case("cpu", torch.float32, 128, causal=causal, padded=True), way)
    q, k, v = torch.randn(3, 2, 2, 140, 8).unbind()
    mask = torch.arange(140) < torch.tensor([[140], [40]])
    outputs = []
    took = chosen_in(lambda: outputs.append(fastest_attention(q, k, v, mask, causal=causal, scale=0.3)))
    assert took == {"fastest_attention": way}
    plain = exact_attention(q, k, v, mask, causal=causal, scale=0.3, impl="reference")
    torch.testing.assert_close(outputs[0].transpose(1, 2)[mask], plain.transpose(1, 2)[mask])
    # Only SDPA applies dropout; its mean is right in any case.
    assert torch.isfinite(fastest_attention(q, k, v, mask, causal=causal, scale=0.3, dropout=0.5)).all()


def test_every_default_runs_whatever_the_sizes_of_heads(monkeypatch):
    for default_way in DEFAULTS:
        monkeypatch.setattr(choice, "instructions", lambda one=default_way: one.processors[0])
        for size, values, grad in ((1, 1, False), (16, 24, False), (80, 80, True), (24, 8, True)):
            queries = 2 if default_way.few else default_way.least
            q = torch.randn(1, 2, queries, size).to(default_way.dtype).requires_grad_(grad)
            k = torch.randn(1, 2, default_way.least, size).to(default_way.dtype).requires_grad_(grad)
            v = torch.randn(1, 2, default_way.least, values).to(default_way.dtype).requires_grad_(grad)
            for causal in (False, True):
                actual = fastest_attention(q, k, v, causal=causal, scale=0.3)
                exact = exact_attention(*(x.double() for x in (q, k, v)), causal=causal, scale=0.3, impl="reference")
                # In bfloat16 weights and outputs are rounded.
                atol, rtol = (1e-5, 1.3e-6) if default_way.dtype == torch.float32 else (2e-2, 2e-2)
                torch.testing.assert_close(actual, exact.to(actual.dtype), atol=atol, rtol=rtol)
                if grad:
                    grads = torch.autograd.grad(actual.sum(), (q, k, v))
                    assert all(bool(torch.isfinite(each).all()) for each in grads)


def test_few_queries_that_c_does_not_support_run_elsewhere():
    keep(Case("cpu", torch.float32, 128, few=True), ways.COMPILED)
    keep(Case("cpu", torch.float32, 128, few=True, training=True), ways.COMPILED)
    for size, grad in ((16, False), (24, False), (16, True)):
        q, k = torch.randn(1, 2, 1, size), torch.randn(1, 2, 140, size)
        v = torch.randn(1, 2, 140, size, requires_grad=grad)
        actual = fastest_attention(q, k, v, causal=True, scale=0.3)
        torch.testing.assert_close(actual, exact_attention(q, k, v, causal=True, scale=0.3, impl="reference"))


@pytest.mark.parametrize("rows", [1, 140])
def test_falls_back_to_sdpa_if_c_no_longer_compiles(monkeypatch, rows):
    case = Case("cpu", torch.float32, 128, few=rows == 1)
    keep(case, ways.COMPILED)
    monkeypatch.setattr(ways, "c_obstacle", lambda *_: "the folder is full.")
    assert chosen(case)[0] == ways.DEFAULT
    q, k, v = torch.randn(1, 2, rows, 16), *torch.randn(2, 1, 2, 140, 16)
    actual = fastest_attention(q, k, v, causal=False, scale=0.3)
    torch.testing.assert_close(actual, exact_attention(q, k, v, causal=False, scale=0.3, impl="reference"))


@pytest.fixture
def compiling(monkeypatch):
    """Turns compiling C on or off, as if in another process."""
    compiler, why = compile.find_compiler()
    if compiler is None:
        pytest.skip(why)

    def turn(on):
        monkeypatch.setenv("APPROX_COMPILE_C", str(int(on)))
        monkeypatch.setattr(findings, "_known", {})
        compile.load.cache_clear()

    yield turn
    monkeypatch.delenv("APPROX_COMPILE_C", raising=False)
    compile.load.cache_clear()


@pytest.mark.parametrize("later", [False, True], ids=["C goes", "C comes"])
def test_findings_are_void_after_c_is_turned_on_or_off(compiling, later):
    case = Case("cpu", torch.bfloat16, 512)
    compiling(not later)
    keep(case, "chunks of 256")
    assert chosen(case)[0] == "chunks of 256"
    compiling(later)
    assert chosen(case)[0] in (default(case), ways.DEFAULT)
    compiling(not later)
    assert chosen(case)[0] == "chunks of 256"
