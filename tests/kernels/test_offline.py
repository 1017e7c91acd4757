"""Every kernel, compiled for A100 and H100 without either: within its limits, and as the table in reports/ says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.offline import CAPABILITIES, ops, report, wrong

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports" / "kernels"
# What makes a row, apart from what the compiler found.
IDENTITY = ("op", "launch", "kernel", "tiles", "num_warps", "num_stages", "capability")

pytest.importorskip("triton")


def identities(rows):
    return sorted(json.dumps([row[key] for key in IDENTITY]) for row in rows)


def recorded():
    return json.loads((REPORTS / "record.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("op", ops())
def test_a_kernel_keeps_within_its_limits_and_is_in_the_table(op, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "bench/offline.py", "--only", op]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    assert {row["capability"] for row in rows} == set(CAPABILITIES)
    assert identities(rows) == identities(row for row in recorded()["kernels"] if row["op"] == op)


def test_the_report_is_made_from_the_record():
    assert (REPORTS / "report.md").read_text("utf-8") == report(recorded())


def test_the_record_breaks_no_limit():
    assert [sentence for row in recorded()["kernels"] for sentence in wrong(row)] == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 100 * 1024}, "of 99 KiB"),
        ({"instructions": []}, "no tensor cores"),
        ({"instructions": [], "tensor_cores": False}, None),
        ({"shared_bytes": 100 * 1024, "capability": 90}, None),
    ],
)
def test_a_limit_that_is_broken_is_told(changed, said):
    good = {
        "op": "flash",
        "launch": "dense",
        "kernel": "forward",
        "capability": 80,
        "spilled_bytes": 0,
        "shared_bytes": 1024,
        "tensor_cores": True,
        "instructions": ["HMMA"],
    }
    told = wrong(good | changed)
    assert told == [] if said is None else said in told[0]
