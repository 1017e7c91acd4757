"""Every mechanism on a CPU, against default SDPA, the best exact attention, the ceiling and peers, paired in one run.

    python bench/cpu.py -o reports/cpu                        # what fits into 25 minutes; run again to continue
    python bench/cpu.py -o DIR --only 'roberta/forward/*' --lengths 512,4096 --threads 2
    python bench/cpu.py -o reports/cpu --only 'gpt2/*' --again    # measure these parts again
    python bench/cpu.py -o DIR --longest                      # also 65,536 tokens through twelve layers
    python bench/cpu.py -o reports/cpu --redraw               # rebuild the pages from the record

The work is divided into parts, SUITE/MODE/PRECISION/THREADS/LENGTH, such as roberta/forward/float32/2/4096 or, in
batches of eight, decode/forward/float32/2/4096x8. Suites: `attention` and `attention-causal` (attention of one layer),
`roberta`, `gpt2` (prefill) and `wav2vec2` (10 to 60 s) end to end, `decode` (one token of GPT-2),
`attention-grouped-64` and `-128` (one token of a layer whose 32 heads share the keys of 8). Modes: forward, train.
`--only` takes a quoted shell pattern for part names, in which * also matches slashes. `--longest` adds
longest/MECHANISM.

Within a part the contenders take turns, round by round. Parts run from cheapest to most expensive; each is stored in
DIR/parts with its commit as soon as it is done, and parts stored there or in DIR/record.json are not measured again
without `--again`: the same command continues where the last one ended. On one thread times are CPU time; on more they
are wall time, without repetitions that did not get the cores. Writes `record.json` and, from it, `report.md` and its
plots.
"""

import argparse
import datetime
import fnmatch
import gc
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
import torch
from rich.console import Console

from approx.errors import ApproxError, Exit
from approx.evaluation.record import environment
from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import OK, Neighbours, Runner, is_out_of_memory, memory_limit, peak_mb, race, timed
from approx_kernels.dispatch.findings import generation, instructions
from approx_kernels.dispatch.implementation import chosen, forget
from bench import cpu_cases, cpu_floor
from bench.cpu_cases import DTYPES, GROUPED, LENGTHS, LONGEST, THREADS, Part, planned
from bench.cpu_page import processor, report
from bench.pages import RECORD, all_stored, keep, numbers, opened, seed, spread_of, stored, write_page, write_record

CPU = torch.device("cpu")
LONGEST_LAYERS = 12
MINUTES = 25.0
# Minimum duration of a part's rounds. There are at least `ROUNDS`, or `FEW` if one takes longer than `LONG` seconds.
SECONDS, ROUNDS, FEW, LONG = 4.0, 5, 3, 2.0
WARM_UP_SECONDS = 0.1
QUICK: dict[str, Any] = {"minutes": 2.0, "lengths": (512, 1024), "dtypes": ("float32",), "seconds": 0.0}


def cost(part: Part, rates: dict[str, Any]) -> float:
    """Estimated seconds per round of all contenders, from counted operations and measured rates; used only for ordering."""
    tokens = part.batch if part.decoding else part.length
    hidden = cpu_cases.HEADS * cpu_cases.SIZE
    outside = 0 if part.suite.startswith("attention") else tokens * 24 * hidden**2
    each = cpu_cases.cases(part.causal, part.length, decoding=part.decoding)
    exact = cpu_cases.Case("", cpu_cases.SDPA, {})
    inside = [cpu_cases.mechanism_of(case, part.causal).flops(part.length) for case in [exact, exact, *each]]
    share = part.batch / part.length if part.decoding else 1
    flops = part.layers * sum(outside + share * one for one in inside) * (3 if part.mode == "train" else 1)
    return flops / rates[f"{part.dtype}/{part.threads}"]["flops"]


def measure(part: Part, seconds: float, rounds: int) -> dict[str, Any]:
    """Run all contenders of a part in turns."""
    begun, neighbours, train = time.perf_counter(), Neighbours(), part.mode == "train"
    torch.set_num_threads(part.threads)
    forget()
    dtype = getattr(torch, part.dtype)
    with torch.set_grad_enabled(train), memory_limit(CPU):
        if part.suite in GROUPED:
            cases = list(cpu_cases.grouped(part.suite, part.length, dtype, part.batch))
        elif part.suite.startswith("attention"):
            cases = list(cpu_cases.attention(part.length, dtype, causal=part.causal, train=train))
        else:
            cases = list(cpu_cases.model(part.suite, part.length, dtype, batch=part.batch, train=train))
        runners = {one.name: Runner(one.call, turns=2 if one.role == "base" else 1) for one in cases}
        race(list(runners.values()), CPU, rounds=rounds, seconds=seconds, warm_up_seconds=WARM_UP_SECONDS)
    exact = [name for name in cpu_cases.EXACT if name in runners and runners[name].status == OK]
    best = min(exact, key=lambda name: float(np.median(_times(runners[name], part.threads)[0])), default=None)
    base = runners[cpu_cases.SDPA]
    rows = []
    for one in cases:
        runner = runners[one.name]
        row: dict[str, Any] = {"name": one.name, "role": one.role, "status": runner.status}
        if runner.status == OK:
            ms, good = _times(runner, part.threads)
            shares = [sample.busy for turns in runner.rounds for sample in turns]
            row |= spread_of(ms[good])
            row |= {"accepted": int(good.sum()), "rejected": int((~good).sum()), "share": float(np.median(shares))}
            row |= {"first_ms": runner.first_ms, "peak_mb": runner.peak_mb}
            row["against_sdpa"] = _ratio(base, runner, part.threads)
            row["against_best"] = None if best is None else _ratio(runners[best], runner, part.threads)
        rows.append(row)
    (first, second), _ = base.by_turn() if base.status == OK else ((np.ones(1), np.ones(1)), None)
    return {
        **part._asdict(),
        "layers": part.layers,
        "clock": "processor" if part.threads == 1 else "wall",
        "best_exact": best,
        "spread": float(np.median(first) / np.median(second)),
        "crowded": part.threads > 1 and neighbours.crowded(),
        "took_s": time.perf_counter() - begun,
        # The last implementation of each op.
        "chosen": chosen(),
        "contenders": rows,
    }


def _times(runner: Runner, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of each round and which are valid; on one thread this is CPU time, and all are."""
    if threads > 1:
        return runner.by_round()
    ms = np.array([statistics.mean(sample.ms * sample.busy for sample in turns) for turns in runner.rounds])
    return ms, np.ones(len(ms), dtype=bool)


def _ratio(base: Runner, other: Runner, threads: int) -> list[float] | None:
    """Ratio of base to other with its interval, over the rounds in which both are valid."""
    if base.status != OK or other.status != OK:
        return None
    (first, good), (second, fine) = _times(base, threads), _times(other, threads)
    both = good & fine if (good & fine).sum() >= FEW else np.ones_like(good)
    low, high = ratio_interval(first[both].tolist(), second[both].tolist())
    return [float(np.median(first[both]) / np.median(second[both])), low, high]


def longest(case: cpu_cases.Case, threads: int) -> dict[str, Any]:
    """One forward pass of 65,536 tokens through twelve base-sized layers: its time, and its memory without model and input."""
    torch.set_num_threads(threads)
    row: dict[str, Any] = {"suite": "longest", "name": case.name, "layers": LONGEST_LAYERS, "length": LONGEST}
    row |= {"threads": threads, "dtype": "float32", "status": OK}
    base = cpu_cases.build("roberta", LONGEST_LAYERS, LONGEST)
    weights = sum(parameter.nbytes for parameter in base.parameters()) / 1e6
    model = cpu_cases.converted(base.eval(), case)
    ids = torch.randint(5, 1000, (1, LONGEST), generator=torch.Generator().manual_seed(0))
    seen: list[float] = []
    try:
        with torch.inference_mode(), memory_limit(CPU):
            peak = peak_mb(lambda: seen.append(timed(lambda: model(ids), 1, CPU).ms), CPU)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return row | {"status": "out of memory"}
    return row | {"ms": seen[0], "peak_mb": peak, "weights_mb": weights}


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure the requested parts that are not stored yet, within the time limit; then assemble the record.

    Raises:
        ApproxError: if the folder holds the record of another processor.
    """
    folder, begun = options.output / "parts", time.perf_counter()
    take_up(options.output)
    rates: dict[str, Any] = {}
    for threads in options.threads:
        for dtype in (*options.dtypes, cpu_floor.SIGNS):
            key = f"{dtype}/{threads}"
            rates[key] = stored(folder, f"rates/{key}")
            if rates[key] is None:
                rates[key] = {**circumstances(), **cpu_floor.calibrate(dtype, threads)}
                keep(folder, f"rates/{key}", rates[key])
    parts = [part for part in planned(options.threads, options.dtypes, options.lengths) if _asked(part.id, options)]
    ordered = sorted(((cost(part, rates), part) for part in parts), key=lambda each: each[0])
    if not parts and not options.longest:
        console.print(f"No part of the plan is called {options.only!r}, so nothing is measured.", highlight=False)
    for place, (turn, part) in enumerate(ordered):
        if stored(folder, part.id) and not options.again:
            continue
        rounds = ROUNDS if turn < LONG else FEW
        # Warm-up, memory and rounds, at half the speed of a plain product, and building the models.
        expected = 5 + options.seconds + 2 * turn * (rounds + 4)
        if time.perf_counter() - begun + expected > 60 * options.minutes:
            left = sum(options.again or stored(folder, other.id) is None for _, other in ordered[place:])
            console.print(f"The minutes are used up; {left} parts are left. Run the same command again to go on.")
            break
        console.print(f"{place + 1}/{len(ordered)} {part.id}", highlight=False)
        keep(folder, part.id, {**circumstances(), **measure(part, options.seconds, rounds)})
        gc.collect()
    if options.longest:
        for case in cpu_cases.cases(False, LONGEST):
            name = f"longest/{case.name}"
            if _asked(name, options) and (options.again or not stored(folder, name)):
                console.print(name, highlight=False)
                keep(folder, name, {**circumstances(), **longest(case, max(options.threads))})
    gather(options.output)


def _asked(name: str, options: argparse.Namespace) -> bool:
    return fnmatch.fnmatchcase(name, options.only)


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _words(text: str) -> tuple[str, ...]:
    dtypes = tuple(text.split(","))
    if set(dtypes) - set(DTYPES):
        raise argparse.ArgumentTypeError(f"{text} was asked for; allowed are {', '.join(DTYPES)}")
    return dtypes


def name_of(result: dict[str, Any]) -> str:
    """The name under which a result is stored."""
    if "contenders" in result:
        return Part(**{name: result[name] for name in Part._fields}).id
    if "flops" in result:
        return f"rates/{result['dtype']}/{result['threads']}"
    return f"longest/{result['name']}"


def circumstances() -> dict[str, Any]:
    """Properties that may differ between the parts of a record: commit, time, versions, processor, and the command."""
    now = environment()
    return {
        **{name: now[name] for name in ("git_commit", "torch", "transformers", "processor")},
        "instructions": instructions(),
        **generation(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def take_up(output: Path) -> None:
    """Store the parts that the record of a folder has and its part files lack, as in a fresh checkout.

    Raises:
        ApproxError: if it is the record of another processor.
    """
    path = output / RECORD
    if not path.is_file():
        return
    made, here = opened(output), circumstances()
    then = made["environment"]
    # Older records lack the family and model numbers.
    if any(then.get(name, here[name]) != here[name] for name in ("processor", "instructions", *generation())):
        raise ApproxError(
            f"{path} holds what was measured on {processor(then)}, and this is {processor(here)}. Take another folder with -o.",
            Exit.REFUSED,
        )
    seed(output / "parts", {name_of(one): one for one in (*made["rates"], *made["parts"], *made["longest"])})


def gather(output: Path) -> None:
    """Write the record of all stored parts, and list the missing parts of the plan."""
    results = {name_of(one): one for one in all_stored(output / "parts")}
    machine = environment()
    # Each part names its commit.
    del machine["git_commit"]
    made = {
        "command": _command(),
        "rates": [one for one in results.values() if "flops" in one],
        "parts": [one for one in results.values() if "contenders" in one],
        "longest": [one for one in results.values() if one.get("suite") == "longest"],
        "left": left(set(results)),
        "environment": {**machine, "instructions": instructions(), **generation()},
    }
    write_record(output / RECORD, made)


def left(done: set[str]) -> list[str]:
    """The parts of the plan that are missing, in order."""
    longest = [f"longest/{case.name}" for case in cpu_cases.cases(False, LONGEST)]
    return [name for name in (*(part.id for part in planned(THREADS, DTYPES, LENGTHS)), *longest) if name not in done]


def _command() -> str:
    return shlex.join(["python", "bench/cpu.py", *sys.argv[1:]])


def main() -> int:
    """Measure, write and print; a non-zero exit code if the folder is another processor's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the parts, the record and the page; one a processor",
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="parts whose name matches (all)")
    parser.add_argument("--lengths", type=numbers, metavar="N,N", help=f"tokens ({_listed(LENGTHS)})")
    parser.add_argument("--dtypes", type=_words, metavar="NAME,NAME", help=f"precisions ({_listed(DTYPES)})")
    parser.add_argument(
        "--threads",
        type=numbers,
        default=THREADS,
        metavar="N,N",
        help=f"numbers of threads; training and bfloat16 decoding take the greatest alone ({_listed(THREADS)})",
    )
    parser.add_argument("--minutes", type=float, metavar="N", help=f"begin no part that would end later ({MINUTES:g})")
    parser.add_argument("--again", action="store_true", help="measure what is asked for even where it is kept")
    parser.add_argument("--longest", action="store_true", help="65,536 tokens through twelve layers too, however long")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a look, not a measurement: {QUICK['minutes']:g} minutes, {_listed(QUICK['lengths'])} tokens, "
        f"{_listed(QUICK['dtypes'])}, {ROUNDS} rounds however short; other options override these",
    )
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the pages from the record")
    options = parser.parse_args()
    usual = {"minutes": MINUTES, "lengths": LENGTHS, "dtypes": DTYPES, "seconds": SECONDS}
    for name, value in (usual | QUICK if options.quick else usual).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    try:
        if not options.redraw:
            run(options, Console(stderr=True))
        sys.stdout.write(write_page(report, options.output, options.output))
    except ApproxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
