"""What the report says first: figures and their tones, and warnings of what was not measured."""

import copy

import pytest

from approx.publishing.summary import answers, longest_input


def said(record: dict, name: str) -> str:
    (found,) = (answer for answer in answers(record) if answer.name == name)
    return " ".join(found.sentences)


@pytest.fixture
def measured(record) -> dict:
    """One task, with a named verdict, and speeds at 128 and 512 tokens."""
    record = copy.deepcopy(record)
    record["quality"] = record["quality"][:1]
    record["speed"] = [row for row in record["speed"] if row["batch"] == record["speed"][0]["batch"]][:2]
    return record


@pytest.mark.parametrize(("longest", "warned"), [(100, True), (511, True), (512, True), (513, False), (4000, False)])
def test_speed_at_lengths_that_quality_was_not_measured_at_is_told(measured, longest, warned):
    (task,) = measured["quality"]
    for entry in task["variants"]:
        entry["slices"] = [{"from": 0, "to": longest, "examples": 10, "base": 0.9, "converted": 0.9}]
    assert longest_input(task) == longest
    assert [row["length"] for row in measured["speed"]] == [128, 512]
    text = said(measured, task["variants"][0]["name"])
    assert ("the quality at longer inputs is not known" in text) is warned
    if warned:
        assert f"on inputs of fewer than {longest} tokens, speed at up to 512:" in text


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [("no loss", "good"), ("loss within margin", "even"), ("loss beyond margin", "bad"), ("inconclusive", "even")],
)
def test_a_loss_looks_like_what_it_is(measured, verdict, tone):
    (task,) = measured["quality"]
    entry = task["variants"][0]
    entry["verdict"] = verdict
    (found,) = (answer for answer in answers(measured) if answer.name == entry["name"])
    (figure,) = (figure for figure in found.figures if "the speed" not in figure.label)
    assert figure.tone == tone


@pytest.mark.parametrize(
    ("interval", "verdict", "tone"),
    [
        ([1.4, 1.6], "faster", "good"),
        ([0.9, 1.6], "exact is better here", "even"),
        ([0.4, 0.6], "exact is better here", "bad"),
    ],
)
def test_a_speed_looks_like_what_it_is_and_is_that_of_the_longest_row(measured, interval, verdict, tone):
    name = measured["speed"][-1]["variants"][0]["name"]
    measured["speed"][-1]["variants"][0] |= {"ratio": 1.5, "interval": interval, "verdict": verdict}
    (found,) = (answer for answer in answers(measured) if answer.name == name)
    assert (found.figures[0].value, found.figures[0].tone) == ("1.50×", tone)
    assert found.figures[0].label == "the speed of exact attention at 512 tokens"
