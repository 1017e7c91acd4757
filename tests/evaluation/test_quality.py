"""Holm over tasks: within a record by variant, over records that are read together by plan."""

import pytest

from approx.evaluation.quality import over_records, over_tasks


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
