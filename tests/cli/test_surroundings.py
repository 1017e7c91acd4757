"""A home that is missing or read-only, a full cache folder, a clock that goes backwards: it works, or says one clear line."""

import errno
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from approx.errors import Exit
from approx.evaluation import record
from faults import failing, read_only
from tiny_study import tiny_recipe

from .conftest import call

ROOT = Path(__file__).resolve().parents[2]
TASK = ("--task", "glue/sst2", "--data")
STORED = "Outputs cannot be stored in "


def at_home(home: Path, *words: object) -> subprocess.CompletedProcess:
    """Run a command in a process with this home and no cache folder of its own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("APPROX_", "XDG_", "HF_"))}
    environment = {**variables, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_home_that_is_missing_is_made(base, converted, data, tmp_path):
    home = tmp_path / "new" / "home"
    done = at_home(home, "evaluate", converted, *TASK, data, "-o", "q.json")
    assert done.returncode == 0, done.stderr
    assert list((home / ".cache" / "approx" / "outputs").rglob("*.jsonl"))


@pytest.mark.slow
def test_runs_without_caches_if_no_home_can_be_made(base, converted, data, tmp_path):
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    done = at_home(home, "convert", base, "-o", "out", "-m", "linear", "--json")
    assert done.returncode == 0, done.stderr
    assert all(check["passed"] is not False for check in json.loads(done.stdout)["checks"])
    done = at_home(home, "evaluate", converted, *TASK, data, "-o", "q.json")
    assert (done.returncode, done.stderr.count(STORED)) == (0, 1), done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_read_only_home_outputs_are_not_stored(base, converted, data, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in ("APPROX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    with read_only(home):
        answer = call("evaluate", converted, *TASK, data, "-o", "q.json")
        assert (answer.code, answer.err.count(STORED)) == (Exit.OK, 1), answer
        assert "Read-only file system. The evaluation goes on" in answer.err
        assert call("convert", base, "-o", "out", "-m", "linear").code == Exit.OK
        assert call("run", tiny_recipe(tmp_path / "r.yaml", base, data), "-o", "run").code == Exit.OK
    assert list(home.iterdir()) == []
    record.load(Path("q.json"))


def test_warns_of_a_full_cache_folder_and_continues(converted, data, own_cache):
    with failing(own_cache, 1, errno.ENOSPC, for_ever=True):
        answer = call("evaluate", converted, *TASK, data, "-o", "q.json")
        assert (answer.code, answer.err.count(STORED)) == (Exit.OK, 1), answer
        assert "No space left on device" in answer.err
        record.load(Path("q.json"))


@pytest.mark.sample(0)
def test_a_clock_that_goes_backwards_changes_nothing(base, converted, data, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path / "r.yaml", base, data)
    assert call("run", recipe, "-o", "usual").code == Exit.OK
    # An hour at each look.
    clock = (2_000_000_000 - 3600.0 * hour for hour in itertools.count())
    monkeypatch.setattr(time, "time", lambda: next(clock))
    answer = call("run", recipe, "-o", "out")
    assert answer.code == Exit.OK, answer
    made, usual = (record.load(Path(name, "record.json")) for name in ("out", "usual"))
    assert [entry.to_data() for entry in made.quality] == [entry.to_data() for entry in usual.quality]
    assert all(one["median_ms"] > 0 for row in made.to_data()["speed"] for one in (row["base"], *row["variants"]))
    for file in Path("out", "stages").glob("*.json"):
        assert 0 <= json.loads(file.read_text("utf-8"))["seconds"] < 3600
    rows = (data / "dev.tsv").read_text("utf-8")
    Path("train.tsv").write_text(rows, encoding="utf-8")
    answer = call(
        "finetune",
        converted,
        "-o",
        "healed",
        "--task",
        "glue/sst2",
        "--data",
        "train.tsv",
        "--recover",
        "task",
        "--steps",
        "4",
        "--time-budget",
        "10m",
        "--json",
    )
    assert answer.code == Exit.OK, answer
    assert [0 < phase["seconds"] < 600 for phase in answer.json["phases"]] == [True]
