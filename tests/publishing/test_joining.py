"""Records of the same models give one answer; others stay apart, with the reason."""

from typing import Any

import pytest

from approx.errors import ApproxError
from approx.evaluation.record import Record
from approx.publishing.report import html, markdown
from approx.publishing.summary import apart, hindrance, joined, recommendation
from typed import record_of


@pytest.fixture
def halves(record) -> tuple[dict[str, Any], dict[str, Any]]:
    """Quality and speed of the same models, which the second record names otherwise."""
    quality, speed = record | {"speed": [], "crossover": []}, record | {"quality": [], "title": "Speed"}
    for one in (quality, speed):
        one["checkpoint"] = one["checkpoint"] | {"weights_sha256": "b" * 64}
        one["variants"] = [variant | {"weights_sha256": "c" * 64} for variant in one["variants"]]
    speed["variants"] = [variant | {"name": f"my {variant['name']}"} for variant in speed["variants"]]
    for part in ("speed", "crossover"):
        speed[part] = [dict(row) for row in speed[part]]
    for row in speed["speed"]:
        row["variants"] = [entry | {"name": f"my {entry['name']}"} for entry in row["variants"]]
    for entry in speed["crossover"]:
        entry["name"] = f"my {entry['name']}"
    return quality, speed


def test_quality_and_speed_of_the_same_models_are_one_answer_in_either_order(halves, record):
    quality, speed = map(record_of, halves)
    for order in ((quality, speed), (speed, quality)):
        (made,) = joined(order)
        assert len(made.variants) == len(record["variants"])
        assert (len(made.quality), len(made.speed)) == (len(record["quality"]), len(record["speed"]))
        named = {variant.name for variant in made.variants}
        assert {entry.name for row in made.speed for entry in row.variants} <= named
        assert {entry.name for task in made.quality for entry in task.variants} <= named
        assert {entry.name for entry in made.crossover} <= named
        assert "a ring marks" in html([made])
        assert not any("was not measured" in line for line in recommendation(made)[:1])
    # What the two halves say together is what one record with both says.
    assert recommendation(joined((quality, speed))[0]) == recommendation(record_of(record))


def _weights(speed: dict[str, Any]) -> None:
    speed["variants"] = [variant | {"weights_sha256": "d" * 64} for variant in speed["variants"]]


def _plan(speed: dict[str, Any]) -> None:
    layers = [{"layer": 0, "mechanism": "linear", "settings": {}}]
    speed["variants"] = [variant | {"layers": layers} for variant in speed["variants"]]


def _runtime(speed: dict[str, Any]) -> None:
    speed["variants"] = [variant | {"runtime": "onnxruntime 1.32.0, int8"} for variant in speed["variants"]]


def _base(speed: dict[str, Any]) -> None:
    speed["checkpoint"] = speed["checkpoint"] | {"layers": 99}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_weights, "the same plan, but not the same weights"),
        (_plan, "the same weights, but not the same plan"),
        (_runtime, "run in PyTorch, and in onnxruntime 1.32.0, int8"),
        (_base, "their bases differ"),
        (lambda speed: speed.update(variants=[]), "no converted model"),
    ],
)
@pytest.mark.sample(3)
def test_unrelated_records_stay_separate_and_the_page_says_why(halves, change, reason):
    quality, speed = halves
    change(speed)
    made = joined([record_of(quality), record_of(speed)])
    assert len(made) == 2
    assert all(reason in line for lines in apart(made) for line in lines)
    assert f"Apart from Speed: {hindrance(*made)}." in html(made)
    assert reason in markdown(made)


def test_scores_and_speeds_of_the_same_inputs_are_not_mixed(halves):
    quality, speed = map(record_of, halves)
    again = quality.model_copy(update={"title": "again"})
    assert "both have scores of glue/mrpc" in str(hindrance(quality, again))
    assert len(joined([quality, again])) == 2
    assert "both have speeds at" in str(hindrance(speed, speed.model_copy(update={"seed": 7})))
    other = speed.model_copy(update={"environment": speed.environment | {"processor": "another"}})
    assert "different machines" in str(hindrance(speed, other))
    rebased = quality.checkpoint.model_copy(update={"weights_sha256": "e" * 64})
    assert "different bases" in str(hindrance(quality, again.model_copy(update={"checkpoint": rebased})))


def test_the_machine_of_a_joined_record_is_that_of_its_speeds_and_the_base_that_of_its_scores(halves):
    quality, speed = map(record_of, halves)
    speed = speed.model_copy(update={"environment": speed.environment | {"processor": "timed here"}})
    quality = quality.model_copy(
        update={"checkpoint": quality.checkpoint.model_copy(update={"name": "compared with this"})}
    )
    for order in ((quality, speed), (speed, quality)):
        (made,) = joined(order)
        assert made.environment["processor"] == "timed here"
        assert made.checkpoint.name == "compared with this"


def test_joins_records_through_a_third(halves):
    """Two records share one model each with a third, and nothing with each other."""
    quality, speed = map(record_of, halves)
    first, rest = quality.variants[:1], quality.variants[1:]

    def only(variants: list, number: int) -> Record:
        names = {variant.name for variant in variants}
        records = [
            task.model_copy(
                update={"task": f"task {number}", "variants": [v for v in task.variants if v.name in names]}
            )
            for task in quality.quality
        ]
        return quality.model_copy(update={"title": f"{number}", "variants": variants, "quality": records})

    assert len(joined([only(first, 1), only(rest, 2)])) == 2
    assert len(joined([only(first, 1), only(rest, 2), speed])) == 1


def test_refuses_the_same_record_twice(record):
    with pytest.raises(ApproxError, match="given twice"):
        joined([record_of(record), record_of(record)])
