"""Jobs in separate processes: work that crashes or hangs is left out, and the rest is done."""

import time
from typing import Any

import pytest

import tiny_work
from bench.gpu_workers import Job, carry_out


@pytest.mark.slow
def test_jobs_go_on_without_what_kills_their_process_or_never_ends(tmp_path):
    kept = {}
    jobs = [
        Job("one", {"names": ["a", "dies", "hangs", "b"]}),
        Job("two", {"names": ["c"]}),
        Job("three", {"names": ["fails"]}),
    ]
    how: dict[str, Any] = {"lanes": 1, "deadline": time.monotonic() + 300, "silence": 4.0, "log": tmp_path / "log"}
    assert carry_out(jobs, tiny_work.stages, lambda job, result: kept.__setitem__(job.id, result), **how) == []
    assert kept["one"]["done"] == ["a", "b"]
    assert kept["one"]["without"] == {
        "dies": "its process ended with exit code -9",
        "hangs": "it did not end within 4 s",
    }
    assert kept["two"]["done"] == ["c"]
    assert kept["three"] == {"error": "ValueError: it fails"}
    late: dict[str, Any] = {**how, "deadline": time.monotonic() - 1}
    assert carry_out(jobs, tiny_work.stages, lambda job, result: None, **late) == jobs
