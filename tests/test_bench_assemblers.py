"""The comparison of assemblers: a case that dies or hangs is a result, and the time is kept to."""

import json
import subprocess
import sys

import pytest

from approx.errors import Exit
from bench import assemblers
from bench.gpu_cases import of_suite

pytest.importorskip("triton")

SCRIPTS = {"fine": "pass", "dies": "import os; os.kill(os.getpid(), 9)", "hangs": "import time; time.sleep(60)"}


@pytest.fixture
def scripts(monkeypatch):
    """Three cases that need no GPU."""

    def start(name, form, ptxas, caches, made, sanitizer=None):
        result = json.dumps({"status": "ok", "seconds": 1.0, "ptxas": "13.1.80" if form.newer else "12.8.93"})
        code = f"{SCRIPTS[name]}\nopen({str(made)!r}, 'w').write({result!r})"
        return subprocess.Popen([sys.executable, "-c", code])

    monkeypatch.setattr(assemblers, "_start", start)
    monkeypatch.setattr(assemblers, "CASES", dict.fromkeys(SCRIPTS))
    monkeypatch.setattr(assemblers, "SANITIZING", 1.0)
    monkeypatch.setattr(assemblers, "LANES", 12)


def test_records_a_case_that_dies_or_hangs_and_keeps_the_time_limit(scripts, tmp_path):
    results = assemblers.compare(tmp_path / "ptxas", tmp_path, 9.0)
    status = {(one["case"], one["form"]): one["status"] for one in results}
    assert {case: {status[case, form.name] for form in assemblers.FORMS} for case in SCRIPTS} == {
        "fine": {"ok"},
        "dies": {"its process ended with exit code -9"},
        "hangs": {"not finished in time"},
    }
    assert json.loads((tmp_path / "assemblers.json").read_text("utf-8"))["results"] == results
    text = (tmp_path / "assemblers.md").read_text("utf-8")
    assert "newer assembler, 64 clusters (13.1.80)" in text
    assert "| dies | its process ended with exit code -9 |" in text


def test_every_mechanism_of_a_case_exists():
    known = {case.name for suite in ("attention", "attention-causal") for case in of_suite(suite, 1)}
    named = {name.partition(",")[0] for name in assemblers.CASES if "iterations" in name}
    assert named
    assert named <= known
    assert "performer estimator=positive" in known


def test_names_missing_parts(tmp_path, capsys):
    assert assemblers.main(["-o", str(tmp_path / "out"), "--ptxas", str(tmp_path / "none")]) == Exit.USAGE
    assert "nvidia-cuda-nvcc>=13.1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
