import os
from pathlib import Path

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.pipeline.store import Submitit, choose
from tiny_work import work


def collected(executor, items, **more) -> dict:
    return dict(executor.map(work, items, **more))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Put the tests' folder on the path of child processes."""
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))


@pytest.mark.slow
def test_local_isolates_items_that_fail_or_kill_their_process(tmp_path):
    executor = choose("local", jobs=2, options={}, folder=tmp_path)
    results = collected(executor, ["a", "dies", "b", "fails"])
    assert [results[item][0] for item in ("a", "b")] == ["a", "b"]
    assert os.getpid() not in {results[item][2] for item in ("a", "b")}
    assert isinstance(results["dies"], ApproxError)
    assert "Its process died" in str(results["dies"])
    assert str(results["fails"]) == "it fails"


@pytest.mark.slow
def test_local_runs_timed_items_alone_with_all_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    executor = choose("local", jobs=4, options={}, folder=tmp_path)
    together, alone = collected(executor, list("abcd")), collected(executor, ["a", "b"], alone=True)
    assert {result[1] for result in together.values()} == {2}
    assert {result[1] for result in alone.values()} == {8}
    assert len({result[2] for result in alone.values()}) == 1


@pytest.mark.slow
def test_stopping_early_leaves_no_process(tmp_path):
    import multiprocessing

    before = set(multiprocessing.active_children())
    results = choose("local", jobs=1, options={}, folder=tmp_path).map(work, ["a", "b", "c"])
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator
    assert set(multiprocessing.active_children()) <= before


def test_submitit_runs_jobs_and_reports_lost_ones(tmp_path):
    pytest.importorskip("submitit")
    executor = choose("submitit", jobs=2, options={"cluster": "local", "timeout_min": 5}, folder=tmp_path / "jobs")
    results = collected(executor, ["a", "fails"])
    assert results["a"][:2] == ("a", max(1, torch.get_num_threads() // 2))
    assert "it fails" in str(results["fails"])


def test_submitit_leaves_this_process_its_environment(tmp_path):
    pytest.importorskip("submitit")
    before = dict(os.environ)
    executor = choose("submitit", jobs=1, options={"cluster": "local", "timeout_min": 5}, folder=tmp_path / "jobs")
    assert collected(executor, ["a"])["a"][0] == "a"
    assert dict(os.environ) == before


def test_a_slurm_job_has_a_default_name_and_time_limit(tmp_path, monkeypatch):
    """Uses a fake SLURM that rejects jobs and stores their scripts."""
    submitit = pytest.importorskip("submitit")
    for command in ("sbatch", "srun"):
        (tmp_path / command).write_text('#!/bin/sh\ncp "$1" "$0.given"\nexit 1\n')
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for options, expected in (({}, ("approx-sweep", 240)), ({"name": "mine", "timeout_min": 7}, ("mine", 7))):
        with pytest.raises(submitit.core.utils.FailedJobError):
            collected(Submitit(None, options, tmp_path / "jobs"), ["a"])
        script = tmp_path / "sbatch.given"
        assert {f"#SBATCH --job-name={expected[0]}", f"#SBATCH --time={expected[1]}"} <= set(
            script.read_text().splitlines()
        )


def test_rejects_unknown_executors_and_options(tmp_path, monkeypatch):
    def refused(name: str, **options) -> tuple[int, str]:
        with pytest.raises(ApproxError) as caught:
            collected(choose(name, jobs=None, options=options, folder=tmp_path), ["a"])
        return caught.value.exit_code, str(caught.value)

    assert "allowed are local, submitit" in refused("slurm")[1]
    assert "local takes --jobs only" in refused("local", slurm_partition="cpu")[1]
    monkeypatch.setattr("approx.pipeline.store.find_spec", lambda name: None)
    code, text = refused("submitit")
    assert (code, "pip install 'submitit>=" in text) == (Exit.MISSING, True)


def test_submitit_without_slurm_or_with_a_mistyped_option_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ApproxError, match="sbatch is not installed") as caught:
        collected(Submitit(None, {}, tmp_path), ["a"])
    assert caught.value.exit_code == Exit.MISSING
    with pytest.raises(ApproxError, match=r"Submitit rejects --set-executor: .*partitoin"):
        collected(Submitit(None, {"cluster": "local", "slurm_partitoin": "cpu"}, tmp_path), ["a"])
