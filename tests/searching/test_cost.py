"""The price of a candidate: a whole model's time, divided among the layers that were changed for it."""

from typing import Any

import numpy as np
import pytest

from approx.errors import ApproxError, Exit
from approx.measuring.measure import in_memory
from approx.planning.anatomy import anatomy
from approx.planning.rule import Rule
from approx.searching import cost
from approx.searching.cost import Candidate, Composer
from approx.searching.options import SearchStage
from tiny_classifier import tiny_tokenizer
from zoo import tiny

from .conftest import CANDIDATES


def quiet(what: str, done: int, total: int) -> None:
    pass


def measured(base, facts, candidates=CANDIDATES, seed=0, **options):
    stage = SearchStage(**{"length": 24, "speed": "1.5x", **options})
    return cost.measure_costs(Composer(base, facts), candidates, stage, seed=seed, progress=quiet)


def test_a_site_is_charged_its_share_of_what_all_sites_add(base, facts, clock):
    found = measured(base, facts)
    assert (found.exact, found.unchanged, found.ceiling, found.crowded) == (35.0, 36.0, 20.0, False)
    # Three sites save together what the clock saves in each, against the base as it is.
    assert found.saved.shape == (3, 4)
    assert found.saved == pytest.approx(np.tile([-3.0, -1.5, -2.0, 0.0], (3, 1)))
    assert found.speed(20.0) == 1.75
    ((models, grid, texts),) = clock.raced
    assert list(models) == ["exact", "unchanged", "local 1 (0)", "local 4 (0)", "block 4 (0)"]
    assert (grid.lengths, grid.batches, grid.inputs, texts) == ([24], [1], "synthetic", None)
    assert (grid.rounds, grid.seconds) == (8, 0.5)
    measured(base, facts, seed=7)
    assert clock.seeds == [0, 7]


def test_the_examples_of_a_task_are_what_is_timed(base, facts, clock):
    settings: dict[str, Any] = {"settings": {"files": 3}}
    measured(base, facts, speed=None, budget="loss<=1", task="glue/sst2", data="here", split="dev", batch=4, **settings)
    ((_, grid, texts),) = clock.raced
    assert (grid.inputs, grid.batches) == ("real", [4])
    assert (texts.task, texts.data, texts.split, texts.limit, texts.settings) == (
        "glue/sst2",
        "here",
        "dev",
        64,
        {"files": 3},
    )


def test_part_of_the_heads_costs_what_part_of_the_heads_saves(base, facts, clock):
    (half,) = [Candidate("local 1, 2 heads", CANDIDATES[0].rule, 2)]
    assert measured(base, facts, [half]).saved == pytest.approx(np.tile([-1.5, 0.0], (3, 1)))


def test_sites_of_another_form_are_timed_apart_and_not_where_a_mechanism_cannot_run(clock):
    model = tiny("BartForConditionalGeneration")
    facts = anatomy(model.config, type(model))
    composer = Composer(in_memory(model, tiny_tokenizer()), facts)
    forms = [site.causal for site in facts.sites]
    assert {True, False} == set(forms)
    # Sinks are causal only.
    sinks = Candidate("sinks", Rule("sinks", settings={"window": 4}))
    # The configuration of this family has its number of layers elsewhere.
    clock.milliseconds = lambda one: (
        41.0 - 3.0 * len((getattr(one.model.config, "approx", None) or {}).get("sites", {}))
    )
    found = cost.measure_costs(composer, [sinks], SearchStage(length=16, speed="2x"), seed=0, progress=quiet)
    assert [float(x) for x in found.saved[:, 0]] == [-3.0 if causal else np.inf for causal in forms]
    assert found.saved[:, 1].tolist() == [0.0] * len(forms)


def test_stores_times_for_equal_arguments_only(base, facts, clock):
    first = measured(base, facts)
    again = measured(base, facts)
    assert len(clock.raced) == 1
    assert np.array_equal(first.saved, again.saved)
    other = Candidate("local 1", Rule("local", settings={"left": 1, "right": 2}))
    task = {"task": "glue/sst2", "speed": None, "budget": "loss<=1"}
    different: tuple[dict[str, Any], ...] = (
        {"length": 20},
        {"batch": 2},
        {"seed": 1},
        {"candidates": CANDIDATES[:2]},
        {"candidates": [other, *CANDIDATES[1:]]},
        {"candidates": [CANDIDATES[0]._replace(heads=2), *CANDIDATES[1:]]},
        task,
        {**task, "task": "glue/mrpc"},
        {**task, "data": "here"},
        {**task, "split": "train"},
        {**task, "settings": {"a": 1}},
    )
    for number, options in enumerate(different, start=2):
        measured(base, facts, **options)
        assert len(clock.raced) == number, options
    # The goal changes no time, nor what is proven.
    measured(base, facts, speed="1.1x", proof=9, front=0)
    assert len(clock.raced) == number


def test_times_of_another_machine_are_measured_again(base, facts, clock, monkeypatch):
    measured(base, facts)
    monkeypatch.setattr(cost, "environment", lambda threads: {"approx": "0", "git_commit": "a", "processor": "another"})
    measured(base, facts)
    assert len(clock.raced) == 2
    # Another commit with the same code is the same machine.
    monkeypatch.setattr(cost, "environment", lambda threads: {"approx": "1", "git_commit": "b", "processor": "another"})
    measured(base, facts)
    assert len(clock.raced) == 2


def test_does_not_store_times_of_a_busy_machine(base, facts, clock):
    clock.crowded = True
    assert measured(base, facts).crowded
    clock.crowded = False
    assert not measured(base, facts).crowded
    assert len(clock.raced) == 2


@pytest.mark.parametrize(
    "text", ["", "[]", '{"exact": 1.0}', '{"exact": 1, "ceiling": 1, "unchanged": 1, "crowded": false}']
)
def test_a_damaged_file_of_times_is_measured_again(base, facts, clock, own_cache, text):
    found = measured(base, facts)
    (file,) = (own_cache / "search").glob("*.json")
    file.write_text(text, encoding="utf-8")
    assert np.array_equal(measured(base, facts).saved, found.saved)
    assert len(clock.raced) == 2


def test_a_candidate_without_memory_cannot_be_chosen_and_a_base_without_it_ends_the_search(base, facts, clock):
    usual = clock.milliseconds
    clock.milliseconds = lambda one: None if "block" in str(getattr(one.model.config, "approx", "")) else usual(one)
    for _ in ("measured", "kept"):
        assert np.isinf(measured(base, facts).saved[:, 2]).all()
    assert len(clock.raced) == 1
    clock.out_of_memory = True
    with pytest.raises(ApproxError, match="ran out of memory at 20 tokens") as caught:
        measured(base, facts, length=20)
    assert caught.value.exit_code == Exit.MISSING


def test_layers_with_windows_of_their_own_stay_exact(clock):
    model = tiny("ModernBertForSequenceClassification")
    base, facts = in_memory(model, tiny_tokenizer()), anatomy(model.config, type(model))
    found = measured(base, facts, CANDIDATES[:1])
    assert found.saved[:, 0].tolist() == [-3.0, np.inf, -3.0]
    composer = Composer(base, facts)
    assert [choice.name for choice in composer.everywhere(CANDIDATES[0])] == ["local 1", "exact", "local 1"]
    plan = composer.plan(composer.everywhere(CANDIDATES[0]))
    assert plan is not None
    assert [rule.layers for rule in plan.rules] == ["0,2"]
