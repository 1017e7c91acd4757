"""The summary of a report: figures and their tones, and warnings about missing measurements."""

import copy

import pytest

from approx.evaluation.record import Quality
from approx.publishing.summary import Figure, answers, figures, longest_input
from typed import part_of, record_of


def said(record: dict, name: str) -> str:
    (answer,) = (answer for answer in answers(record_of(record)) if answer.name == name)
    return " ".join(answer.sentences)


@pytest.fixture
def measured(record) -> dict:
    """A record of one task with a given verdict, and speeds at 128 and 512 tokens."""
    record = copy.deepcopy(record)
    record["quality"] = record["quality"][:1]
    record["speed"] = [row for row in record["speed"] if row["batch"] == record["speed"][0]["batch"]][:2]
    return record


@pytest.mark.parametrize(("longest", "warned"), [(100, True), (511, True), (512, True), (513, False), (4000, False)])
def test_warns_of_speeds_at_lengths_without_quality(measured, longest, warned):
    (task,) = measured["quality"]
    for entry in task["variants"]:
        entry["slices"] = [{"from": 0, "to": longest, "examples": 10, "base": 0.9, "converted": 0.9}]
    assert longest_input(part_of(Quality, **task)) == longest
    assert [row["length"] for row in measured["speed"]] == [128, 512]
    text = said(measured, task["variants"][0]["name"])
    assert ("the quality on longer inputs is unknown" in text) is warned
    if warned:
        assert f"on inputs of fewer than {longest} tokens, speed at up to 512:" in text


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [("no loss", "good"), ("loss within margin", "even"), ("loss beyond margin", "bad"), ("inconclusive", "even")],
)
def test_a_loss_has_the_tone_of_its_verdict(measured, verdict, tone):
    (task,) = measured["quality"]
    entry = task["variants"][0]
    entry["verdict"] = verdict
    (figure,) = (one for one in figures(record_of(measured), entry["name"]) if "accuracy" in one.label)
    assert figure.tone == tone


@pytest.mark.parametrize(
    ("interval", "verdict", "tone"),
    [
        ([1.4, 1.6], "faster", "good"),
        ([0.9, 1.3], "no clear gain", "even"),
        ([0.45, 0.6], "slower", "bad"),
    ],
)
def test_shows_the_speed_of_the_longest_row_in_the_tone_of_its_verdict(measured, interval, verdict, tone):
    name = measured["speed"][-1]["variants"][0]["name"]
    measured["speed"][-1]["variants"][0] |= {"ratio": 1.5, "interval": interval, "verdict": verdict}
    first, *_ = figures(record_of(measured), name)
    assert (first.value, first.tone) == ("1.50×", tone)
    assert first.label.startswith("the speed of exact attention at 512 tokens (")


def test_the_figures_of_a_variant_are_its_speed_its_quality_and_its_share_of_the_ceiling(record):
    made = record_of(record)
    assert figures(made, "clustered 25") == [
        Figure("1.80×", "the speed of exact attention at 2,048 tokens (1.75 to 1.86)", "good"),
        Figure("+1.2", "points of f1 on glue/mrpc (−1.0 to 3.0): inconclusive", "even"),
        Figure("78 %", "of the ceiling, 2.30× without any attention", "even"),
    ]
    # Its longest lengths are out of memory.
    first, *_ = figures(made, "local <128> $x$")
    assert first == Figure("1.34×", "the speed of exact attention at 1,024 tokens (1.30 to 1.38)", "good")
    assert figures(made, "reservoir") == []
    assert [answer.verified for answer in answers(made)] == [True, True, False, True, True]


def test_a_variant_without_a_ratio_gets_no_advice(measured):
    for row in measured["speed"]:
        row["variants"][0] |= {"ratio": None, "interval": None}
    (answer,) = (answer for answer in answers(record_of(measured)) if answer.name == "improved-clustered 25")
    assert answer.sentences[0] == "On CPU, float32, 2 threads, batch 1: not measured."


def test_each_setting_has_a_sentence_and_the_first_has_the_figure(measured):
    measured["speed"] += [row | {"batch": 8} for row in measured["speed"]]
    (answer,) = (answer for answer in answers(record_of(measured)) if answer.name == "linear")
    assert [sentence.split(":")[0] for sentence in answer.sentences[:2]] == [
        "On CPU, float32, 2 threads, batch 1",
        "On CPU, float32, 2 threads, batch 8",
    ]
    assert [figure.value for figure in figures(record_of(measured), "linear")] == ["1.13×", "−38.6", "94 %"]


def test_the_longest_input_is_known_where_slices_are_by_length_or_tokens_were_counted(measured):
    (task,) = measured["quality"]
    assert longest_input(part_of(Quality, **task)) == 67
    assert longest_input(part_of(Quality, **task | {"variants": []})) is None
    assert longest_input(part_of(Quality, **task | {"sliced_by": "position"})) is None
    assert longest_input(part_of(Quality, **task | {"sliced_by": "position", "tokens": {"longest": 511}})) == 512


def test_does_not_warn_if_input_lengths_are_unknown(measured):
    measured["quality"] += [measured["quality"][0] | {"task": "other", "sliced_by": "position"}]
    assert "is unknown" not in said(measured, "improved-clustered 25")


def test_adds_notes_only_to_splits_with_several_scores(measured):
    (task,) = measured["quality"]
    task["notes"] = ["read to 512 tokens"]
    assert "on glue/sst2 (dev): " in said(measured, "linear")
    measured["quality"] += [task | {"split": "test"}]
    assert "on glue/sst2 (test): " in said(measured, "linear")
