"""Options of a search: budgets, speeds, latencies, and contradictions."""

import pytest
from pydantic import ValidationError

from approx.errors import ApproxError
from approx.planning.rule import Rule
from approx.searching.options import SearchStage, check, contradictions, read_budget, read_latency, read_speed


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_budget, "loss<=0.5", ("loss", 0.5)),
        (read_budget, " kl <= 2 ", ("kl", 2.0)),
        (read_budget, "error<=0.125", ("error", 0.125)),
        (read_budget, "loss<0.5", None),
        (read_budget, "loss<=-1", None),
        (read_budget, "accuracy<=1", None),
        (read_speed, "1.5x", 1.5),
        (read_speed, " 2× ", 2.0),
        (read_speed, "1.01x", 1.01),
        (read_speed, "1x", None),
        (read_speed, "0.5x", None),
        (read_speed, "2", None),
        (read_latency, "20ms", 20.0),
        (read_latency, "1.5 s", 1500.0),
        (read_latency, "0ms", None),
        (read_latency, "20", None),
    ],
)
def test_reads_a_goal_or_refuses_it(read, text, value):
    if value is not None:
        assert read(text) == value
        return
    with pytest.raises(ValueError, match="such as"):
        read(text)


RULE = Rule("local")
LATENCY = {"speed": None, "latency": "1ms"}


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({}, []),
        ({"speed": None}, ["Neither a loss nor a speed"]),
        (LATENCY, []),
        ({"latency": "1ms"}, ["Both a speed (1.5x) and a latency (1ms)"]),
        ({"speed": None, "budget": "kl<=1"}, []),
        ({"budget": "kl<=1", "task": "needle"}, ["budget kl<=1 is a divergence, but the task needle"]),
        ({"budget": "error<=1", "task": "needle"}, ["budget error<=1 is a divergence"]),
        ({"budget": "loss<=1"}, ["in points of a task, but no task"]),
        ({"budget": "loss<=1", "task": "needle"}, []),
        ({"task": "needle", "text": "a.txt"}, ["Both a task and a text"]),
        ({"mechanisms": "local", "candidates": [RULE]}, ["Both mechanisms and candidates"]),
        ({"candidates": [RULE]}, []),
        ({"candidates": [RULE, Rule("local", "1")]}, ["The candidate local names layers"]),
        ({"candidates": [Rule("block", heads="1")]}, ["The candidate block names layers, heads"]),
        ({"candidates": [Rule("block", exact_below=9)]}, ["The candidate block names"]),
        ({"speed": None, "task": "needle", "text": "a.txt"}, ["Neither a loss", "Both a task"]),
    ],
)
def test_names_every_contradiction(options, messages):
    stage = SearchStage(**{"length": 8, "speed": "1.5x", **options})
    found = list(contradictions(stage))
    assert len(found) == len(messages)
    assert all(words in one for one, words in zip(found, messages, strict=True))
    if not messages:
        check(stage)
        return
    with pytest.raises(ApproxError) as caught:
        check(stage)
    assert str(caught.value) == "\n".join(found)


def test_bounds_and_times_are_read_from_their_texts():
    stage = SearchStage(length=8, budget="loss<=0.5", time_budget="2m")
    assert (stage.allowed, stage.seconds) == (("loss", 0.5), 120.0)
    free = SearchStage(length=8, speed="2x")
    assert (free.allowed, free.seconds) == (None, None)


def test_defaults_match_the_documentation():
    stage = SearchStage(length=8, speed="2x")
    assert (stage.examples, stage.proof, stage.front, stage.batch, stage.granularity) == (300, 500, 5, 1, "layer")
    absent = ("task", "data", "split", "limit", "min_length", "text", "mechanisms", "candidates", "heal", "calibration")
    assert [getattr(stage, name) for name in absent] == [None] * len(absent)
    assert (stage.settings, stage.truncate) == ({}, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 0},
        {"batch": 0},
        {"examples": 0},
        {"proof": 0},
        {"calibration": 0},
        {"limit": 0},
        {"min_length": 0},
        {"front": -1},
        {"granularity": "block"},
        {"heal": "distill"},
        {"time_budget": "soon"},
        {"speed": "1x"},
        {"budget": "loss<1"},
        {"latency": "20"},
        {"unknown": 1},
    ],
)
def test_refuses_impossible_searches(wrong):
    with pytest.raises(ValidationError):
        SearchStage(**{"length": 8, "speed": "2x", **wrong})


def test_front_may_be_zero():
    assert SearchStage(length=8, speed="2x", front=0).front == 0
