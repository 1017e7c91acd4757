"""Damage every kind of file that a user can hand to approx, and watch that it refuses with its own error or succeeds.

    python tools/fuzz --minutes 10 --seed 1

Two processes read the damaged files, with two gigabytes and twenty seconds for each. What fails is made smaller and
written to runs/fuzz; after the defect is fixed, move it to tools/fuzz/found, whose cases
tests/tools/test_fuzz_regressions.py reads again.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "tools", ".", "kernels")]
# As tests/conftest.py has it.
for name, value in (
    ("HF_HUB_OFFLINE", "1"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TRANSFORMERS_VERBOSITY", "error"),
):
    os.environ.setdefault(name, value)


def main() -> int:
    """Run; 0 if nothing failed, else 1."""
    from fuzz.campaign import campaign

    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="which cases")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", action="append", help="a kind of file, such as 'recipe'; may be repeated")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="approx-fuzz-") as scratch:
        os.environ["APPROX_CACHE"] = f"{scratch}/cache"
        return campaign(
            asked.seed, 60 * asked.minutes, asked.jobs, Path(scratch), ROOT / "runs" / "fuzz", asked.only, asked.output
        )


if __name__ == "__main__":
    sys.exit(main())
