"""A variant with exact attention on nearly all inputs must not look good in any part of a report."""

import csv

import pytest

from approx.evaluation.record import Quality, QualityVariant
from approx.publishing import wording
from approx.publishing.plots import quality_figure
from approx.publishing.report import write_report
from approx.publishing.summary import answers, figures
from approx.publishing.tables import quality_table
from typed import part_of, record_of

NAME = "improved-clustered 25"
VERDICT = "not tested: exact on 95 % of these inputs"


@pytest.fixture
def untested(record) -> dict:
    """The record; the first variant approximates on 40 of 872 inputs, the second on a quarter, the third is unknown."""
    entries = record["quality"][0]["variants"]
    entries[0] |= {"verdict": VERDICT, "approximated": {"examples": 40, "tokens": 0.081, "pairs": 0.01}}
    entries[1] |= {"approximated": {"examples": 218, "tokens": 0.4, "pairs": 0.12}}
    entries[3] |= {"approximated": None}
    return record


def test_every_file_says_that_it_was_not_tested(untested, tmp_path):
    write_report([record_of(untested)], tmp_path)
    for name in ("report.md", "index.html", "report.json", "quality.csv"):
        assert VERDICT in (tmp_path / name).read_text("utf-8"), name
    first, second, third, *_ = csv.DictReader((tmp_path / "quality.csv").read_text("utf-8").splitlines())
    assert (first["verdict"], first["approximated_examples"], first["approximated_tokens"]) == (VERDICT, "40", "0.081")
    assert (second["approximated_examples"], third["approximated_examples"]) == ("218", "")
    text = (tmp_path / "report.md").read_text("utf-8")
    assert f"| {VERDICT} | 5 % of inputs, 1 % of pairs |" in text


def test_figure_and_colour_are_neutral(untested):
    made = record_of(untested)
    (table, _), (answer, other, *_) = map(quality_table, made.quality), answers(made)
    assert [row["tone"] for row in table["rows"]] == ["even", "even", "bad", "even"]
    assert [(one.value, one.tone) for one in figures(made, answer.name)[1:2]] == [("not tested", "even")]
    assert f"on glue/sst2 (dev): {VERDICT}." in " ".join(answer.sentences)
    assert "no loss" not in " ".join(answer.sentences)
    assert "attention is approximated on 25 % of inputs, 12 % of pairs." in " ".join(other.sentences)


def test_the_figure_of_quality_against_speed_leaves_it_out_and_says_so(untested):
    made = record_of(untested)
    drawn = quality_figure(made.quality[0], made.speed, made, "both")
    assert drawn is not None
    assert f"Not shown, because untested: {NAME}." in drawn[1]
    alone = made.quality[0].model_copy(update={"variants": made.quality[0].variants[:1]})
    assert quality_figure(alone, made.speed, made, "both") is None


def test_a_base_at_chance_is_not_praised_either():
    entry = part_of(QualityVariant, verdict="the base is at chance", interval=[-0.001, 0.001], difference=0.0)
    assert not wording.tested(entry)
    assert wording.tone(entry) == "even"
    assert wording.verdict(entry, part_of(Quality, metric="accuracy")) == "the base is at chance"


def test_a_verdict_has_the_colour_that_it_deserves():
    words = ("no loss", "loss within margin", "loss beyond margin", "inconclusive", VERDICT)
    assert [wording.tone(part_of(QualityVariant, verdict=word)) for word in words] == [
        "good",
        "even",
        "bad",
        "even",
        "even",
    ]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "unknown"),
        ({"approximated": None}, "–"),
        ({"approximated": {"examples": 0, "tokens": 0.0, "pairs": 0.0}}, "0 % of inputs, 0 % of pairs"),
        ({"approximated": {"examples": 1, "tokens": 0.9, "pairs": 0.004}}, "< 1 % of inputs, < 1 % of pairs"),
        ({"approximated": {"examples": 500, "tokens": 0.9, "pairs": 0.616}}, "50 % of inputs, 62 % of pairs"),
        ({"approximated": {"examples": 999, "tokens": 0.9, "pairs": 0.9999}}, "99 % of inputs, 99 % of pairs"),
        ({"approximated": {"examples": 1000, "tokens": 1.0, "pairs": 1.0}}, "100 % of inputs, 100 % of pairs"),
        ({"approximated": {"examples": 1000, "tokens": 1.0}}, "100 % of inputs, pairs not recorded"),
    ],
)
def test_shares_in_words(entry: dict, said: str):
    assert wording.approximated(part_of(QualityVariant, **entry), part_of(Quality, examples=1000)) == said


def test_speeds_are_beyond_quality_from_the_first_length_that_no_input_has(record):
    """The longest inputs have 66 tokens, so times at 67 tokens are of longer inputs."""
    row = record["speed"][0]
    for length, beyond in ((66, False), (67, True), (660, True)):
        answer = answers(record_of(record | {"speed": [row | {"length": length}]}))[0]
        assert ("the quality on longer inputs is unknown" in " ".join(answer.sentences)) == beyond


def test_groups_that_settle_a_verdict_are_as_many_more_as_examples():
    task = part_of(Quality, examples=200, groups=10)
    assert wording.needed(part_of(QualityVariant, needed_examples=1000), task) == "about 1,000 examples of 50 groups"


def test_no_difference_is_neither_a_loss_nor_a_gain():
    entry = part_of(QualityVariant, difference=0.0, interval=[-0.0001, 0.0001])
    assert wording.loss(entry, part_of(Quality, metric="accuracy")).startswith("scores the same")
