"""What a search says of what it found: signs, units, doubts, and the plan as a file."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from approx.evaluation.record import BUSY, SpeedVariant
from approx.planning.plan import Plan, Rule
from approx.searching.outcome import LayerReason, Proof, Searched, reasons
from typed import part_of

PROOF = Proof(0.4, (-0.1, 0.9), "no loss", 50, 1.3, (1.25, 1.35), 7.0, 0.6)
PLAN = Plan((Rule("local", "0-1", {"left": 2, "right": 2}),))


def searched(**more: Any) -> Searched:
    usual: dict[str, Any] = {
        "plan": PLAN,
        "feasible": True,
        "interrupted": False,
        "goal": "loss<=0.5 at 48 tokens",
        "unit": "points",
        "layers": [],
        "proof": PROOF,
        "ceiling": 2.0,
        "correlation": None,
        "measured": 3,
        "seconds": 1.26,
    }
    return Searched(**{**usual, **more})


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        # A loss is negative, and so are the ends of its interval, the larger loss first.
        ({}, "1.30× at −0.4 points (−0.9 to +0.1)"),
        ({"loss": -0.4, "interval": None}, "1.30× at +0.4 points"),
        ({"speed": None, "interval": None}, "out of memory at −0.4 points"),
        ({"settled": False, "interval": None}, "1.30× (not settled: the machine was busy) at −0.4 points"),
    ],
)
def test_phrase_has_speed_and_loss(changes, phrase):
    assert replace(PROOF, **changes).phrase("points") == phrase


def test_a_proof_takes_its_times_from_the_race():
    times = {"name": "a", "median_ms": 7.0, "ratio": 1.4, "interval": [1.3, 1.5], "share_of_ceiling": 0.7}
    made = Proof.of(0.1, None, "no loss", 9, part_of(SpeedVariant, **times, verdict="faster"))
    assert made == Proof(0.1, None, "no loss", 9, 1.4, (1.3, 1.5), 7.0, 0.7, settled=True)
    assert not Proof.of(0.1, None, "no loss", 9, part_of(SpeedVariant, **times, verdict=BUSY)).settled
    lost = part_of(SpeedVariant, name="a", median_ms=None, ratio=None, interval=None)
    assert Proof.of(0.1, None, "no loss", 9, lost).speed is None
    # The base itself is not raced against itself.
    assert Proof.of(0.0, None, "no loss", 9, None).speed == 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Found for loss<=0.5 at 48 tokens: 1.30× at −0.4 points (−0.9 to +0.1), no loss, 60% of the ceiling."),
        (
            {"proof": replace(PROOF, share_of_ceiling=None)},
            "Found for loss<=0.5 at 48 tokens: 1.30× at −0.4 points (−0.9 to +0.1), no loss.",
        ),
        (
            {"feasible": False},
            "Infeasible: nothing found for loss<=0.5 at 48 tokens; the best is 1.30× at −0.4 points (−0.9 to +0.1).",
        ),
        (
            {"feasible": False, "proof": None},
            "Infeasible: nothing found for loss<=0.5 at 48 tokens; exact attention everywhere is best.",
        ),
        (
            {"interrupted": True},
            "Interrupted before the proof. The best plan so far is not proven to meet: loss<=0.5 at 48 tokens.",
        ),
    ],
)
def test_summary_is_one_sentence(changes, sentence):
    assert searched(**changes).summary == sentence


def test_the_plan_is_read_back_below_its_reasons(tmp_path):
    layers = [LayerReason(0, "local 2", "all", 1.5, 0.25, "saves\ntime")]
    made = searched(layers=layers, notes=["a note"])
    text = made.to_yaml()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert head == [f"# {made.summary}", "# a note", "# layer 0: saves time"]
    (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
    assert Plan.read(tmp_path / "plan.yaml") == PLAN
    assert list(yaml.safe_load(text)) == ["rules"]
    data = made.to_data()
    assert data["plan"] == PLAN.to_data()
    assert data["layers"] == [vars(layers[0])]
    assert data["proof"] == vars(PROOF)
    assert (data["outcome"], data["seconds"], data["measured"], data["notes"]) == (made.summary, 1.3, 3, ["a note"])
    assert (data["feasible"], data["interrupted"], data["ceiling"]) == (True, False, 2.0)
    nothing = searched(plan=None, proof=None).to_data()
    assert (nothing["plan"], nothing["proof"]) == (None, None)
    with pytest.raises(ValueError, match="is not a plan"):
        searched(plan=None).to_yaml()


def test_gives_every_layer_its_share_of_the_damage_and_why():
    made = reasons(
        ["local 2", "exact", "block, 2 heads"], [(), (), (1, 3)], [1.5, 0.0, 0.5], [0.3, 0.0, 0.1], ["", "no gain", ""]
    )
    assert [(one.layer, one.choice, one.heads, one.saves) for one in made] == [
        (0, "local 2", "all", 1.5),
        (1, "exact", "all", 0.0),
        (2, "block, 2 heads", "1,3", 0.5),
    ]
    assert [one.damage for one in made] == pytest.approx([0.75, 0.0, 0.25])
    assert [one.reason for one in made] == [
        "local 2: saves 1.50 ms for 75% of the plan's predicted damage",
        "exact: no gain",
        "block, 2 heads on heads 1,3: saves 0.50 ms for 25% of the plan's predicted damage",
    ]
    assert [one.damage for one in reasons(["exact"], [()], [0.0], [0.0], ["slow"])] == [0.0]
