"""Kill `approx run` at random moments, go on with --resume, and compare the record with that of a run that nobody disturbed.

python tests/fuzz/kills.py --kills 100 --seed 1
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """title: Killed
checkpoint: quickstart
variants:
  local: {mechanism: local, settings: {left: 8, right: 8}}
  clustered: {mechanism: clustered, settings: {clusters: 5}, layers: 0}
evaluate:
  - {task: needle, settings: {length: 64}, limit: 12, batch_size: 1}
device: cpu
"""
# What differs between two runs in which nothing else does.
TIMES = {"command"}


def killed(kills: int, seed: int, folder: Path, seconds: float = math.inf) -> dict[str, Any]:
    """Kill a run so many times, or as often as there is time for; returns the figures.

    Args:
        kills: Number of kills; a run that ends before it is killed counts as a completed one.
        seed: Seed of the moments.
        folder: An empty folder for the recipe and the runs.
        seconds: After them, no more runs are killed.

    Raises:
        AssertionError: if a run does not go on, or its record differs.
    """
    import killable
    from approx.checkpoints.atomic_folder import CLAIM

    recipe = folder / "killed.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")

    def start(out: Path) -> Any:
        if not out.exists():
            # Outputs that an earlier run stored would leave this one nothing to do.
            shutil.rmtree(Path(os.environ["APPROX_CACHE"], "outputs"), ignore_errors=True)
        return killable.start("run", recipe, "-o", out, "--resume", "--quiet", errors=folder / "errors")

    began = time.monotonic()
    # It compiles C, once for all.
    start(folder / "first").join()
    since = time.monotonic()
    start(folder / "whole").join()
    whole, undisturbed = _record(folder / "whole"), time.monotonic() - since
    random, done, completed, moments = Random(seed), 0, 0, Counter[str]()
    while done < kills and time.monotonic() - began < seconds:
        out = folder / f"run{completed}"
        process = start(out)
        # Starting takes so long that most moments of all would lie before the first stage is finished.
        wanted = random.randrange(4)
        while process.is_alive() and _finished(out) < wanted:
            time.sleep(0.01)
        process.join(random.uniform(0, undisturbed / (1 + wanted)))
        # A run may end by itself just before the signal.
        if process.is_alive() and killable.ended(process, signal.SIGKILL) == -signal.SIGKILL:
            done += 1
            moments[_reached(out)] += 1
            if done < kills and time.monotonic() - began < seconds:
                continue
            process = start(out)
            process.join()
        errors = (folder / "errors").read_text(encoding="utf-8")
        assert process.exitcode == 0, errors
        made = _record(out)
        different = {key: (whole.get(key), made.get(key)) for key in {*whole, *made} if whole.get(key) != made.get(key)}
        assert different == {}, different
        leftovers = [
            path for path in out.rglob("*") if ".tmp" in path.name or (path.name.startswith(".") and path.name != CLAIM)
        ]
        assert leftovers == [], leftovers
        completed += 1
    return {
        "seed": seed,
        "kills": done,
        "completed": completed,
        "seconds": round(time.monotonic() - began),
        "python": platform.python_version(),
        "reached": dict(sorted(moments.items())),
    }


def _record(out: Path) -> dict[str, Any]:
    made = json.loads((out / "record.json").read_text(encoding="utf-8"))
    return {key: value for key, value in made.items() if key not in TIMES}


def _finished(out: Path) -> int:
    return len(list(out.glob("stages/*.json")))


def _reached(out: Path) -> str:
    """What a run had finished when it was killed."""
    if (out / "record.json").is_file():
        return "with its record"
    return f"after {_finished(out)} stages" if (out / "recipe.yaml").is_file() else "before anything was written"


def main() -> int:
    """Run; 0 if every run went on to the same record."""
    sys.path[:0] = [str(ROOT / name) for name in ("tests", ".", "kernels")]
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)
    parser = argparse.ArgumentParser(prog="make kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for how long at most")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    # The processes that are killed print where this one does.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory(prefix="approx-kills-") as scratch:
        # The outputs that other runs stored would leave nothing to do.
        os.environ["APPROX_CACHE"] = f"{scratch}/cache"
        # The checkout may be edited meanwhile, and records name its commit.
        os.environ["GIT_DIR"] = f"{scratch}/none"
        figures = killed(asked.kills, asked.seed, Path(scratch), 60 * asked.minutes)
    print(json.dumps(figures, indent=1), file=said, flush=True)
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
