"""Changing the seeds of a converted model: only within a context, and with a different identity."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from approx.checkpoints import checkpoint
from approx.conversion import surgery
from approx.conversion.calibration import calibration_batch, mechanisms
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject
from approx.measuring.measure import reseeding
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint

STEP = {
    "action": "convert",
    "approx": "0.1",
    "base": {"name": "base", "revision": None, "weights_sha256": "cd"},
    "plan": [],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("reseeding") / "base"))


@pytest.fixture
def converted(base):
    """Open the base, and convert its second layer to a mechanism."""

    def convert(mechanism, **settings):
        opened = checkpoint.load(base)
        batch = calibration_batch(opened.source, opened.model, 32).inputs
        surgery.convert(opened.model, Plan((Rule(mechanism, "1", settings=settings),)), calibration=batch)
        opened.model.config.approx["history"] = [{**STEP, "calibration_length": 32}]
        return replace(opened, source=replace(opened.source, converted=True))

    return convert


def subject(opened, identity=None):
    return Subject("drawn", opened.model, checkpoint.processor(opened.source), identity)


def state(opened):
    return {name: value.clone() for name, value in opened.model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(("frozen", "seed_before"), [(False, 0), (True, 3)])
def test_another_draw_has_its_seed_and_is_undone_afterwards(converted, frozen, seed_before):
    opened = converted("clustered", clusters=2, bits=8, frozen=frozen, seed=seed_before)
    before, drawing = state(opened), mechanisms(opened.model)
    mechanism: Any = drawing[0]
    seed, seen = mechanism.seed, []
    assert seed == seed_before
    for identity in (None, "known"):
        again = reseeding(opened, subject(opened, identity))
        assert again is not None
        for raised in (1, 2, 1):
            with again(raised) as other:
                seen.append((other.identity, state(opened)))
                assert (other.name, mechanism.seed, other.reseeded) == (f"drawn, seed + {raised}", seed + raised, None)
            assert mechanism.seed == seed
            assert equal(state(opened), before)
    (_, first), (_, second), (_, third), *known = seen
    assert equal(first, third)
    assert not equal(first, second)
    assert not equal(first, before)
    assert {identity for identity, _ in seen[:3]} == {None}
    assert len({"known", *(identity for identity, _ in known)}) == 3
    assert known[0][0] == known[2][0]


def test_a_raised_seed_draws_what_a_conversion_with_that_seed_does(converted):
    opened, other = (converted("clustered", clusters=2, bits=8, frozen=False, seed=seed) for seed in (3, 5))
    again = reseeding(opened, subject(opened))
    assert again is not None
    with again(2):
        assert equal(state(opened), state(other))
    assert not equal(state(opened), state(other))


def test_an_error_inside_leaves_the_draw_of_the_checkpoint(converted):
    opened = converted("clustered", clusters=2, bits=8, frozen=False)
    before, again = state(opened), reseeding(opened, subject(opened))
    assert again is not None
    with pytest.raises(ZeroDivisionError), again(1):
        raise ZeroDivisionError
    assert equal(state(opened), before)


def test_deterministic_mechanisms_have_no_other_draws(converted):
    opened = converted("local", left=1, right=1)
    assert reseeding(opened, subject(opened)) is None


def test_a_stock_checkpoint_has_no_other_draws(base):
    opened = checkpoint.load(base)
    assert reseeding(opened, subject(opened)) is None


@pytest.mark.parametrize("frozen", [False, True])
def test_refuses_to_redraw_mechanisms_fitted_to_a_users_text(converted, frozen):
    opened = converted("clustered", clusters=2, bits=8, frozen=frozen)
    opened.model.config.approx["history"][0]["calibration"] = {"name": "mine.txt", "sha256": "ab"}
    if not frozen:
        assert reseeding(opened, subject(opened)) is not None
        return
    with pytest.raises(
        ApproxError, match=r"of drawn were fitted to mine\.txt, which the checkpoint does not store"
    ) as caught:
        reseeding(opened, subject(opened))
    assert caught.value.exit_code == Exit.UNSUPPORTED
