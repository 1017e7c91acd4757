"""Holm over tasks: within a record by variant, over records that are read together by plan; and the seed of resampling."""

import numpy as np
import pytest

from approx.evaluation.evaluate import Subject, evaluate
from approx.evaluation.quality import over_records, over_tasks
from approx.tasks import open_task
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
