"""Plans that are measured once, stored in a file, and explained."""

import json

import numpy as np
import pytest

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import fingerprint
from approx.searching.cost import Composer, Costs, Judge, Measured
from approx.searching.options import SearchStage
from approx.searching.search import Space, Trials

from .conftest import CANDIDATES

# Milliseconds and damage of three candidates, and of exact attention.
TIMES = np.tile([-3.0, -1.5, -2.0, 0.0], (3, 1))
DAMAGES = np.array([[0.4, 0.1, 0.2, 0.0], [0.3, 0.1, 0.3, 0.0], [0.2, 0.05, 0.3, 0.0]])
EXACT = (3, 3, 3)


@pytest.fixture(scope="module")
def judge(base, text):
    stage = SearchStage(length=24, budget="kl<=0.5", text=str(text), examples=6, calibration=4)
    return Judge(base, stage, 0)


@pytest.fixture
def make(judge, base, facts, tmp_path):
    def trials(about="a", reported=None) -> Trials:
        reported = [] if reported is None else reported
        made = Trials(
            judge,
            Composer(base, facts),
            CANDIDATES,
            tmp_path / "out" / "measured.json",
            about,
            lambda *words: reported.append(words),
        )
        made.space, made.costs = Space(TIMES, DAMAGES), Costs(35.0, 36.0, 20.0, TIMES, crowded=False)
        return made

    return trials


def test_a_plan_is_measured_once_and_remembered_by_the_next_search(make, judge):
    reported: list[tuple[str, int, int]] = []
    first = make(reported=reported)
    plan = (1, 3, 0)
    found = first.measure(plan)
    assert first.measure(plan) is found
    assert reported == [("measure plans", 0, 30)]
    assert first.divergence(plan) == found.divergence == first.divergences[plan] == first.loss(plan) > 0
    assert found == judge.measure(first.composer.make(first.choices(plan)).model, judge.search)
    assert first.measure(EXACT).divergence == 0.0
    assert reported[1][
        0
    ] == f"measure plans | best so far about {35 / 31.5:.2f}x at a loss of about {found.divergence:.2g} nats" or (
        found.divergence > 0.5
    )
    again = make()
    again.remember()
    assert again.measured == first.measured
    assert again.divergences == first.divergences
    with pytest.raises(ApproxError, match="holds a search of another model") as caught:
        make("other").remember()
    assert caught.value.exit_code == Exit.REFUSED


def test_without_a_file_nothing_is_remembered(make):
    made = make()
    made.remember()
    assert (made.measured, made.best_so_far(), made.correlation()) == ({}, None, None)


def test_choices_are_named_by_column_and_keep_their_heads(make):
    made = make()
    made.heads[1, 0] = [2, 0]
    named = [(one.name, one.heads) for one in made.choices((2, 0, 1))]
    assert named == [("block 4", ()), ("local 1", (0, 2)), ("local 4", ())]


def measured(made, **divergences):
    """Put divergences of plans, written as digits, where measurements would be."""
    for digits, value in divergences.items():
        plan = tuple(map(int, digits[1:]))
        made.measured[plan] = Measured(value)
        made.divergences[plan] = value


def test_the_best_so_far_is_the_fastest_within_the_budget_or_the_least_damaging(make):
    made = make()
    assert made.bound == 0.5
    measured(made, p033=0.4, p003=0.5, p000=0.6, p333=0.0)
    assert made.best_so_far() == (0, 0, 3)
    worse = make()
    measured(worse, p003=0.7, p000=0.6)
    assert worse.best_so_far() == (0, 0, 0)
    worse.judge.__dict__["stage"], stage = SearchStage(length=8, speed="2x"), worse.judge.stage
    try:
        assert worse.bound == np.inf
    finally:
        worse.judge.stage = stage


def test_predictions_and_measurements_are_compared_by_rank(make):
    made = make()
    measured(made, p333=0.0, p332=0.9, p133=0.1, p033=0.5)
    assert made.correlation() is None
    measured(made, p003=0.6)
    # Predicted 0, 0.3, 0.1, 0.4, 0.7: the second is out of order.
    assert made.correlation() == pytest.approx(np.corrcoef([1, 3, 2, 4, 5], [1, 5, 2, 3, 4])[0, 1])


def test_a_layer_that_stays_exact_says_what_would_change_it(make):
    made = make()
    first, second, third = made.reasons((0, 3, 1))
    assert [one.choice for one in (first, second, third)] == ["local 1", "exact", "local 4"]
    assert [one.saves for one in (first, second, third)] == [3.0, 0.0, 1.5]
    assert first.damage == pytest.approx(0.4 / 0.45)
    # The least damaging of those that save time: 0.1 of 0.45.
    assert second.reason == "exact: local 4 would add 22% of the plan's predicted damage to save 1.50 ms"
    assert made.reasons(EXACT)[0].reason == "exact: local 4 would add damage to save 1.50 ms"
    slow = make()
    slow.space = Space(-TIMES, DAMAGES)
    assert slow.reasons(EXACT)[0].reason == "exact: no candidate saves time here"


def test_the_file_holds_every_plan_with_its_figures(make, tmp_path):
    made = make()
    made.measure(EXACT)
    made.measure((1, 1, 1))
    data = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert data["about"] == "a"
    assert [plan for plan, _ in data["plans"]] == [[3, 3, 3], [1, 1, 1]]
    assert data["plans"][0][1] == [0.0, None, None]


PLANS = [[[3, 3, 3], [0.0, None, None]], [[1, 1, 1], [0.25, None, None]]]
DAMAGED = {
    "empty": b"",
    "half": b'{"about": "a", "plans": [[[3,',
    "a list": b"[]",
    "no plans": b'{"about": "a"}',
    "plans of another type": b'{"about": "a", "plans": {}}',
    "a figure of another type": b'{"about": "a", "plans": [[[3, 3, 3], ["0", null, null]]]}',
    "not a number": b'{"about": "a", "plans": [[[3, 3, 3], [NaN, null, null]]]}',
    "an endless loss": b'{"about": "a", "plans": [[[3, 3, 3], [1e999, null, null]]]}',
    "a plan of another length": b'{"about": "a", "plans": [[[3, 3], [0, null, null]]]}',
    "no such candidate": b'{"about": "a", "plans": [[[3, 3, 4], [0, null, null]]]}',
    "half of a surrogate pair": b'{"about": "\\ud800", "plans": []}',
    "another figure": json.dumps({"about": "a", "plans": PLANS[:1], "sha256": fingerprint(PLANS)}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_rejects_a_damaged_file_of_plans(damage, make, tmp_path):
    file = tmp_path / "out" / "measured.json"
    file.parent.mkdir()
    file.write_bytes(DAMAGED[damage])
    with pytest.raises(ApproxError, match=r"measured\.json is damaged: .*Delete it") as caught:
        make().remember()
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1)
    assert file.read_bytes() == DAMAGED[damage]


def test_reads_the_plans_of_an_earlier_version_and_ignores_fields_of_a_later_one(make, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "measured.json").write_text(json.dumps({"about": "a", "plans": PLANS, "more": 1}), "utf-8")
    made = make()
    made.remember()
    assert made.divergences == {(3, 3, 3): 0.0, (1, 1, 1): 0.25}
