"""Every kernel on one NVIDIA GPU: the tests, float64, and then the time, beside SDPA's back ends, the ceiling, and peers.

    python bench/gpu.py -o reports/gpu                        # all of it in ten minutes; again, to go on
    python bench/gpu.py -o DIR --no-tests --only 'attention/forward/*' --minutes 3
    python bench/gpu.py -o reports/gpu --redraw               # page and picture from the record, nothing measured

One stage follows the other: what the card copies and multiplies; `pytest -m gpu`; outputs, gradients and CUDA graphs of
every contender against float64, since what is not right is not timed, and `auto` takes the kernels of no op before all that
run it are right (what is found is kept where `approx doctor` looks); one layer's attention by itself, eagerly and as a
graph; models of twelve layers, also half of padding; decoding. Each has a share of the minutes, and what it leaves goes to the next.

The parts of a stage, suite/mode/dtype/length x batch/way, come in the order of what they tell. Everybody in a part takes
turns with the base; each part is kept as soon as it is done, and what is kept is not measured again. A contender that
fails is a row with its error. Written are `record.json` and, made from it, `report.md` and a picture.
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
# Of the minutes.
SHARES = {"machine": 0.04, "tests": 0.17, "verification": 0.2, "attention": 0.28, "models": 0.23, "decode": 0.08}
# Processes that compile and verify side by side; seconds after which one that says nothing hangs, where it may have to
# compile kernels, and where all have been compiled.
LANES, COMPILING, SILENCE = 8, 240.0, 90.0
# Seconds that the tests have at least.
LEAST = 30.0


def run(options: argparse.Namespace, console: Console) -> None:
    """One stage after the other; whatever happens, the record of all that is kept.

    Raises:
        ApproxError: if the folder is that of another card, or this one cannot even be made to copy and multiply.
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
    # Nothing goes on without it.
    _carry_out([Job("machine", {"kind": "machine"})], folder, begun + 60 * options.minutes, 1, options, console)
    if (found := parts.kept(folder, "machine")) is None or "error" in found:
        why = "it took too long" if found is None else found["error"]
        raise ApproxError(f"The GPU was asked to copy and multiply, but {why}. Mend that first.", Exit.MISSING)
    card = found["environment"]
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
    """Keep what the record of a folder holds and its parts lack, as in a fresh checkout."""
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
            lanes = min(LANES, max(2, (os.cpu_count() or 2) // 2))
            jobs = list({job.id: job for job in verifications(chosen)}.values())
            _carry_out(jobs, folder, deadline, lanes, options, console)
            verified = [one for one in parts.all_kept(folder) if one.get("kind") == "verification"]
            found = {"kind": "checks", "checks": checks(verified, checked())}
            # Whatever the time: what was found out is what `auto` goes by.
            _carry_out([Job("checks", found)], folder, math.inf, 1, options, console)
        elif stage != "machine":
            jobs = [_measuring(part, folder) for part in chosen if stage_of(part) == stage]
            _carry_out(jobs, folder, deadline, 1, options, console)


def _measuring(part: Part, folder: Path) -> Job:
    suite = VERIFIED.get(part.suite, part.suite)
    found = [one for one in parts.all_kept(folder) if one.get("kind") == "verification"]
    verified = {one["name"]: one for one in found if (one["suite"], one["dtype"]) == (suite, part.dtype)}
    late = [name for name in compiled_in(part) if parts.kept(folder, compilation(part, name)) is None]
    return Job(part.id, {"kind": "part", "part": part._asdict(), "verified": verified, "uncompiled": late})


def _carry_out(
    jobs: list[Job], folder: Path, deadline: float, lanes: int, options: argparse.Namespace, console: Console
) -> None:
    """Do what is not kept yet; what failed as a whole is tried again by the next run."""
    left = [job for job in jobs if _unfinished(parts.kept(folder, job.id))]
    left = [job._replace(given={**job.given, "device": options.device}) for job in left]
    done = 0

    def keep(job: Job, found: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        console.print(
            f"{done}/{len(left)} {job.id}" + (f": {found['error']}" if "error" in found else ""), highlight=False
        )
        about = {**job.given.get("part", {}), **{key: job.given[key] for key in ("suite", "name") if key in job.given}}
        about |= {"dtype": job.given["dtype"]} if "dtype" in job.given else {}
        empty = {"contenders": []} if job.given["kind"] == "part" else {}
        whole = {"kind": job.given["kind"], **empty, **about}
        try:
            parts.keep(folder, job.id, {**whole, **found})
        except ValueError as error:
            # A number that is none, which no record may hold, must not stop the others.
            parts.keep(folder, job.id, {**whole, "error": told(error)})

    silence = COMPILING if lanes > 1 else SILENCE
    undone = carry_out(
        left, work, keep, lanes=lanes, deadline=deadline, silence=silence, log=options.output / "processes.log"
    )
    if undone:
        console.print(f"The minutes of this stage are used up; {len(undone)} of {len(left)} are left.", highlight=False)


def _unfinished(found: dict[str, Any] | None) -> bool:
    """Whether something is still to be found out: it failed as a whole, is out of date, or somebody was not ready in time."""
    if found is None or "error" in found or found.get("kind") == "checks" or outdated(found):
        return True
    return any(one["status"] in LATE for one in found.get("contenders", ()))


def _gather(output: Path, minutes: float) -> None:
    """Write the record of all that is kept, and name the parts of the whole plan that are not."""
    found = parts.all_kept(output / "parts")
    raced = [one for one in found if one.get("kind") == "part"]
    done = {Part(**{name: one[name] for name in Part._fields}).id for one in raced if "error" not in one}
    order = {part.id: place for place, part in enumerate(planned())}
    machine = next(one for one in found if one.get("kind") == "machine")
    made = {
        "command": shlex.join(["python", "bench/gpu.py", *sys.argv[1:]]),
        "minutes": minutes,
        "environment": machine["environment"],
        "rates": machine["rates"],
        "tests": parts.kept(output / "parts", "tests"),
        "checks": (parts.kept(output / "parts", "checks") or {}).get("checks", {}),
        "verified": [one for one in found if one.get("kind") == "verification"],
        "parts": sorted(
            raced, key=lambda one: order.get(Part(**{name: one[name] for name in Part._fields}).id, len(order))
        ),
        "left": [name for name in order if name not in done],
    }
    (output / "record.json").write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _check() -> None:
    """Refuse to begin what cannot be done.

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
    """Measure, write and print; 6 if a test failed or a kernel is wrong."""
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
