"""Kernels compiled for A100, H100 and B200 without any: within their limits, and as the tables in reports/ say.

To compile all takes ten minutes, so `bench/offline.py` does that where a kernel changes, and what it found is held here
to the kernels that are there; the first launches of two ops are compiled again.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from approx_kernels.gpu.language import HOPPER, RIGHT_ON_HOPPER, assembler
from bench.offline import CAPABILITIES, digest, launches, ops, report, write, wrong

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports" / "kernels"
# The key of a row, without the compiler's figures.
IDENTITY = ("op", "launch", "kernel", "tiles", "num_warps", "num_stages", "capability")

triton = pytest.importorskip("triton")


def identities(rows):
    return sorted(json.dumps([row[key] for key in IDENTITY]) for row in rows)


def recorded():
    return json.loads((REPORTS / "record.json").read_text("utf-8"))


# Digests identify the compiled kernels; the two that compile fastest show that they are still read correctly.
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
    used = assembler(HOPPER)
    assert used
    for compiler in recorded()["compilers"]:
        table = [row for row in compiler["kernels"] if (row["op"], row["launch"]) == (op, rows[0]["launch"])]
        read = {row["capability"] for row in table}
        assert identities(row for row in rows if row["capability"] in read) == identities(table)
        # Another compiler makes other machine code of the same kernels, within the limits.
        if (compiler["triton"], compiler["ptxas"]) == (triton.__version__, used.version):
            assert rows == table


@pytest.mark.parametrize("op", ops())
@pytest.mark.sample(3)
def test_the_tables_belong_to_the_current_kernels(op):
    newest, *_ = recorded()["compilers"]
    assert {f"{op}, 80", f"{op}, 90"} <= newest["digests"].keys()
    for compiler in recorded()["compilers"]:
        name = f"Triton {compiler['triton']}, ptxas {compiler['ptxas']}"
        found = {key: one for key, one in compiler["digests"].items() if key.startswith(f"{op}, ")}
        assert set(found.values()) <= {digest(op)}, (
            f"Run python bench/offline.py --only {op} -o reports/kernels, {name}."
        )
        read = {row["launch"] for row in compiler["kernels"] if row["op"] == op}
        assert read == ({one.name for one in launches(op)} if found else set())


def test_clustering_was_read_off_both_assemblers_of_the_oldest_triton():
    lowest = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert lowest
    oldest = [one for one in recorded()["compilers"] if one["triton"].startswith(lowest[1])]
    assert all({"clustering, 90", "clustered, 90"} <= one["digests"].keys() for one in oldest)
    right = [tuple(map(int, one["ptxas"].split(".")[:2])) >= RIGHT_ON_HOPPER for one in oldest]
    assert sorted(right) == [False, True]


def test_the_report_is_made_from_the_record():
    assert (REPORTS / "report.md").read_text("utf-8") == report(recorded(), REPORTS)


def test_figures_of_another_compiler_join_and_new_ones_of_the_same_replace(tmp_path):
    row = recorded()["compilers"][0]["kernels"][0]
    write([row], tmp_path, ("3.6.0", "12.8.93"))
    write([row], tmp_path, ("3.10.0", "13.4.59"))
    write([row | {"registers": 7}], tmp_path, ("3.6.0", "12.8.93"))
    compilers = json.loads((tmp_path / "record.json").read_text("utf-8"))["compilers"]
    assert [(one["triton"], one["ptxas"]) for one in compilers] == [("3.10.0", "13.4.59"), ("3.6.0", "12.8.93")]
    assert [one["kernels"] for one in compilers] == [[row], [row | {"registers": 7}]]
    assert "| 7 · " in (tmp_path / "report.md").read_text("utf-8")


# By the ptxas of the oldest Triton: launches and kernels of Performer on a Hopper that spill, and the bytes. Nothing
# else may.
SPILLS = {
    "13.5.37": {
        ("float32, 128", "performer_out_kernel"): 8,
        ("float32, 64", "performer_keys_kernel"): 16,
        ("sums carried on, float32, 128, causal", "performer_shares_kernel"): 8,
    },
    "12.8.93": {
        ("float16, 64, causal", "performer_dq_kernel"): 16,
        ("float32, 128", "performer_out_kernel"): 8,
        ("float32, 128, causal", "performer_keys_kernel"): 16,
        ("float32, 64", "performer_keys_kernel"): 16,
        ("float32, 64, causal", "performer_keys_kernel"): 16,
        ("sums carried on, float32, 128, causal", "performer_shares_kernel"): 8,
    },
}


def test_the_records_break_no_limit():
    # For a B200, where no kernel has run yet, six spill up to 32 bytes; the report counts them.
    for compiler in recorded()["compilers"]:
        rows = [row for row in compiler["kernels"] if row["capability"] < 100]
        spilling = {(row["launch"], row["kernel"]): row["spilled_bytes"] for row in rows if row["spilled_bytes"]}
        assert spilling == SPILLS.get(compiler["ptxas"], {})
        assert [sentence for row in rows for sentence in wrong(row | {"spilled_bytes": 0})] == []


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
def test_names_a_broken_limit(changed, said):
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
    sentences = wrong(good | changed)
    assert sentences == [] if said is None else said in sentences[0]
