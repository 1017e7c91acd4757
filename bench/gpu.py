"""Every kernel on one NVIDIA GPU: tried on the shapes that are timed, then timed against SDPA's back ends, the ceiling, and peers.

    python bench/gpu.py -o reports/gpu                        # 560 seconds; run again to continue
    python bench/gpu.py -o DIR --only 'attention/forward/*' --budget 180
    python bench/gpu.py --plan                                # the order, and the time that each stage may take
    python bench/gpu.py -o reports/gpu --redraw               # rebuild page, plot and what is shipped from the record

A part is a suite/mode/dtype/length x batch/way, and its contenders are mechanisms, back ends and peers. Each contender
of a part is first tried in a process of its own: outputs and gradients against the reference, and as a CUDA graph.
Those that pass take turns with exact attention, one after the other. One that fails, hangs or kills its process is a
row with its error, and the others go on. Each row is stored as soon as it is measured, and the record is written after
every stage.

The kernels of an op are used by `auto` if all mechanisms that run them are right in a stage of its own, `checks`; the
result is stored where `approx doctor` looks. Writes `record.json` and, from it, `report.md` and a plot. What
`reports/gpu` holds is shipped with the package, so that `auto` uses these kernels on other GPUs of that compute
capability too.
"""

import argparse
import fnmatch
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch
from rich.console import Console

from approx.errors import ApproxError, Exit
from approx_kernels.dispatch.checked import VERIFIED
from approx_kernels.gpu.language import CAPABILITY, assembler_obstacle, triton
from bench import gpu_cases, pages
from bench.gpu_cases import (
    ATTENTION,
    CAUSAL,
    LENGTHS,
    MEASURED,
    PADDED,
    SUITES,
    TOKENS,
    Part,
    compiled_for,
    importance,
    of_models,
    of_suite,
)
from bench.gpu_jobs import UNTRIED, asked, suite_passes, work
from bench.gpu_page import report, right
from bench.gpu_verify import checks, ops_of, outdated, ship
from bench.gpu_workers import UNFINISHED, Job, carry_out, in_one_line

DEVICE = "cuda"
# What is in the record of this folder is shipped with the package.
SHIPPED = Path(__file__).resolve().parent.parent / "reports" / "gpu"
# Seconds in all, and those kept for the record and the page at the end.
BUDGET, RESERVE = 560.0, 10.0
# The share of the time that the tests take where they are asked for, and of a part's time that its tries may take.
TESTS, TRYING = 0.17, 0.6
# Number of processes that try and verify, and of those whose references need much memory; seconds without a message
# after which one counts as hung, if it may have to compile kernels, and if all are compiled.
LANES, LARGE_LANES, COMPILING, SILENCE = 12, 3, 240.0, 90.0
# Tokens from which references need much memory.
LARGE = 4096


class Stage(NamedTuple):
    """Parts that share a time.

    Attributes:
        name: Its name.
        share: Its share of the time; it passes on what it leaves, and the last stage has none of its own.
        parts: What is measured, the most informative first.
    """

    name: str
    share: float
    parts: tuple[Part, ...] = ()


def stages() -> tuple[Stage, ...]:
    """All stages, the most informative first."""

    def step(suite: str, mode: str, length: int, way: str = "graph", dtype: str = "bfloat16") -> Part:
        return Part(suite, mode, dtype, length, max(TOKENS // length, 1), way)

    def decoding(length: int, batch: int, way: str = "graph") -> Part:
        return Part("decode", "forward", "bfloat16", length, batch, way)

    few = (2048, 8192, 512)
    chosen = (
        Stage("machine", 0.04),
        Stage("attention", 0.32, tuple(step(ATTENTION, "forward", length) for length in few)),
        Stage("models", 0.2, tuple(step("roberta", "forward", length) for length in few)),
        Stage("training", 0.08, (step(ATTENTION, "train", 2048),)),
        Stage(
            "causal",
            0.12,
            (*(step(CAUSAL, "forward", length) for length in (2048, 8192)), step("gpt2", "forward", 2048)),
        ),
        Stage("decoding", 0.08, tuple(decoding(*size) for size in ((1024, 32), (4096, 32), (1024, 1)))),
        Stage("checks", 0.16),
    )
    known = {part for stage in chosen for part in stage.parts}
    return (
        *chosen,
        Stage("more", 0.0, tuple(part for part in dict.fromkeys(_others(step, decoding)) if part not in known)),
    )


def _others(step: Any, decoding: Any) -> Iterator[Part]:
    """What a longer run measures too, the most informative first."""
    short = [length for length in LENGTHS if length < TOKENS]
    yield from (step(ATTENTION, "forward", length) for length in LENGTHS)
    yield from (step(PADDED, "forward", length) for length in (512, 2048, 8192))
    yield from (step(CAUSAL, "train", length) for length in (2048, 8192))
    yield from (step(ATTENTION, "train", length) for length in LENGTHS)
    yield from (step("roberta", "forward", length) for length in LENGTHS)
    yield from (step("gpt2", "forward", length) for length in LENGTHS)
    yield from (step("roberta-padded", "forward", length) for length in (512, 2048, 8192))
    yield from (step(ATTENTION, "forward", length, "eager") for length in LENGTHS)
    yield from (step(ATTENTION, "forward", length)._replace(batch=1) for length in short)
    yield from (step(CAUSAL, mode, length) for length in LENGTHS for mode in ("forward", "train"))
    yield from (
        step(ATTENTION, mode, 2048, dtype=dtype) for dtype in ("float16", "float32") for mode in ("forward", "train")
    )
    yield from (step(PADDED, "train", length) for length in (512, 2048, 8192))
    yield from (
        step(suite, "forward", length, "eager") for suite in ("roberta", "gpt2") for length in (512, 2048, 8192)
    )
    yield from (decoding(length, batch) for length in (256, 1024, 4096) for batch in (32, 1))
    yield from (decoding(1024, batch, "eager") for batch in (32, 1))


def planned() -> list[Part]:
    """All parts, in order."""
    return list(dict.fromkeys(part for stage in stages() for part in stage.parts))


def tries(part: Part, device: torch.device) -> list[Job]:
    """One job for each contender of a part, in the order in which they are measured: is it right on these very shapes, and can it be
    captured?
    """
    kind = getattr(torch, part.dtype)
    if part.suite in SUITES:
        how = (part.suite, part.mode, part.length, kind, device, compiled_for(part))
        named = [(one.name, one.role) for one in gpu_cases.contenders(*how)]
    else:
        models = of_models(part.suite, part.length, part.batch, kind, device)
        named = [(name, role) for name, role, _ in models]
    named.sort(key=lambda pair: importance(*pair))
    return [
        Job(attempt(part, name), {"kind": "try", "part": part._asdict(), "name": name, "role": role})
        for name, role in named
    ]


def attempt(part: Part, name: str) -> str:
    """The name of the job that tries a contender of a part."""
    return f"try/{part.id}/{name}"


def decoded() -> list[str]:
    """The mechanisms whose decoding is verified: those that are timed, and another one with separate kernels for it."""
    return [case.name for case in of_suite("decode", 1) if case.mechanism in (*MEASURED["decode"], "performer")]


def checked() -> list[dict[str, str]]:
    """Everything to verify before `auto` uses kernels: every mechanism with kernels, in every dtype and suite."""
    jobs = []
    for dtype in ("bfloat16", "float16", "float32"):
        for suite in (*SUITES, "decode"):
            names = decoded() if suite == "decode" else [case.name for case in of_suite(suite, 1)]
            jobs += [{"suite": suite, "dtype": dtype, "name": name} for name in names if ops_of(suite, name)]
    return jobs


def verifications() -> list[Job]:
    """The jobs of all that is to be verified."""
    return [
        Job(f"verification/{one['suite']}/{one['dtype']}/{one['name']}", {"kind": "verification", **one})
        for one in checked()
    ]


def run(options: argparse.Namespace, console: Console) -> None:
    """Run one stage after the other, and write the record of all stored parts after each.

    Raises:
        ApproxError: if the folder is that of another card, or this one fails at copying and multiplying.
    """
    folder, begun = options.output / "parts", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    _take_up(options.output)
    then, now = (pages.stored(folder, "machine") or {}).get("environment"), asked("name").get("name")
    if then and now and now != then["gpu"]:
        raise ApproxError(
            f"{folder} holds what was measured on {then['gpu']}, and this is {now}. Take another folder with -o.",
            Exit.REFUSED,
        )
    end = begun + options.budget - min(RESERVE, options.budget / 10)
    # Nothing else can run without it.
    _carry_out([Job("machine", {"kind": "machine"})], folder, end, 1, options, console)
    if (machine := pages.stored(folder, "machine")) is None or "error" in machine:
        why = "it took too long" if machine is None else machine["error"]
        raise ApproxError(f"The GPU was asked to copy and multiply, but {why}. Fix that first.", Exit.MISSING)
    card = machine["environment"]
    capability = tuple(map(int, card.get("capability", "8.0").split(".")))
    if capability < CAPABILITY:
        raise ApproxError(
            f"{card['gpu']} has compute capability {card['capability']}; the kernels are for 8.0 (A100) and later.",
            Exit.UNSUPPORTED,
        )
    if why := assembler_obstacle(*capability):
        raise ApproxError(f"The kernels would not be right on {card['gpu']}: {why}", Exit.MISSING)
    try:
        if options.tests and not (pages.stored(folder, "tests") or {"finished": False})["finished"]:
            console.print("tests", highlight=False)
            pages.keep(folder, "tests", suite_passes(options.output / "tests.log", TESTS * options.budget))
        for stage, deadline in allotted(stages(), time.monotonic(), end):
            _run_stage(stage, deadline, options, console)
            _gather(options.output, time.monotonic() - begun)
    finally:
        _gather(options.output, time.monotonic() - begun)


def allotted(chosen: tuple[Stage, ...], begun: float, end: float) -> list[tuple[Stage, float]]:
    """Each stage with its deadline; what one leaves is the next one's."""
    whole, passed, made = sum(stage.share for stage in chosen), 0.0, []
    for stage in chosen:
        passed += stage.share / whole
        made.append((stage, begun + (end - begun) * passed))
    return made


def _run_stage(stage: Stage, deadline: float, options: argparse.Namespace, console: Console) -> None:
    folder = options.output / "parts"
    if stage.name == "checks":
        lanes = min(LANES, max(2, (os.cpu_count() or 2) * 3 // 4))
        _carry_out(verifications(), folder, deadline, lanes, options, console)
        verified = [one for one in pages.all_stored(folder) if one.get("kind") == "verification"]
        result = {"kind": "checks", "checks": checks(verified, checked())}
        # Regardless of the time: `auto` depends on the result, which takes no time.
        _carry_out([Job("checks", result)], folder, math.inf, 1, options, console)
    chosen = [
        part for part in stage.parts if fnmatch.fnmatchcase(part.id, options.only) and part.length in options.lengths
    ]
    chosen = [part for part in chosen if _unfinished(pages.stored(folder, part.id))]
    for place, part in enumerate(chosen):
        begun = time.monotonic()
        end = begun + (deadline - begun) / (len(chosen) - place)
        if end - begun < 1:
            console.print(f"The time of the stage {stage.name} is used up.", highlight=False)
            return
        trials = tries(part, torch.device(options.device))
        lanes = min(LARGE_LANES if part.length >= LARGE else LANES, max(2, (os.cpu_count() or 2) * 3 // 4))
        _carry_out(trials, folder, begun + TRYING * (end - begun), lanes, options, console)
        tried = {job.arguments["name"]: (pages.stored(folder, job.id) or {}).get("status", UNTRIED) for job in trials}
        arguments = {"kind": "part", "part": part._asdict(), "tried": tried}
        _carry_out([Job(part.id, arguments)], folder, end, 1, options, console)


def _take_up(output: Path) -> None:
    """Store the parts that the record of a folder has and its part files lack, as in a fresh checkout."""
    if not (output / pages.RECORD).is_file():
        return
    made = pages.opened(output)
    named = {"machine": {"kind": "machine", "environment": made["environment"], "rates": made["rates"]}}
    named |= {"tests": made["tests"]} if made["tests"] else {}
    named |= {f"verification/{one['suite']}/{one['dtype']}/{one['name']}": one for one in made["verified"]}
    named |= {_part_of(one).id: one for one in made["parts"]}
    pages.seed(output / "parts", named)


def _part_of(one: dict[str, Any]) -> Part:
    return Part(**{name: one[name] for name in Part._fields})


def _carry_out(
    jobs: list[Job], folder: Path, deadline: float, lanes: int, options: argparse.Namespace, console: Console
) -> None:
    """Run the jobs that are not stored yet; the next run retries those that failed as a whole."""
    left = [job for job in jobs if _unfinished(pages.stored(folder, job.id))]
    left = [job._replace(arguments={**job.arguments, "device": options.device}) for job in left]
    done = 0

    def keep(job: Job, result: dict[str, Any]) -> None:
        nonlocal done
        if UNFINISHED not in result:
            done += 1
            console.print(
                f"{done}/{len(left)} {job.id}" + (f": {result['error']}" if "error" in result else ""), highlight=False
            )
        about = {
            **job.arguments.get("part", {}),
            **{key: job.arguments[key] for key in ("suite", "name") if key in job.arguments},
        }
        about |= {"dtype": job.arguments["dtype"]} if "dtype" in job.arguments else {}
        empty = {"contenders": [], "best_exact": None, "spread": None} if job.arguments["kind"] == "part" else {}
        whole = {"kind": job.arguments["kind"], **empty, **about}
        try:
            pages.keep(folder, job.id, {**whole, **result})
        except ValueError as error:
            # NaN or infinity, which records cannot hold, must not stop the other jobs.
            pages.keep(folder, job.id, {**whole, "error": in_one_line(error)})

    undone = carry_out(
        left,
        work,
        keep,
        lanes=lanes,
        deadline=deadline,
        silence=COMPILING if lanes > 1 else SILENCE,
        log=options.output / "processes.log",
        preload=("bench.gpu_jobs",),
    )
    if undone:
        console.print(f"The time for these is used up; {len(undone)} of {len(left)} are left.", highlight=False)


def _unfinished(result: dict[str, Any] | None) -> bool:
    """Whether a job must run again: it failed as a whole, is out of date, or a contender was not ready in time."""
    if (
        result is None
        or "error" in result
        or UNFINISHED in result
        or result.get("kind") == "checks"
        or outdated(result)
    ):
        return True
    return any(one["status"] == UNTRIED for one in result.get("contenders", ()))


def _gather(output: Path, seconds: float) -> None:
    """Write the record of all stored parts, and list the missing parts of the plan."""
    results = pages.all_stored(output / "parts")
    raced = [one for one in results if one.get("kind") == "part"]
    done = {_part_of(one).id for one in raced if "error" not in one and UNFINISHED not in one}
    order = {part.id: place for place, part in enumerate(planned())}
    machine = next((one for one in results if one.get("kind") == "machine" and "error" not in one), None)
    if machine is None:
        return
    made = {
        "command": shlex.join(["python", "bench/gpu.py", *sys.argv[1:]]),
        "minutes": seconds / 60,
        "environment": machine["environment"],
        "rates": machine["rates"],
        "tests": pages.stored(output / "parts", "tests"),
        "checks": (pages.stored(output / "parts", "checks") or {}).get("checks", {}),
        "verified": [one for one in results if one.get("kind") == "verification"],
        "parts": sorted(raced, key=lambda one: order.get(_part_of(one).id, len(order))),
        "left": [name for name in order if name not in done],
    }
    pages.write_record(output / pages.RECORD, made)


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


def plan(options: argparse.Namespace) -> str:
    """The stages with the second at which each must end, and their parts in order."""
    lines, end = list[str](), options.budget - min(RESERVE, options.budget / 10)
    for stage, deadline in allotted(stages(), 0.0, end):
        lines.append(f"{stage.name}, until second {deadline:.0f}" + ("" if stage.share else ", with what is left"))
        lines += [f"  {part.id}: {len(tries(part, torch.device(options.device)))} contenders" for part in stage.parts]
    return "\n".join([*lines, f"record and page, until second {options.budget:.0f}", ""])


def main(arguments: list[str] | None = None) -> int:
    """Measure, write and print; exit code 6 if a test failed or a kernel is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="folder of the parts, the record and the page")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help=f"what all stages share ({BUDGET:g})"
    )
    parser.add_argument("--plan", action="store_true", help="run nothing; print the order, and each stage's time")
    parser.add_argument("--tests", action="store_true", help="run pytest -m gpu first, for a sixth of the time")
    parser.add_argument("--only", default="*", metavar="GLOB", help="parts whose name matches")
    parser.add_argument("--lengths", type=pages.numbers, default=(256, *LENGTHS), help="tokens, separated by commas")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the page from the record")
    options = parser.parse_args(arguments)
    options.device = DEVICE
    if options.plan:
        sys.stdout.write(plan(options))
        return Exit.OK
    if options.output is None:
        parser.error("-o is missing: the folder of the parts, the record and the page")
    try:
        if not options.redraw:
            _check()
            run(options, Console(stderr=True))
        text = pages.write_page(report, options.output, options.output)
        made = pages.opened(options.output)
        if options.output.resolve() == SHIPPED:
            ship(made, VERIFIED)
    except ApproxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(text)
    return Exit.OK if right(made) else Exit.VERIFICATION


if __name__ == "__main__":
    sys.exit(main())
