"""Holm over tasks, by variant within a record and by plan over several records; and the seed of resampling."""

from typing import Any

import pytest

from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.inputs import Coverage
from approx.evaluation.quality import Compared, compare, over_records, over_tasks
from approx.evaluation.record import BaseQuality, Quality, QualityVariant, Record
from approx.tasks import Example, open_task
from tiny_classifier import tiny_model, tiny_tokenizer
from typed import known, part_of


def task(**p_values) -> Quality:
    return part_of(Quality, variants=[{"name": name, "p_value": value} for name, value in p_values.items()])


def adjusted(quality: list[Quality]) -> list[list[float | None]]:
    return [[entry.p_adjusted for entry in one.variants] for one in quality]


def test_each_variant_has_its_tasks_and_one_task_needs_no_raising():
    quality = [task(a=0.01, b=0.5), task(a=0.04), task(c=0.2, a=0.03)]
    assert adjusted(over_tasks(quality)) == [
        [pytest.approx(0.03), None],
        [pytest.approx(0.06)],
        [None, pytest.approx(0.06)],
    ]
    assert "p_adjusted" not in quality[0].variants[0].model_fields_set


def record(mechanism: str, name: str, *quality: Quality) -> Record:
    variants = [{"name": name, "layers": [{"layer": 0, "mechanism": mechanism}]}]
    return part_of(Record, variants=variants, quality=list(quality))


def test_records_that_are_read_together_share_a_family_where_the_plan_is_the_same():
    records = [
        record("local", "first", task(first=0.01)),
        record("linear", "first", task(first=0.01)),
        record("local", "second", task(second=0.04), task(second=0.5)),
    ]
    adjusted_values = [adjusted(one.quality) for one in over_records(records)]
    assert adjusted_values == [[[pytest.approx(0.03)]], [[None]], [[pytest.approx(0.08)], [0.5]]]
    assert over_records(records[:1]) == records[:1]


def test_the_seed_of_an_evaluation_decides_its_resampling_and_nothing_else(tmp_path):
    rows = [f"{row}\t{'good ' * (row % 9)}film\tfine\t{row % 5}\n" for row in range(40)]
    (tmp_path / "dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(rows))
    subjects = {name: Subject(name, tiny_model(1), tiny_tokenizer()) for name in ("exact", "other")}

    def variant(seed: int) -> QualityVariant:
        return evaluate(subjects, open_task("glue/stsb"), data=tmp_path / "dev.tsv", seed=seed).variants[0]

    first, other = variant(1), variant(2)
    assert variant(1) == first
    assert first.difference == other.difference
    assert first.interval != other.interval


@pytest.mark.parametrize("name", ["glue/mrpc", "lm", "librispeech/dev-clean"])
def test_equal_predictions_leave_an_interval_above_zero(name):
    """Thirty examples without a change cannot exclude that one in ten is lost, whatever the metric."""
    predicted: list[Any] = [0, 1, 1] * 10
    labels: list[Any] = [row % 2 for row in range(30)]
    if name == "lm":
        predicted = [{"loss": 2.0 + row % 3, "count": 4, "places": {"1": [2.0 + row % 3, 4]}} for row in range(30)]
        labels = [20] * 30
    elif name.startswith("librispeech"):
        predicted, labels = ["A B C D E X"] * 30, ["A B C D E F"] * 30
    examples = [Example(str(row), {}, label) for row, label in enumerate(labels)]
    entry = compare(open_task(name), examples, [20] * 30, {"a": predicted, "b": predicted}, margin=0.01, seed=0)
    low, high = known(entry.variants[0].interval)
    assert low < -0.05 or high > 0.05
    assert entry.variants[0].difference == 0.0
    assert entry.variants[0].verdict in ("inconclusive", "the base is at chance")
    low, high = known(entry.base.interval)
    assert low < high


def test_examples_of_few_groups_have_no_interval_and_one_for_each_is_no_group():
    labels = ["A B C D"] * 24
    task = open_task("librispeech/dev-clean")

    def entry(speakers: int) -> Compared:
        examples = [Example(str(row), {}, label, group=str(row % speakers)) for row, label in enumerate(labels)]
        return compare(task, examples, [9] * 24, {"exact": labels, "same": labels}, margin=0.01, seed=0)

    few = entry(3)
    assert (few.groups, few.grouped_by) == (3, "speaker")
    assert (few.base.interval, few.variants[0].interval, few.variants[0].verdict) == (None, None, "inconclusive")
    assert entry(6).variants[0].interval is not None
    assert (entry(24).groups, entry(24).grouped_by) == (None, None)


def test_an_entry_holds_each_figure_under_its_own_name():
    labels, base = [1, 0] * 10, [1, 0] * 9 + [1, 1]
    examples = [Example(str(row), {}, label) for row, label in enumerate(labels)]
    lengths = [9] * 8 + [20] * 12
    covered = {"other": Coverage([True] * 5 + [False] * 15, 0.25, 0.5)}
    predictions = {"exact": base, "other": [0, 0, *base[2:]]}
    entry = compare(open_task("glue/sst2"), examples, lengths, predictions, margin=0.02, seed=0, covered=covered)
    (scored,) = entry.variants
    low, high = known(entry.base.interval)
    assert low < 0.95 < high
    assert entry == Compared(
        metric="accuracy",
        fraction=True,
        lower_is_better=False,
        sliced_by="tokens",
        slice_metric="accuracy",
        chance=0.5,
        groups=None,
        grouped_by=None,
        stake=1.0,
        base=BaseQuality(scores={"accuracy": 0.95}, interval=[low, high], at_chance=False),
        variants=[scored],
    )
    variant = scored.to_data()
    low, high = variant.pop("interval")
    assert low < -0.05 < high
    assert variant.pop("needed_examples") > 20
    assert variant == {
        "name": "other",
        "scores": {"accuracy": 0.9},
        "difference": pytest.approx(-0.05),
        "confidence": 0.95,
        "test": "exact McNemar",
        "p_value": 1.0,
        "margin": 0.02,
        "verdict": "inconclusive",
        "approximated": {"examples": 5, "tokens": 0.25, "pairs": 0.5},
        "rare": pytest.approx(1 - 0.025**0.05),
        "carried": None,
        "slices": [
            {"from": 0, "to": 16, "examples": 8, "base": 1.0, "converted": 0.875},
            {"from": 16, "to": 32, "examples": 12, "base": pytest.approx(11 / 12), "converted": pytest.approx(11 / 12)},
        ],
        "at_chance": False,
        "worst": [
            {
                **{"id": "0", "input": "", "target": "positive", "base": "positive", "converted": "negative"},
                **{"base_score": 1.0, "converted_score": 0.0},
            }
        ],
    }


def test_a_rise_is_a_loss_where_lower_scores_are_better():
    labels = ["a b c d"] * 40
    worse = ["a b c x" if row % 2 else "a b c d" for row in range(40)]
    examples = [Example(str(row), {}, label, group=str(row // 2)) for row, label in enumerate(labels)]
    task = open_task("librispeech/dev-clean")
    entry = compare(task, examples, [9] * 40, {"exact": labels, "worse": worse}, margin=0.01, seed=0)
    assert (entry.metric, entry.lower_is_better, entry.groups) == ("wer", True, 20)
    assert entry.variants[0].difference == pytest.approx(0.125)
    assert entry.variants[0].verdict == "loss beyond margin"


def test_answers_written_freely_are_correct_or_wrong_and_no_constant_is_right():
    numbers = [f"{number:05d} at {number % 5 * 25} %" for number in range(20)]
    wrong = [number if row % 5 else "the sky at 0 %" for row, number in enumerate(numbers)]
    examples = [Example(f"passkey/{row}", {}, number) for row, number in enumerate(numbers)]
    entry = compare(open_task("passkey"), examples, [9] * 20, {"exact": numbers, "half": wrong}, margin=0.01, seed=0)
    assert (entry.chance, entry.variants[0].at_chance) == (None, False)
    assert entry.variants[0].test == "exact McNemar"
    assert entry.variants[0].p_value == pytest.approx(2 * 0.5**4)


def test_models_that_are_no_better_than_a_constant_are_at_chance():
    labels = [0, 1] * 30
    examples = [Example(str(row), {}, label) for row, label in enumerate(labels)]
    predictions = {"exact": labels, "constant": [1] * 60}
    entry = compare(open_task("glue/sst2"), examples, [9] * 60, predictions, margin=0.01, seed=0)
    assert (entry.chance, entry.base.at_chance, entry.variants[0].at_chance) == (0.5, False, True)
    silent = compare(
        open_task("librispeech/dev-clean"),
        [Example(str(row), {}, "A B") for row in range(8)],
        [9] * 8,
        {"exact": [""] * 8, "good": ["A B"] * 8},
        margin=0.01,
        seed=0,
    )
    assert (silent.chance, silent.base.at_chance, silent.variants[0].at_chance) == (1.0, True, False)
    assert silent.variants[0].verdict == "the base is at chance"


def worst(name: str, labels: list[Any], base: list[Any], other: list[Any], inputs: list[dict[str, Any]] | None = None):
    examples = [Example(f"e{row}", (inputs or [{}] * len(labels))[row], label) for row, label in enumerate(labels)]
    predictions = {"exact": base, "other": other}
    compared = compare(open_task(name), examples, [20] * len(labels), predictions, margin=0.01, seed=0)
    return compared.variants[0].worst


def test_the_worst_examples_are_those_that_were_lost_in_words_and_at_most_ten():
    inputs = [{"text": f"film {row}\n is \ud800 " + "long " * 80 * (row == 3)} for row in range(30)]
    labels = [1, 0] * 15
    # Example 0 was wrong before and is right now; example 1 stays wrong.
    found = worst("glue/sst2", labels, [0, 1, *labels[2:]], [1, 1, *(1 - label for label in labels[2:])], inputs)
    assert [one.id for one in found] == [f"e{row}" for row in range(2, 12)]
    assert found[0].input == "film 2 is ?"
    assert (found[0].target, found[0].base, found[0].converted) == ("positive", "positive", "negative")
    assert (found[0].base_score, found[0].converted_score) == (1.0, 0.0)
    assert len(found[1].input) <= 241
    assert found[1].input.endswith("…")
    assert worst("glue/sst2", labels, labels, labels) == []


def test_the_worst_examples_of_losses_have_no_predictions_but_scores_and_the_stretch_as_input():
    inputs = [{"text": "a fine film. a bad film.", "start": 12 * row, "end": 12 * row + 12} for row in range(2)]
    losses = [[{"loss": loss, "count": 4, "places": {"1": [loss, 4]}} for loss in both] for both in ((8, 8), (12, 10))]
    first, second = worst("lm", [12, 12], losses[0], losses[1], inputs)
    assert (first.input, second.input) == ("a fine film.", "a bad film.")
    assert (first.target, first.base, first.converted) == ("", "", "")
    assert known(first.base_score) < known(second.converted_score) < known(first.converted_score)


def test_the_worst_examples_of_a_score_that_one_has_not_are_those_that_cost_the_whole_most():
    numbers = [float(row) for row in range(10)]
    first, second = worst("glue/stsb", numbers, numbers, [9.0, *numbers[1:4], 5.0, *numbers[5:]])
    assert (first.id, first.target, first.base, first.converted) == ("e0", "0", "0", "9")
    assert (second.id, second.base_score, second.converted_score) == ("e4", None, None)


def test_the_worst_answers_are_shown_beside_the_reference_answers_and_the_text_around_them():
    inputs = [{"question": "Who?", "context": "x " * 200 + "It was Ada.", "answer_start": 407}] * 2
    (found,) = worst("squad", [["Ada", "Ada", "ada L."]] * 2, ["Ada", "Ada"], ["Ada", "x x"], inputs)
    assert (found.id, found.target, found.base, found.converted) == ("e1", "Ada / ada L.", "Ada", "x x")
    assert found.input.startswith("Who? | … x x")
    assert found.input.endswith("It was Ada.")
