"""Hundreds of hostile calls of all public ops, in a process that may die of them: refused with a ValueError, or right."""

import pytest

from fuzz import calls
from fuzz.cases import Case
from fuzz.workers import workers

KIND = "arguments of ops"
COUNT = 300


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "place"
    place.mkdir()
    calls.write(place / "calls")
    with workers(place, 1, reloads=False) as (one,):
        yield one


@pytest.mark.parametrize("name", calls.CALLS)
def test_right_arguments_are_taken(worker, name, tmp_path):
    calls.write(tmp_path / "calls")
    target = f"calls/{name}.json"
    worker.ask(Case(KIND, target, (tmp_path / target).read_bytes()))
    assert worker.answer()[1].status == "read"


def test_hostile_arguments_are_refused_or_give_what_plain_pytorch_gives(worker):
    failed = []
    for number in range(COUNT):
        worker.ask((KIND, 0, number))
        case, verdict = worker.answer()
        failed += [(case, verdict)] if verdict.status == "failed" else []
    assert failed == []


def test_every_public_op_is_called():
    assert {op for op, _ in calls.CALLS.values()} == set(calls.OPS)
