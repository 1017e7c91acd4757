"""Fast products: set within a context, and an error where they cannot help."""

import threading
from types import SimpleNamespace

import pytest
import torch

import approx
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage
from approx.measuring import products
from approx.measuring.measure import computed_by
from approx.measuring.products import fast_products, obstacle, products_for
from approx.pipeline.run import check
from approx.recipe import Recipe


@pytest.fixture
def helps(monkeypatch):
    """Simulate a processor on which fast products help; PyTorch's setting exists on all."""
    monkeypatch.setattr(products, "obstacle", lambda device="cpu", dtype="float32": None)


def state() -> str:
    return products._switch()


def test_sets_the_switch_inside_and_restores_it_after_errors(helps):
    assert state() == "none"
    with approx.fast_products(), fast_products():
        assert state() == "bf16"
    assert state() == "none"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), fast_products():
            raise error
        assert state() == "none"


def test_restores_the_users_setting(helps):
    products._switch("ieee")
    try:
        with fast_products(), fast_products():
            assert state() == "bf16"
        assert state() == "ieee"
    finally:
        products._switch("none")


def test_the_last_of_several_threads_restores_the_setting(helps):
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with fast_products():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=hold)
    with fast_products():
        other.start()
        assert inside.wait(10)
    assert state() == "bf16"
    leave.set()
    other.join()
    assert state() == "none"


def test_fast_products_have_float32_precision_or_are_refused():
    x, weight = torch.randn(64, 300), torch.randn(300, 200)
    exact = x.double() @ weight.double()
    if why := obstacle():
        with pytest.raises(ApproxError, match="Fast products cannot be used: ") as refused, fast_products():
            pass
        assert (refused.value.exit_code, why in str(refused.value)) == (Exit.UNSUPPORTED, True)
        return
    with fast_products():
        product = x @ weight
    assert ((product.double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("torch.backends.cpu.get_cpu_capability", lambda: "AVX2"), "PyTorch uses AVX2 on this processor"),
        (("torch.backends.mkldnn.is_available", lambda: False), "oneDNN is missing or turned off"),
        (("approx.measuring.products._error_within", lambda: 2e-3), "they round float32 to bfloat16"),
    ],
    ids=["AVX2", "no oneDNN", "tiles for bfloat16"],
)
def test_says_why_fast_products_cannot_help_and_the_remedy(monkeypatch, change, words):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_error_within", lambda: 3e-7)
    assert (obstacle() is None) == (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    monkeypatch.setattr(*change)
    with pytest.raises(ApproxError, match=f"{words}.*Leave them out"), fast_products():
        pass
    assert words in products.description(None)
    assert state() == "none"


def test_a_gpu_and_16_bits_are_refused_for_every_model_that_is_compared(helps, monkeypatch):
    monkeypatch.undo()
    assert "the device is cuda" in str(obstacle("cuda"))
    cpu = torch.device("cpu")
    models = [SimpleNamespace(device=cpu, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(products, "_error_within", lambda: 3e-7)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    with pytest.raises(ApproxError, match="the dtype is bfloat16"), products_for(models, wanted=True):
        pass
    with products_for(models, wanted=False):
        assert state() == "none"
    with products_for(models[:1], wanted=True):
        assert state() == "bf16"


def test_measures_and_shows_the_gain():
    before = torch.random.get_rng_state()
    finding = products.measure()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert state() == "none"
    assert finding["gains"].keys() == {"8", "64", "512"}
    assert min(finding["gains"].values()) > 0
    if obstacle() is None:
        assert f"{finding['gains']['512']}× at 512 rows, error" in products.description(finding)
        assert "`approx doctor --probe` measures" in products.description(None)


@pytest.mark.parametrize("others", [False, True])
def test_marks_a_gain_measured_next_to_other_programs(helps, monkeypatch, others):
    monkeypatch.setattr(products, "crowded", lambda: others)
    monkeypatch.setattr(products, "_ROWS", (8, 16))
    finding = products.measure()
    gains = f"{finding['gains']['8']}× at 8 rows, {finding['gains']['16']}× at 16 rows"
    assert (
        products.description(finding)
        == f"with approx.fast_products() {gains}, error {finding['error']:.1e}" + " *" * others
    )


def test_stored_outputs_depend_on_the_switch():
    cpu = torch.device("cpu")
    assert computed_by(cpu) == computed_by(cpu, fast_products=False)
    assert computed_by(cpu, fast_products=True) != computed_by(cpu)


def test_refuses_a_recipe_with_useless_fast_products_before_any_work():
    stage = BenchStage(lengths=[8], inputs="synthetic", fast_products=True)
    asked = Recipe(title="a title", checkpoint="", variants={}, bench=[stage], device="cpu", dtype="bfloat16")
    with pytest.raises(ApproxError, match="the dtype is bfloat16"):
        check(asked, offline=True)
    plain = asked.model_copy(update={"bench": [stage.model_copy(update={"fast_products": False})]})
    assert check(plain, offline=True) == {}
