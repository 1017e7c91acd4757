"""Whole searches of a tiny model with real outputs and a simulated clock, so that the result can be computed."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from approx.checkpoints.checkpoint import state_sha256
from approx.checkpoints.history import Check
from approx.conversion import stock
from approx.errors import ApproxError, Exit
from approx.measuring.measure import in_memory
from approx.planning.rule import Rule
from approx.searching import search
from approx.searching.cost import Choice, Composer, Front, Measured
from approx.searching.options import SearchStage
from approx.searching.outcome import Proof
from approx.searching.search import FITTED, MEASURED, SENSITIVITIES, Search, facts_of
from approx.tasks.metrics import METRICS
from forms import HEDGEHOG
from tiny_classifier import WORDS, tiny_tokenizer
from zoo import tiny

from .conftest import CANDIDATES

RULES = [one.rule for one in CANDIDATES]
NAMES = ["local 1", "local 4", "block 4"]


@pytest.fixture
def searching(base, text, clock, tmp_path, monkeypatch):
    """A search in the text that can be run, and ends after a few measurements."""
    monkeypatch.setattr(search, "MOST", 10)

    def make(folder="out", resume=False, seed=0, progress=lambda *words: None, **options: Any) -> Search:
        usual = {"length": 24, "text": str(text), "candidates": RULES, "examples": 6, "calibration": 4, "front": 2}
        stage = SearchStage(**{**usual, **options})
        return Search(base, stage, tmp_path / folder, resume=resume, seed=seed, progress=progress)

    return make


def kl(base, model, batches):
    """The mean divergence of the outputs, in float64."""
    apart = []
    for batch in batches:
        with torch.no_grad():
            target, outputs = (one(**batch.inputs).logits.double().log_softmax(-1) for one in (base, model))
        apart.append(float((target.exp() * (target - outputs)).sum()))
    return float(np.mean(apart))


def plans(found):
    """What was proven, by name, as milliseconds and loss."""
    times = {one.name: one for one in found.speed.variants}
    return {name: (times[name].median_ms, loss) for name, loss in found.divergences.items()}


def test_finds_the_fastest_plan_within_a_budget_and_proves_it_on_other_rows(searching, base, clock):
    reported = []
    made = searching(budget="kl<=0.16", progress=lambda *words: reported.append(words))
    found = made.run()
    assert found.feasible
    assert found.proof.loss <= 0.16
    proven = plans(found)
    # It is faster than every uniform plan within the budget, and than exact attention.
    allowed = [time for name, (time, loss) in proven.items() if name in NAMES and loss <= 0.16]
    assert found.proof.milliseconds <= min([*allowed, 35.0])
    assert found.proof.milliseconds == clock.milliseconds(found.models["found"])
    assert found.proof.speed == pytest.approx(35.0 / found.proof.milliseconds)
    assert found.ceiling == 1.75
    # The figures are those of the rows that nothing was chosen by.
    searched, proof = ({str(batch.inputs) for batch in part.batches} for part in (made.judge.search, made.judge.proof))
    assert len(proof) == found.proof.examples == 6
    assert not searched & proof
    for name, one in found.models.items():
        assert found.divergences[name] == pytest.approx(kl(base.model, one.model, made.judge.proof.batches), rel=1e-3)
    assert found.proof.loss == found.divergences["found"]
    assert found.proof.loss != pytest.approx(
        kl(base.model, found.models["found"].model, made.judge.search.batches), rel=1e-3
    )
    assert next(iter(found.models)) == "found"
    assert {"local 4", "block 4"} <= set(proven)
    assert all(found.verified.values())
    assert found.verified.keys() == found.models.keys()
    # The reasons of layers agree with the plan.
    plan = made.composer.plan(
        [Choice(CANDIDATES[NAMES.index(one.choice)] if one.choice in NAMES else None) for one in found.layers]
    )
    assert plan == found.plan
    assert sum(one.damage for one in found.layers) == pytest.approx(1.0)
    # What a layer moves the outputs by is that of a model in which it alone is converted.
    for one in found.layers:
        if one.choice == "exact":
            assert one.divergence is None
        else:
            choice = Choice(CANDIDATES[NAMES.index(one.choice)])
            alone = made.composer.make([choice if n == one.layer else Choice(None) for n in range(len(found.layers))])
            expected = kl(base.model, alone.model, made.judge.calibration.batches)
            assert one.divergence == pytest.approx(expected, rel=1e-3)
    assert (found.goal, found.unit, found.interrupted) == ("kl<=0.16 at 24 tokens", "nats", False)
    assert found.measured == len(json.loads((made.folder / MEASURED).read_text())["plans"])
    stages = list(dict.fromkeys(what.partition(" |")[0] for what, _, _ in reported))
    assert stages == [
        "read the data",
        "time the candidates",
        "measure the sensitivities",
        "measure plans",
        "time the plans",
        "check the plans",
        "compare the layers",
    ]
    assert state_sha256(base.model) == base.weights_sha256


def test_a_small_budget_buys_a_slower_plan(searching):
    # Everything may be lost in the table below: the fastest candidate is everywhere.
    assert searching(budget="kl<=0.03", front=0).run().proof.milliseconds > 36 - 3 * 3


def test_at_a_speed_the_plan_with_the_least_damage_is_found(searching):
    made, most = searching(latency="32ms", front=0), 32.0
    found = made.run()
    assert found.feasible
    assert found.proof.milliseconds <= most
    # A little of the time stays in reserve.
    fast = [plan for plan in made.trials.measured if 36 + made.trials.space.time(plan) <= 0.98 * most]
    best = min(fast, key=made.trials.divergence)
    assert len(fast) > 3
    assert found.plan == made.composer.plan(made.trials.choices(best))


@pytest.mark.parametrize(
    ("goal", "late", "feasible"),
    [
        ({"budget": "kl<=10", "speed": "1.2x"}, 0.0, True),
        ({"budget": "kl<=10", "speed": "1.2x"}, 5.0, False),
        # Faster than exact attention is all that a budget needs.
        ({"budget": "kl<=10"}, 7.5, True),
        ({"budget": "kl<=10"}, 8.5, False),
    ],
)
@pytest.mark.sample(2)
def test_the_proof_decides_whether_the_goal_is_met(searching, clock, goal, late, feasible):
    """The race of the proof is slower than predicted by `late` milliseconds."""
    clock.late = late
    found = searching(**goal, front=0).run()
    assert found.feasible == feasible
    assert found.proof.milliseconds == 36 - 3 * 3 + late
    assert found.summary.startswith("Found for" if feasible else "Infeasible: nothing found for")
    assert found.goal == " and ".join(goal.values()) + " at 24 tokens"


@pytest.mark.parametrize(
    ("options", "proof", "meets"),
    [
        ({"budget": "kl<=0.5"}, (0.5, 1.01, 9.0), True),
        ({"budget": "kl<=0.5"}, (0.51, 2.0, 9.0), False),
        ({"budget": "kl<=0.5"}, (0.1, 1.0, 9.0), False),
        ({"budget": "kl<=0.5"}, (0.1, None, None), False),
        ({"speed": "1.5x"}, (9.0, 1.5, 9.0), True),
        ({"speed": "1.5x"}, (0.0, 1.49, 1.0), False),
        ({"speed": "1.5x"}, (0.0, None, None), False),
        ({"latency": "9ms"}, (9.0, 0.5, 9.0), True),
        ({"latency": "9ms"}, (0.0, 5.0, 9.1), False),
        ({"latency": "9ms"}, (0.0, None, None), False),
        ({"budget": "kl<=0.5", "speed": "1.5x"}, (0.6, 2.0, 1.0), False),
        ({"budget": "kl<=0.5", "speed": "1.5x"}, (0.4, 1.2, 1.0), False),
        ({"budget": "kl<=0.5", "latency": "9ms"}, (0.4, 1.2, 9.0), True),
        ({"budget": "kl<=0.5", "latency": "9ms"}, (0.4, 1.2, 9.5), False),
    ],
)
def test_a_proof_meets_loss_and_speed_alike(searching, options, proof, meets):
    loss, speed, milliseconds = proof
    assert searching(**options)._meets(Proof(loss, None, "", 9, speed, None, milliseconds, None)) is meets


@pytest.mark.parametrize(
    ("goal", "message", "code"),
    [
        (
            {"speed": "3x"},
            r"the goal is a speed of 3x at 24 tokens, but even without any attention is 1\.75× \(20 ms",
            Exit.THRESHOLD,
        ),
        (
            {"speed": "1.7x"},
            r"a speed of 1\.7x.* the fastest mix of the candidates is 1\.30× \(27 ms; exact attention takes 35 ms",
            Exit.THRESHOLD,
        ),
        ({"latency": "19ms"}, "a latency of 19ms.*even without any attention", Exit.THRESHOLD),
        ({"latency": "26.9ms"}, "a latency of 26.9ms.*the fastest mix", Exit.THRESHOLD),
        ({"latency": "35ms"}, "Exact attention takes 35 ms at 24 tokens, within 35ms already", Exit.REFUSED),
    ],
)
def test_refuses_unreachable_goals_before_measuring(searching, goal, message, code):
    made = searching(**goal)
    with pytest.raises(ApproxError, match=message) as caught:
        made.run()
    assert caught.value.exit_code == code
    assert not made.folder.exists()


@pytest.mark.parametrize(
    ("goal", "longest"),
    [
        ({"budget": "kl<=1"}, None),
        # A reserve of 2 % of the wanted time, against the base as it is.
        ({"speed": "1.25x"}, 32 * 0.98 - 41),
        ({"latency": "35ms"}, 35 * 0.98 - 41),
        ({"latency": "0.035s"}, 35 * 0.98 - 41),
        # The fastest mix is still tried.
        ({"latency": "29ms"}, 29 - 41),
    ],
)
def test_the_time_of_a_plan_is_bounded_with_a_reserve(searching, goal, longest, base):
    made = searching(**goal)
    saved = np.tile([-3.0, -1.5, np.inf, 0.0], (3, 1))
    found = made._longest(search.cost.Costs(40.0, 41.0, 20.0, np.vstack([saved, saved[:1]]), crowded=False))
    assert found == (None if longest is None else pytest.approx(longest))


def test_finalists_lose_at_most_a_half_and_a_quarter_of_the_budget(searching):
    made = searching(budget="kl<=0.8")
    made.trials.space = search.Space(np.tile([-3.0, -1.5, -2.0, 0.0], (4, 1)), np.zeros((4, 4)))
    losses = {
        (0, 0, 0, 0): 0.8,
        (0, 0, 0, 3): 0.4,
        (0, 0, 1, 3): 0.39,
        (0, 1, 3, 3): 0.2,
        (0, 3, 3, 3): 0.1,
        (3, 3, 3, 3): 0.0,
    }
    for plan, loss in losses.items():
        made.trials.measured[plan] = Measured(loss)
        made.trials.divergences[plan] = loss
    assert made._finalists((0, 0, 0, 0)) == [(0, 0, 0, 0), (0, 0, 0, 3), (0, 1, 3, 3)]
    # Of those that lose no more than a half the fastest, wherever its layers are.
    for plan, loss in (((3, 0, 0, 0), 0.38), ((0, 3, 0, 3), 0.37), ((3, 2, 1, 3), 0.1)):
        made.trials.measured[plan] = Measured(loss)
        made.trials.divergences[plan] = loss
    del made.trials.measured[0, 0, 0, 3]
    assert made._finalists((0, 0, 0, 0)) == [(0, 0, 0, 0), (3, 0, 0, 0), (0, 1, 3, 3)]
    made.trials.measured[0, 0, 0, 3] = Measured(0.4)
    for plan in ((3, 0, 0, 0), (0, 3, 0, 3), (3, 2, 1, 3)):
        del made.trials.measured[plan]
    # Without a budget the shares are those of the best plan's loss; what saves no time is no finalist.
    free = searching(speed="1.1x")
    free.trials.space, free.trials.measured, free.trials.divergences = (
        made.trials.space,
        made.trials.measured,
        made.trials.divergences,
    )
    assert free._finalists((0, 0, 0, 3)) == [(0, 0, 0, 3), (0, 1, 3, 3), (0, 3, 3, 3)]
    assert free._finalists((0, 3, 3, 3)) == [(0, 3, 3, 3)]


def test_compares_with_uniform_plans_and_plans_of_the_front(searching):
    made = searching(budget="kl<=0.8", front=3)
    damages = np.array([8.0, 4.0, 2.0, 1.0, 0.5])
    front = Front(-np.arange(5.0)[::-1], damages, np.arange(5, dtype=np.int16)[:, None] * np.ones((1, 4), np.int16))
    compared = made._compared_plans(front)
    assert list(compared) == [*NAMES, "front 1", "front 2", "front 3"]
    assert [compared[name] for name in NAMES] == [(0,) * 3, (1,) * 3, (2,) * 3]
    # At equal steps of the logarithm between both ends: 4, 2 and 1.
    assert [compared[f"front {n}"][0] for n in (1, 2, 3)] == [1, 2, 3]


def test_a_uniform_plan_that_turned_out_better_is_named(searching):
    made = searching(budget="kl<=0.5")

    def proof(loss, speed):
        return Proof(loss, None, "", 9, speed, None, 1.0, None)

    proofs = {
        "finalist 1": proof(0.3, 1.2),
        "local 1": proof(0.4, 1.3),
        "local 4": proof(0.9, 1.9),
        "front 1": proof(0.1, 1.9),
    }
    (note,) = made._better(proofs, "finalist 1")
    assert note.startswith(
        "local 1 in every layer met the goal and was faster: 1.30× at −0.4 nats. It is the best of 3 uniform plans"
    )
    assert made._better({**proofs, "local 1": proof(0.4, 1.2)}, "finalist 1") == []
    assert made._better({**proofs, "local 1": proof(0.6, 1.3)}, "finalist 1") == []
    assert made._better(proofs, None)


def test_where_nothing_may_be_lost_exact_attention_is_the_answer(searching):
    found = searching(budget="kl<=0", front=0).run()
    assert (found.plan, found.proof, found.feasible) == (None, None, False)
    assert found.summary == "Infeasible: nothing found for kl<=0 at 24 tokens; exact attention everywhere is best."


def test_reports_the_least_loss_if_no_finalist_meets_the_goal(searching):
    found = searching(budget="kl<=0.06", front=0).run()
    assert not found.feasible
    finalists = [loss for name, loss in found.divergences.items() if name == "found" or name.startswith("finalist")]
    assert len(finalists) > 1
    assert found.proof.loss == min(finalists)
    assert found.summary.startswith("Infeasible: nothing found for kl<=0.06 at 24 tokens; the best is ")


def test_a_search_goes_on_with_what_it_measured(searching, monkeypatch):
    first = searching(budget="kl<=0.08").run()
    measured = []
    original = search.Judge.measure
    monkeypatch.setattr(search.Judge, "measure", lambda self, *about: measured.append(about) or original(self, *about))
    again = searching(budget="kl<=0.08", resume=True).run()
    assert (again.plan, again.proof, again.measured) == (first.plan, first.proof, first.measured)
    assert measured == []
    with pytest.raises(ApproxError, match="was measured for another model"):
        searching(budget="kl<=0.08", seed=1).run()
    for other in ({"examples": 5}, {"candidates": RULES[:2]}, {"calibration": 3}):
        with pytest.raises(ApproxError, match="holds a search of another model"):
            searching(budget="kl<=0.08", resume=True, **other)


def test_sensitivities_of_one_search_serve_another(searching, monkeypatch):
    first = searching(budget="kl<=0.08")
    table = first.damages()
    assert table.shape == (3, 4)
    assert table[:, 3].tolist() == [0.0] * 3
    assert np.all(table[:, :3] > 0)
    monkeypatch.setattr(search.cost, "measure_damage", None)
    other = searching("other", budget="kl<=2")
    other.know(first.folder / SENSITIVITIES)
    assert np.array_equal(other.damages(), table)
    assert (other.folder / SENSITIVITIES).read_bytes() == (first.folder / SENSITIVITIES).read_bytes()


@pytest.mark.sample(0)
def test_layers_may_convert_part_of_their_heads(searching):
    made = searching(budget="kl<=0.08", granularity="heads", candidates=RULES[:1])
    made.damages()
    names = [one.name for one in made.candidates]
    assert names == ["local 1", "local 1, 1 heads", "local 1, 2 heads", "local 1, 3 heads"]
    assert made.trials.heads.keys() == set(itertools.product(range(3), (1, 2, 3)))
    assert all(len(heads) == column for (_, column), heads in made.trials.heads.items())
    assert [one.choice for one in made.run().layers if one.choice.endswith("heads")]


def test_reports_the_least_loss_if_time_ends_before_a_plan_is_allowed(searching, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(search.time, "monotonic", lambda: float(next(now)))
    made = searching(budget="kl<=0.000001", time_budget="1s")
    found = made.run()
    assert not found.feasible
    assert found.measured == len(made.trials.measured) <= 4
    least = min(made.trials.measured, key=lambda plan: made.trials.measured[plan].divergence)
    assert found.plan == made.composer.plan(made.trials.choices(least))
    assert list(found.models) == ["found"]


@pytest.mark.sample(0)
def test_the_seed_is_that_of_times_of_parts_and_of_the_proof(searching, clock, monkeypatch):
    drawn = []
    original = search.cost.measure_damage
    monkeypatch.setattr(search.cost, "measure_damage", lambda *about: drawn.append(about[4]) or original(*about))
    found = searching(budget="kl<=0.5", front=0, seed=5).run()
    # Once for the candidates, and once for the proof with more rounds.
    assert clock.seeds == [5, 5]
    assert [grid.rounds for _, grid, _ in clock.raced] == [8, 12]
    assert drawn == [5]
    other = searching("other", budget="kl<=0.5", front=0, seed=6).run()
    name = next(iter(found.divergences.keys() & other.divergences.keys()))
    assert found.divergences[name] == pytest.approx(other.divergences[name])
    assert found.proof.interval != other.proof.interval


@pytest.mark.parametrize("name", ["exact_limit", "padding", "causality"])
@pytest.mark.sample(1)
def test_a_plan_that_fails_a_check_is_not_verified(searching, monkeypatch, name):
    monkeypatch.setattr(search.verify, name, lambda *about: Check(name, False, "it differs"))
    found = searching(budget="kl<=0.5", front=0, time_budget="1h").run()
    assert found.verified
    assert not any(found.verified.values())


def test_a_fit_of_another_search_or_a_damaged_one_is_refused(searching):
    options = {
        "budget": "kl<=9",
        "candidates": [Rule("linear", settings=HEDGEHOG)],
        "heal": "transfer",
    }
    for seed, text, message, code in (
        (0, b"no tensors", "is damaged.*--force", Exit.UNAVAILABLE),
        (1, None, "was fitted for another model, other candidates or other examples", Exit.REFUSED),
        (0, None, "is damaged: .*size mismatch|is damaged: .*Missing key", Exit.UNAVAILABLE),
    ):
        made = searching(**options, seed=seed)
        made.folder.mkdir(exist_ok=True)
        if text is None:
            save_file({"x": torch.zeros(1)}, made.folder / FITTED, {"about": searching(**options).about})
        else:
            (made.folder / FITTED).write_bytes(text)
        with pytest.raises(ApproxError, match=message) as caught:
            made.damages()
        assert caught.value.exit_code == code


def test_stored_searches_are_keyed_by_model_candidates_and_examples(searching, base, sentences):
    task = {
        "task": "glue/sst2",
        "data": str(sentences),
        "split": "dev",
        "budget": "loss<=1",
        "examples": 20,
        "text": None,
    }
    first, of_task = searching(budget="kl<=1").about, searching(**task).about
    # Another goal, other times and another proof are about the same.
    assert searching(budget="kl<=2", batch=2, front=0, time_budget="1h").about == first
    assert searching(**{**task, "budget": "loss<=3", "speed": "1.1x", "proof": 30}).about == of_task
    others = [
        searching(budget="kl<=1", **other).about
        for other in (
            {"candidates": RULES[:2]},
            {"length": 20},
            {"examples": 5},
            {"calibration": 3},
            {"seed": 1},
            {"heal": "transfer"},
            {"candidates": [Rule("local", settings={"left": 1, "right": 2}), *RULES[1:]]},
        )
    ]
    others += [searching(**{**task, **other}).about for other in ({"limit": 90}, {"seed": 1}, {"min_length": 20})]
    assert len({first, of_task, *others}) == 2 + len(others)


def test_a_time_budget_ends_the_measurements_before_the_proof(searching, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(search.time, "monotonic", lambda: float(next(now)))
    short = searching(budget="kl<=0.08", time_budget="5s").run()
    assert 3 <= short.measured < 10
    # Time is up, so only finalists are proven.
    assert all(name == "found" or name.startswith("finalist") for name in short.models)
    assert short.proof is not None


def test_a_time_budget_leaves_plans_out_of_the_comparison_and_names_them(searching, monkeypatch):
    made = searching(budget="kl<=10", time_budget="100s")
    monkeypatch.setattr(made, "_elapsed", lambda: 50.0)
    # A plan takes 10 seconds on the proof; the base and two finalists come first.
    made.trial_seconds = 10.0 * made.judge.search.inputs / made.judge.proof.inputs
    assert [made._room(2), made._room(4), made._room(9)] == [2, 0, 0]
    made.trial_seconds = 0.0
    assert made._room(2) is None
    monkeypatch.setattr(made, "_room", lambda finalists: 1)
    found = made.run()
    compared = [name for name in found.models if name != "found" and not name.startswith("finalist")]
    assert len(compared) == 1
    (note,) = [note for note in found.notes if "no room to measure" in note]
    assert note.startswith("The time budget of 100s had no room to measure ")
    assert compared[0] not in note.partition(" measure ")[2].removesuffix(" for comparison.").split(", ")


def test_interrupted_it_keeps_the_best_so_far(searching):
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("time the plans"):
            raise KeyboardInterrupt

    found = searching(budget="kl<=10", progress=interrupt).run()
    assert found.interrupted
    assert not found.feasible
    assert found.proof is None
    assert found.plan is not None
    assert found.summary.startswith("Interrupted before the proof")

    def at_once(what: str, done: int, total: int) -> None:
        if what.startswith("measure plans"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searching("other", budget="kl<=10", progress=at_once).run()


@pytest.mark.sample(0)
def test_a_busy_machine_is_noted(searching, clock):
    clock.crowded = True
    assert any("Other programs used the machine" in note for note in searching(budget="kl<=10", front=0).run().notes)
    clock.crowded = False
    assert searching("quiet", budget="kl<=10", front=0).run().notes == []


def test_proves_a_task_on_other_examples(base, sentences, clock, tmp_path):
    options = {
        "task": "glue/sst2",
        "data": str(sentences),
        "split": "dev",
        "examples": 50,
        "calibration": 20,
        "proof": 60,
    }
    stage = SearchStage(length=24, budget="loss<=15", candidates=RULES, front=1, **options)
    made: Any = Search(base, stage, tmp_path / "out", resume=False, seed=0, progress=lambda *words: None)
    found = made.run()
    part: Any = made.judge.proof.prepared
    searched = {one.id for one in made.judge.search.prepared.split.examples}
    assert len(part.split.examples) == found.quality.examples == found.proof.examples == 60
    assert not searched & {one.id for one in part.split.examples}
    labels = [example.label for example in part.split.examples]

    def accuracy(model):
        predictions = []
        for encoding in part.encodings:
            with torch.no_grad():
                predictions.append(int(model(input_ids=torch.tensor([encoding["input_ids"]])).logits.argmax()))
        return float(np.mean([one == label for one, label in zip(predictions, labels, strict=True)]))

    exact = accuracy(base.model)
    assert found.quality.base.scores["accuracy"] == pytest.approx(exact)
    for one in found.quality.variants:
        score = accuracy(found.models[one.name].model)
        assert one.scores["accuracy"] == pytest.approx(score)
        assert one.difference == pytest.approx(score - exact)
    variant = found.quality.variants[0]
    assert variant.name == "found"
    # A loss is positive, in points, and the budget is the margin.
    assert found.proof.loss == pytest.approx(-100 * variant.difference)
    assert found.proof.interval == pytest.approx((-100 * variant.interval[1], -100 * variant.interval[0]))
    assert variant.margin == pytest.approx(0.15)
    assert found.proof.verdict == variant.verdict
    assert found.quality.notes == [
        "examples that the search did not see",
        "the model's labels LABEL_0, LABEL_1 are taken as negative, positive; --labels sets another order",
    ]
    assert (found.quality.task, found.quality.split, found.quality.subset) == ("glue/sst2", "dev", True)
    assert found.quality.tokens.longest == max(part.lengths)
    assert METRICS["accuracy"].fraction
    assert found.unit == "points"


def test_mechanisms_are_fitted_before_they_are_measured(searching, base, monkeypatch):
    monkeypatch.setattr(search, "_STEPS", 8)
    made = searching(budget="kl<=9", candidates=[Rule("linear", settings=HEDGEHOG)], front=0, heal="transfer")
    made.damages()
    (linear,) = made.candidates
    assert (made.folder / FITTED).is_file()
    fitted, plain = (one.make(one.everywhere(linear)).model for one in (made.composer, Composer(base, made.facts)))
    losses = [made.judge.measure(model, made.judge.search).divergence for model in (fitted, plain)]
    assert losses[0] < losses[1]
    made.trials.costs = search.cost.Costs(35.0, 36.0, 20.0, np.zeros((3, 2)), crowded=False)
    assert search._HEALED in made._outcome(None, None).notes
    assert state_sha256(base.model) == base.weights_sha256


def test_a_converted_base_and_a_length_beyond_its_positions_are_refused(base, facts):
    composer = Composer(base, facts)
    made = composer.make(composer.everywhere(CANDIDATES[0]))
    with pytest.raises(ApproxError, match="is converted already") as caught:
        facts_of(made, SearchStage(length=8, speed="2x"))
    assert caught.value.exit_code == Exit.REFUSED
    with pytest.raises(ApproxError, match=r"Length 65 is too long.*takes 64 positions"):
        facts_of(base, SearchStage(length=65, speed="2x"))
    assert facts_of(base, SearchStage(length=64, speed="2x")).architecture == facts.architecture


@pytest.mark.parametrize(
    ("longest", "chosen"),
    [(None, [0, 2, 3, 4]), (-3.0, [0, 2]), (-2.9991, [0, 2]), (-4.9, [0]), (0.0, [0, 2, 3, 4])],
)
def test_plans_of_a_front_that_take_the_same_time_are_one(longest, chosen):
    times = np.array([-5.0, -3.0002, -3.0001, -1.0, 0.0])
    front = Front(times, np.arange(5.0)[::-1], np.arange(5, dtype=np.int16)[:, None])
    found = search._fitting(front, longest)
    assert [choices[0] for choices in found.choices.tolist()] == chosen
    assert np.array_equal(found.times, times[chosen])
    assert np.array_equal(found.damages, front.damages[chosen])


@pytest.mark.parametrize(
    ("interval", "bound", "verdict"),
    [
        ((0.05, 0.2), None, "no budget"),
        ((0.05, 0.2), 0.2, "within the budget"),
        ((0.05, 0.2), 0.19, "inconclusive"),
        ((0.05, 0.2), 0.05, "inconclusive"),
        ((0.05, 0.2), 0.04, "beyond the budget"),
        # Without an interval nothing is shown.
        (None, 0.1, "inconclusive"),
        (None, None, "no budget"),
    ],
)
def test_the_verdict_of_a_divergence_goes_by_its_interval(interval, bound, verdict):
    assert search._within(interval, bound) == verdict


def test_a_stock_search_of_bert_takes_one_mechanism_in_every_layer(searching):
    made = searching(budget="kl<=0.5", stock=True)
    assert [one.name for one in made.candidates] == ["local 1", "local 4"]
    found = made.run()
    # Exact layers, which would lose less, are in no Longformer.
    assert all("local" in name for plan in made.trials.measured for name in made_of(made, plan))
    if found.plan is not None:
        assert stock.of_plan(made.composer.base.model.config, type(made.composer.base.model), found.plan).window


@pytest.mark.parametrize("goal", [{"budget": "kl<=100"}, {"speed": "1.05x"}])
def test_a_stock_search_of_a_decoder_keeps_to_one_window(goal, text, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MOST", 10)
    base = in_memory(tiny("LlamaForCausalLM", vocab_size=len(WORDS), initializer_range=0.4), tiny_tokenizer())
    options = {"length": 24, "text": str(text), "candidates": RULES, "examples": 6, "calibration": 4, "front": 2}
    made = Search(
        base,
        SearchStage(**options, **goal, stock=True),
        tmp_path / "out",
        resume=False,
        seed=0,
        progress=lambda *_: None,
    )
    found = made.run()
    windows = [{*made_of(made, plan)} - {"exact"} for plan in made.trials.measured]
    assert all(len(some) <= 1 for some in windows)
    # Both windows were tried, in some layers and in all.
    assert {"local 1", "local 4"} == set().union(*windows)
    assert found.plan is not None
    made_stock = stock.of_plan(base.model.config, type(base.model), found.plan)
    assert made_stock.kind.__name__ == "MinistralForCausalLM"


def made_of(made, plan):
    """What each layer of a plan runs, by name."""
    return [choice.name for choice in made.trials.choices(plan)]


def test_a_stock_search_does_not_go_on_with_another_one(searching):
    options = {"budget": "kl<=0.5", "candidates": RULES[:2]}
    assert searching(stock=True, **options).about != searching("other", **options).about
    with pytest.raises(ApproxError, match="no groups of heads"):
        searching(stock=True, granularity="heads", **options)
    with pytest.raises(ApproxError, match="expresses block here"):
        searching(stock=True, budget="kl<=0.5", candidates=RULES[2:])
