"""Every damaged file that `make fuzz` ever found a defect with is refused or read."""

import pytest

from fuzz import workers
from fuzz.cases import FOUND, read
from fuzz.place import made

CASES = read(FOUND)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with workers.workers(made(tmp_path_factory.mktemp("fuzz") / "place"), 1) as (one,):
        yield one


def test_there_are_cases():
    assert len(CASES) > 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.target}")
@pytest.mark.sample(6)
def test_what_was_found_is_refused_or_read(case, worker):
    worker.ask(case)
    assert worker.answer()[1].status in ("read", "refused")
