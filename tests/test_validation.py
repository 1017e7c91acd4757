"""Validation of plain data: every mistake is a sentence with its place."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from approx.errors import ApproxError
from approx.validation import Count, Counts, Mistake, Model, build, error_lines, salvage, validate
from approx.yaml_text import load


class Inner(Model):
    size: Annotated[Count, Field(examples=[8])]
    kind: Literal["near", "far"] = "near"
    more: dict[str, Any] = Field(default_factory=dict)


class Outer(Model):
    title: str
    inner: list[Inner] = Field(default_factory=list)
    named: dict[str, Inner] = Field(default_factory=dict)
    batch: Count | Literal["auto"] = 1
    counts: Counts = Field(default_factory=lambda: [1])
    share: Annotated[float, Field(ge=0)] = 0.5
    pair: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.0, 1.0])


@pytest.mark.parametrize(
    ("data", "sentences"),
    [
        ({}, ["x: the key 'title' is missing."]),
        ({"title": 3}, ["x.title: text is needed, found 3."]),
        ({"title": "a", "inner": {}}, ["x.inner: a list is needed, found {}."]),
        ({"title": "a", "inner": [{}]}, ["x.inner[0]: the key 'size' is missing. Example: size: 8"]),
        ({"title": "a", "inner": [{"size": True}]}, ["x.inner[0].size: a whole number is needed, found True."]),
        (
            {"title": "a", "named": {"b": {"size": 1, "kid": "far"}}},
            ["x.named.b: unknown key 'kid'. Did you mean 'kind'? Known: size, kind, more."],
        ),
        (
            {"title": "a", "named": {"b": {"size": 1, "kind": "nera"}}},
            ["x.named.b.kind: one of near, far is needed, found 'nera'. Did you mean 'near'?"],
        ),
        ({"title": "a", "named": {3: {"size": 1}}}, ["x.named: names must be text, found 3. Put it in quotes."]),
        ({"title": "a", 4: 5}, ["x: names must be text, found 4. Put it in quotes."]),
        ({"title": "a", "batch": "many"}, ["x.batch: a whole number or auto is needed, found 'many'."]),
        ({"title": "a", "counts": 0}, ["x.counts: a finite number of at least 1 is needed, found 0."]),
        ({"title": "a", "counts": []}, ["x.counts: at least one is needed, found []."]),
        ({"title": "a", "pair": [1.0]}, ["x.pair: a list of at least 2 is needed, found [1.0]."]),
        ({"title": "a", "share": float("nan")}, ["x.share: a finite number is needed, found nan."]),
        ("a", ["x: a mapping of keys and values is needed, found 'a'."]),
    ],
)
def test_a_mistake_names_place_value_and_expectation(data, sentences):
    made, mistakes = validate(Outer, data, "x")
    assert made is None
    assert [one.text for one in mistakes] == sentences


def test_builds_valid_data_and_reads_a_single_value_as_a_list():
    made, mistakes = validate(Outer, {"title": "a", "counts": 3, "share": 1, "inner": [{"size": 2}]}, "x")
    assert mistakes == []
    assert made == Outer(title="a", counts=[3], share=1.0, inner=[Inner(size=2)])


def test_keeps_the_valid_part_of_invalid_data():
    data = {
        "titel": "a",
        "inner": [{"size": 0}, {"size": 2, "kind": 1}, {}, {"size": 3}],
        "counts": [0, 4, 0],
        "batch": None,
    }
    made, mistakes = salvage(Outer, data, "x", {"title": ""})
    assert made == Outer(title="", inner=[Inner(size=2), Inner(size=3)], counts=[4])
    assert len(mistakes) == 8
    assert data["counts"] == [0, 4, 0]


def test_salvages_nothing_from_a_wholly_invalid_file():
    made, mistakes = salvage(Outer, {1: 2, "title": [], "inner": 3, "counts": [0]}, "x", {"title": ""})
    assert made == Outer(title="")
    assert len(mistakes) == 4


def test_mistakes_follow_the_order_of_the_file():
    document = load("b: 1\na:\n  - c: 2\n    c: 3\n")
    mistakes = [Mistake(("a", 0, "c"), "x.a[0].c: late."), Mistake(("b",), "x.b: early.")]
    assert error_lines(mistakes, "f.yaml", document) == [
        "f.yaml, line 1, x.b: early.",
        "f.yaml, line 3, x.a[0].c: late.",
        "f.yaml, line 4, the key 'c' is given twice. Keep one of them.",
    ]
    assert error_lines(mistakes, "f.yaml") == ["f.yaml, x.a[0].c: late.", "f.yaml, x.b: early."]


def test_keywords_have_the_same_messages():
    with pytest.raises(
        ApproxError, match=r"(?s)^x: unknown key 'titel'. Did you mean 'title'.*x.share: a finite number"
    ):
        build(Outer, "x", titel="a", share=-1)
