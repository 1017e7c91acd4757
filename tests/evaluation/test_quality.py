"""Holm over tasks: within a record by variant, over records that are read together by plan; and the seed of resampling."""

import numpy as np
import pytest

from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.quality import compare, over_records, over_tasks
from approx.tasks import Example, open_task
from tiny_classifier import tiny_model, tiny_tokenizer


def task(**p_values):
    return {"variants": [{"name": name, "p_value": value} for name, value in p_values.items()]}


def adjusted(quality):
    return [[entry["p_adjusted"] for entry in one["variants"]] for one in quality]


def test_each_variant_has_its_tasks_and_one_task_needs_no_raising():
    quality = [task(a=0.01, b=0.5), task(a=0.04), task(c=0.2, a=0.03)]
    assert adjusted(over_tasks(quality)) == [
        [pytest.approx(0.03), None],
        [pytest.approx(0.06)],
        [None, pytest.approx(0.06)],
    ]
    assert "p_adjusted" not in quality[0]["variants"][0]


def record(mechanism, name, *quality):
    return {"variants": [{"name": name, "layers": [{"layer": 0, "mechanism": mechanism}]}], "quality": list(quality)}


def test_records_that_are_read_together_share_a_family_where_the_plan_is_the_same():
    records = [
        record("local", "first", task(first=0.01)),
        record("linear", "first", task(first=0.01)),
        record("local", "second", task(second=0.04), task(second=0.5)),
    ]
    found = [adjusted(one["quality"]) for one in over_records(records)]
    assert found == [[[pytest.approx(0.03)]], [[None]], [[pytest.approx(0.08)], [0.5]]]
    assert over_records(records[:1]) == records[:1]


def test_the_seed_of_an_evaluation_decides_its_resampling_and_nothing_else(tmp_path):
    rows = [f"{row}\t{'good ' * (row % 9)}film\tfine\t{row % 5}\n" for row in range(40)]
    (tmp_path / "dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(rows))
    subjects = {name: Subject(name, tiny_model(1), tiny_tokenizer()) for name in ("exact", "other")}

    def found(seed: int) -> dict:
        return evaluate(subjects, open_task("glue/stsb"), data=tmp_path / "dev.tsv", seed=seed)["variants"][0]

    first, other = found(1), found(2)
    assert found(1) == first
    assert first["difference"] == other["difference"]
    assert not np.array_equal(first["interval"], other["interval"])


@pytest.mark.parametrize(("name", "certain"), [("glue/mrpc", False), ("lm", True)])
def test_equal_predictions_prove_no_loss_only_where_a_score_has_no_bounds(name, certain):
    """Of an F1 score examples not seen may change; without bounds nothing can be said of them."""
    said = (
        [{"loss": 2.0 + row % 3, "count": 4, "places": {"1": [2.0 + row % 3, 4]}} for row in range(30)]
        if certain
        else [0, 1, 1] * 10
    )
    examples = [Example(str(row), {}, 20 if certain else row % 2) for row in range(30)]
    found = compare(open_task(name), examples, [20] * 30, {"a": said, "b": said}, margin=0.01, seed=0)
    low, high = found["variants"][0]["interval"]
    assert (low == high == 0.0) is certain
