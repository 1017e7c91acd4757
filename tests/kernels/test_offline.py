"""Kernels compiled for A100 and H100 without either: within their limits, and as the table in reports/ says.

To compile all takes ten minutes, so `bench/offline.py` does that where a kernel changes, and what it found is held here to
the kernels that are there; the first launches of two ops are compiled again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.offline import CAPABILITIES, digest, launches, mixed, ops, report, wrong

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports" / "kernels"
# The key of a row, without the compiler's figures.
IDENTITY = ("op", "launch", "kernel", "tiles", "num_warps", "num_stages", "capability")

triton = pytest.importorskip("triton")


def identities(rows):
    return sorted(json.dumps([row[key] for key in IDENTITY]) for row in rows)


def recorded():
    return json.loads((REPORTS / "record.json").read_text("utf-8"))


# Which kernels were compiled, the digests tell; that they are read as ever, the two that compile fastest.
@pytest.mark.slow
@pytest.mark.parametrize("op", ["clustering", "topk"])
def test_the_first_kernels_of_an_op_keep_within_their_limits_and_are_in_the_table(op, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "bench/offline.py", "--first", "--only", op]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout)
    assert {row["capability"] for row in rows} == set(CAPABILITIES)
    assert rows[0]["launch"] == launches(op)[0].name
    table = [row for row in recorded()["kernels"] if (row["op"], row["launch"]) == (op, rows[0]["launch"])]
    assert identities(rows) == identities(table)
    # Another Triton makes other machine code of the same kernels, within the limits.
    if recorded()["triton"] == triton.__version__:
        assert rows == table


@pytest.mark.parametrize("op", ops())
def test_the_table_was_read_from_the_kernels_that_are_there(op):
    assert recorded()["digests"].get(op) == digest(op), f"Run python bench/offline.py --only {op} -o reports/kernels."
    assert {row["launch"] for row in recorded()["kernels"] if row["op"] == op} == {one.name for one in launches(op)}


def test_the_report_is_made_from_the_record():
    assert (REPORTS / "report.md").read_text("utf-8") == report(recorded())


def test_a_table_is_of_one_triton(tmp_path):
    assert mixed(tmp_path, "3.6.0") is None
    (tmp_path / "record.json").write_text(json.dumps({"triton": "3.9.0"}), encoding="utf-8")
    assert mixed(tmp_path, "3.9.0") is None
    assert "was read off Triton 3.9.0, and this is 3.6.0" in (mixed(tmp_path, "3.6.0") or "")


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
