"""Jobs in separate processes: a contender that crashes or hangs is a row, and all the others are measured."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny_work
from bench.gpu_workers import UNFINISHED, Job, carry_out


def run(tmp_path, jobs, *, seconds=300.0, silence=60.0, lanes=2):
    """The last result of each job, all that were kept, and the jobs that were left."""
    stored: dict[str, dict[str, Any]] = {}
    every: list[dict[str, Any]] = []

    def keep(job, result):
        stored[job.id] = result
        every.append(result)

    how = {"lanes": lanes, "deadline": time.monotonic() + seconds, "silence": silence, "log": tmp_path / "log"}
    return stored, every, carry_out(jobs, tiny_work.rows, keep, **how)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_contenders_that_die_at_random_cost_only_their_own_rows(tmp_path, seed):
    draw = random.Random(seed)
    names = [f"{'dies' if draw.random() < 0.4 else 'lives'} {place}" for place in range(12)]
    stored, every, left = run(tmp_path, [Job("race", {"names": names}), Job("other", {"names": ["lives"]})])
    assert left == []
    status = {row["name"]: row["status"] for row in stored["race"]["contenders"]}
    lost = "its process ended with exit code -9"
    assert status == {name: "ok" if name.startswith("lives") else lost for name in names}
    assert UNFINISHED not in stored["race"]
    # Each row was kept as soon as it was there.
    sizes = [len(one["contenders"]) for one in every if len(one.get("contenders", ())) > 1]
    assert sizes == sorted(sizes)
    assert [row["status"] for row in stored["other"]["contenders"]] == ["ok"]


@pytest.mark.slow
def test_a_contender_that_hangs_is_a_row_and_a_job_that_fails_keeps_its_rows(tmp_path):
    jobs = [Job("one", {"names": ["a", "hangs", "b"]}), Job("two", {"names": ["c", "fails", "d"]})]
    stored, _, left = run(tmp_path, jobs, silence=4.0, lanes=1)
    assert left == []
    assert {row["name"]: row["status"] for row in stored["one"]["contenders"]} == {
        "a": "ok",
        "hangs": "it did not end within 4 s",
        "b": "ok",
    }
    assert stored["two"]["error"] == "ValueError: it fails"
    assert [row["name"] for row in stored["two"]["contenders"]] == ["c"]


@pytest.mark.slow
def test_stores_rows_until_the_deadline_and_then_stops(tmp_path):
    jobs = [Job("one", {"names": ["a", "hangs"]}), Job("two", {"names": ["b"]})]
    stored, _, left = run(tmp_path, jobs, seconds=8.0, lanes=1)
    assert [job.id for job in left] == ["one", "two"]
    assert stored["one"][UNFINISHED]
    assert [row["name"] for row in stored["one"]["contenders"]] == ["a"]


def test_processes_share_the_imports_of_a_checkout_that_is_not_installed(tmp_path):
    here = Path(__file__).resolve().parent
    # The parent of the processes starts in another folder, and none of these is in its environment.
    script = (
        f"import sys; sys.path += [{str(here)!r}, {str(here.parent)!r}, {str(here.parent / 'kernels')!r}]\n"
        "import json, time; from pathlib import Path\n"
        "import tiny_work; from bench.gpu_workers import Job, carry_out\n"
        "kept = []\n"
        "carry_out([Job('a', {}), Job('b', {})], tiny_work.importer, lambda job, result: kept.append(result), lanes=2,"
        " deadline=time.monotonic() + 60, silence=60, log=Path('log'), preload=('tiny_work',))\n"
        "print(json.dumps(kept))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(made.stdout) == [{"imported here": False}] * 2
