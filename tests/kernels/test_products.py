"""The switch of float32 products: when it is thrown, and that it is always put back."""

import threading

import pytest
import torch

from approx_kernels import products
from approx_kernels.products import fast_products


@pytest.fixture(autouse=True)
def worth_it_from_eight_rows(monkeypatch):
    monkeypatch.setattr(products, "worth_rows", lambda features: 8)


def state():
    return products._switch()


def test_it_is_thrown_inside_and_put_back_after_errors_too():
    assert state() == "none"
    with fast_products(8, "cpu", torch.float32) as thrown, fast_products(100, "cpu", torch.float32):
        assert thrown
        assert state() == "bf16"
    assert state() == "none"
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), fast_products(8, "cpu", torch.float32):
            raise error
        assert state() == "none"


@pytest.mark.parametrize(
    ("rows", "device", "dtype"),
    [(7, "cpu", torch.float32), (8, "cpu", torch.bfloat16), (8, "cuda", torch.float32), (8, "meta", torch.float32)],
)
def test_where_it_loses_or_means_nothing_it_is_left(rows, device, dtype):
    with fast_products(rows, device, dtype) as thrown:
        assert not thrown
        assert state() == "none"


def test_few_rows_within_many_leave_it_on_and_say_so():
    with fast_products(64, "cpu", torch.float32), fast_products(1, "cpu", torch.float32) as thrown:
        assert thrown
        assert state() == "bf16"


def test_what_somebody_set_is_kept():
    products._switch("ieee")
    try:
        with fast_products(64, "cpu", torch.float32) as thrown:
            assert (thrown, state()) == (False, "ieee")
        assert state() == "ieee"
    finally:
        products._switch("none")


def test_autocast_leaves_it():
    with torch.autocast("cpu", torch.bfloat16), fast_products(64, "cpu", torch.float32) as thrown:
        assert not thrown


def test_of_several_threads_the_last_one_puts_it_back():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with fast_products(8, "cpu", torch.float32):
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=hold)
    with fast_products(8, "cpu", torch.float32):
        other.start()
        assert inside.wait(10)
    assert state() == "bf16"
    leave.set()
    other.join()
    assert state() == "none"


def test_a_compiled_graph_is_left_alone():
    @torch.compile(backend="eager", fullgraph=True)
    def product(x):
        with fast_products(8, "cpu", torch.float32) as thrown:
            return x @ x, thrown

    assert product(torch.ones(8, 8))[1] is False


@pytest.mark.parametrize(
    ("seconds", "error", "rows"),
    [
        ({8: 0.5, 64: 0.5, 512: 0.5}, 3e-7, 8),
        ({8: 2.0, 64: 0.5, 512: 0.5}, 3e-7, 64),
        ({8: 0.5, 64: 2.0, 512: 0.5}, 3e-7, 512),
        ({8: 0.5, 64: 0.5, 512: 0.95}, 3e-7, None),
        ({8: 0.2, 64: 0.2, 512: 0.2}, 2e-6, None),
    ],
)
def test_it_is_worth_it_from_where_it_only_gains_and_stays_exact(monkeypatch, seconds, error, rows):
    def took(inputs, weights, now):
        return seconds[len(inputs[0])] if state() == "bf16" else 1.0

    monkeypatch.setattr(products, "_seconds", took)
    monkeypatch.setattr(products, "_error", lambda x, weight: error if state() == "bf16" else 1e-7)
    finding = products.measure()
    assert finding["rows"] == rows
    assert (finding["error"], finding["plain_error"]) == (error, 1e-7)
    assert state() == "none"


def test_on_this_machine_it_is_thrown_only_if_it_is_exact(monkeypatch):
    monkeypatch.undo()
    before = torch.random.get_rng_state()
    finding = products.measure()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert finding["rows"] is None or finding["error"] <= products.LABEL
    assert finding["plain_error"] <= products.LABEL


def test_narrow_models_are_asked_for_by_themselves(monkeypatch):
    monkeypatch.undo()
    asked = []

    def find(device, about, measure, otherwise):
        asked.append((about, *measure.args))
        return {"rows": None if measure.args[0] < 256 else 64}

    monkeypatch.setattr(products, "find", find)
    found = [products.worth_rows(features) for features in (32, 64, 255, 300, 768, 4096)]
    assert found == [None, None, None, 64, 64, 64]
    names = [f"float32 products, {features} features" for features in (64, 64, 128, 256)]
    assert asked == [*zip(names, (64, 64, 128, 256), strict=True), *[("float32 products", 768)] * 2]
    with fast_products(64, "cpu", torch.float32, 255) as thrown:
        assert not thrown
    with fast_products(64, "cpu", torch.float32, 256) as thrown:
        assert thrown
