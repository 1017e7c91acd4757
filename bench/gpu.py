"""Every kernel on one NVIDIA GPU: tests, verification against float64, then timing against SDPA's back ends, the ceiling, and peers.

    python bench/gpu.py -o reports/gpu                        # everything in ten minutes; run again to continue
    python bench/gpu.py -o DIR --no-tests --only 'attention/forward/*' --minutes 3
    python bench/gpu.py -o reports/gpu --redraw               # rebuild page and plot from the record

The stages in order: the card's copy and product rates; `pytest -m gpu`; outputs, gradients and CUDA graphs of every
contender against float64, since incorrect ones are not timed, and `auto` uses the kernels of an op only if all contenders that
run it are correct (the result is stored where `approx doctor` looks); attention of one layer, eagerly and as a
graph; models of twelve layers, also half padded; decoding. Each has a share of the time, and passes on what it does not use.

The parts of a stage, suite/mode/dtype/length x batch/way, run in order of importance. The contenders of a part take
turns with the base; each part is stored as soon as it is done and is not measured again. A contender that fails is a row
with its error. Writes `record.json` and, from it, `report.md` and a plot.
"""

import argparse
import fnmatch
import json
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch
from rich.console import Console

from approx.errors import ApproxError, Exit
from approx_kernels.gpu.language import CAPABILITY, triton
from bench import gpu_page, parts
from bench.gpu_checks import checks, outdated
from bench.gpu_jobs import LATE, work
from bench.gpu_machine import asked, suite_passes
from bench.gpu_plan import LENGTHS, VERIFIED, checked, compilation, compiled_in, planned, stage_of, verifications
from bench.gpu_race import Part
from bench.gpu_workers import Job, carry_out, told

DEVICE = "cuda"
MINUTES = 10.0
# Shares of the time.
SHARES = {"machine": 0.04, "tests": 0.17, "verification": 0.2, "attention": 0.28, "models": 0.23, "decode": 0.08}
# Number of processes that compile and verify; seconds without a message after which one counts as hung, if it may have to
# compile kernels, and if all are compiled.
LANES, COMPILING, SILENCE = 12, 240.0, 90.0
# Minimum seconds for the tests.
LEAST = 30.0


def run(options: argparse.Namespace, console: Console) -> None:
    """Run one stage after the other; always write the record of all stored parts.

    Raises:
        ApproxError: if the folder is that of another card, or this one fails at copying and multiplying.
    """
    folder, begun = options.output / "parts", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    _take_up(options.output)
    then, now = (parts.kept(folder, "machine") or {}).get("environment"), asked("name").get("name")
    if then and now and now != then["gpu"]:
        raise ApproxError(
            f"{folder} holds what was measured on {then['gpu']}, and this is {now}. Take another folder with -o.",
            Exit.REFUSED,
        )
    # Nothing else can run without it.
    _carry_out([Job("machine", {"kind": "machine"})], folder, begun + 60 * options.minutes, 1, options, console)
    if (machine := parts.kept(folder, "machine")) is None or "error" in machine:
        why = "it took too long" if machine is None else machine["error"]
        raise ApproxError(f"The GPU was asked to copy and multiply, but {why}. Fix that first.", Exit.MISSING)
    card = machine["environment"]
    if "capability" in card and tuple(map(int, card["capability"].split("."))) < CAPABILITY:
        raise ApproxError(
            f"{card['gpu']} has compute capability {card['capability']}; the kernels are for 8.0 (A100) and later.",
            Exit.UNSUPPORTED,
        )
    try:
        _stages(options, folder, begun, console)
    finally:
        _gather(options.output, (time.monotonic() - begun) / 60)


def _take_up(output: Path) -> None:
    """Store the parts that the record of a folder has and its part files lack, as in a fresh checkout."""
    path = output / "record.json"
    if not path.is_file():
        return
    made = json.loads(path.read_text(encoding="utf-8"))
    named = {"machine": {"kind": "machine", "environment": made["environment"], "rates": made["rates"]}}
    named |= {"tests": made["tests"]} if made["tests"] else {}
    named |= {f"verification/{one['suite']}/{one['dtype']}/{one['name']}": one for one in made["verified"]}
    named |= {Part(**{name: one[name] for name in Part._fields}).id: one for one in made["parts"]}
    parts.seed(output / "parts", named)


def _stages(options: argparse.Namespace, folder: Path, begun: float, console: Console) -> None:
    stages = {name: share for name, share in SHARES.items() if name != "tests" or options.tests}
    chosen = [
        part for part in planned() if fnmatch.fnmatchcase(part.id, options.only) and part.length in options.lengths
    ]
    passed = 0.0
    for stage, share in stages.items():
        passed += share / sum(stages.values())
        deadline = begun + 60 * options.minutes * passed
        if stage == "tests":
            if not (parts.kept(folder, "tests") or {"finished": False})["finished"]:
                console.print("tests", highlight=False)
                seconds = max(deadline - time.monotonic(), LEAST)
                parts.keep(folder, "tests", suite_passes(options.output / "tests.log", seconds))
        elif stage == "verification":
            lanes = min(LANES, max(2, (os.cpu_count() or 2) * 3 // 4))
            jobs = list({job.id: job for job in verifications(chosen)}.values())
            _carry_out(jobs, folder, deadline, lanes, options, console)
            verified = [one for one in parts.all_kept(folder) if one.get("kind") == "verification"]
            result = {"kind": "checks", "checks": checks(verified, checked())}
            # Regardless of the time: `auto` depends on the result.
            _carry_out([Job("checks", result)], folder, math.inf, 1, options, console)
        elif stage != "machine":
            jobs = [_measuring(part, folder) for part in chosen if stage_of(part) == stage]
            _carry_out(jobs, folder, deadline, 1, options, console)


def _measuring(part: Part, folder: Path) -> Job:
    suite = VERIFIED.get(part.suite, part.suite)
    results = [one for one in parts.all_kept(folder) if one.get("kind") == "verification"]
    verified = {one["name"]: one for one in results if (one["suite"], one["dtype"]) == (suite, part.dtype)}
    late = [name for name in compiled_in(part) if parts.kept(folder, compilation(part, name)) is None]
    return Job(part.id, {"kind": "part", "part": part._asdict(), "verified": verified, "uncompiled": late})


def _carry_out(
    jobs: list[Job], folder: Path, deadline: float, lanes: int, options: argparse.Namespace, console: Console
) -> None:
    """Run the jobs that are not stored yet; the next run retries those that failed as a whole."""
    left = [job for job in jobs if _unfinished(parts.kept(folder, job.id))]
    left = [job._replace(given={**job.given, "device": options.device}) for job in left]
    done = 0

    def keep(job: Job, result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        console.print(
            f"{done}/{len(left)} {job.id}" + (f": {result['error']}" if "error" in result else ""), highlight=False
        )
        about = {**job.given.get("part", {}), **{key: job.given[key] for key in ("suite", "name") if key in job.given}}
        about |= {"dtype": job.given["dtype"]} if "dtype" in job.given else {}
        empty = {"contenders": []} if job.given["kind"] == "part" else {}
        whole = {"kind": job.given["kind"], **empty, **about}
        try:
            parts.keep(folder, job.id, {**whole, **result})
        except ValueError as error:
            # NaN or infinity, which records cannot hold, must not stop the other jobs.
            parts.keep(folder, job.id, {**whole, "error": told(error)})

    silence = COMPILING if lanes > 1 else SILENCE
    undone = carry_out(
        left, work, keep, lanes=lanes, deadline=deadline, silence=silence, log=options.output / "processes.log"
    )
    if undone:
        console.print(f"The minutes of this stage are used up; {len(undone)} of {len(left)} are left.", highlight=False)


def _unfinished(result: dict[str, Any] | None) -> bool:
    """Whether a job must run again: it failed as a whole, is out of date, or a contender was not ready in time."""
    if result is None or "error" in result or result.get("kind") == "checks" or outdated(result):
        return True
    return any(one["status"] in LATE for one in result.get("contenders", ()))


def _gather(output: Path, minutes: float) -> None:
    """Write the record of all stored parts, and list the missing parts of the plan."""
    results = parts.all_kept(output / "parts")
    raced = [one for one in results if one.get("kind") == "part"]
    done = {Part(**{name: one[name] for name in Part._fields}).id for one in raced if "error" not in one}
    order = {part.id: place for place, part in enumerate(planned())}
    machine = next(one for one in results if one.get("kind") == "machine")
    made = {
        "command": shlex.join(["python", "bench/gpu.py", *sys.argv[1:]]),
        "minutes": minutes,
        "environment": machine["environment"],
        "rates": machine["rates"],
        "tests": parts.kept(output / "parts", "tests"),
        "checks": (parts.kept(output / "parts", "checks") or {}).get("checks", {}),
        "verified": [one for one in results if one.get("kind") == "verification"],
        "parts": sorted(
            raced, key=lambda one: order.get(Part(**{name: one[name] for name in Part._fields}).id, len(order))
        ),
        "left": [name for name in order if name not in done],
    }
    (output / "record.json").write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _check() -> None:
    """Check that the benchmark can run.

    Raises:
        ApproxError: if there is no GPU, or no Triton.
    """
    if not torch.cuda.is_available():
        raise ApproxError(
            f"bench/gpu.py measures an NVIDIA GPU, and torch {torch.__version__} finds none. Run it where there is one, with a "
            "build of PyTorch for CUDA; or make the page from a record with --redraw; or measure this processor with bench/cpu.py.",
            Exit.MISSING,
        )
    if triton is None:
        raise ApproxError(
            "bench/gpu.py times kernels in Triton, which is not installed. pip install triton.", Exit.MISSING
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ApproxError("TRITON_INTERPRET is 1, so kernels would be interpreted, not timed. Unset it.")


def main(arguments: list[str] | None = None) -> int:
    """Measure, write and print; exit code 6 if a test failed or a kernel is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the parts, the record and the page")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"what all stages share ({MINUTES:g})")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="leave out pytest -m gpu")
    parser.add_argument("--only", default="*", metavar="GLOB", help="parts whose name matches")
    parser.add_argument("--lengths", type=parts.numbers, default=(256, *LENGTHS), help="tokens, separated by commas")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the page from the record")
    options = parser.parse_args(arguments)
    options.device = DEVICE
    try:
        if not options.redraw:
            _check()
            run(options, Console(stderr=True))
        text, right = gpu_page.write(options.output, options.output)
    except ApproxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(text)
    return Exit.OK if right else Exit.VERIFICATION


if __name__ == "__main__":
    sys.exit(main())
