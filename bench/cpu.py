"""Every mechanism on a CPU, against default SDPA, the best exact attention, the ceiling and peers, paired in one run.

    python bench/cpu.py -o reports/cpu                        # what fits into 25 minutes; again, to go on
    python bench/cpu.py -o DIR --only 'roberta/forward/*' --lengths 512,4096 --threads 2
    python bench/cpu.py -o DIR --longest                      # 65,536 tokens through twelve layers as well
    python bench/cpu.py -o reports/cpu --redraw               # pages from the record, nothing measured

The work is cut into parts, suite/mode/dtype/threads/length: `attention` and `attention-causal` (one layer's attention by
itself), `roberta`, `gpt2` (prefill) and `wav2vec2` (10 to 60 s) end to end, `decode` (one token of GPT-2). Within a part all
take turns, round by round. Parts run from the cheapest to the dearest, each is kept as soon as it is done, and what is
kept is not measured again. On one thread time is the processor's; on more it is the wall clock's, without repetitions
that did not get the cores. Written are `record.json` and, made from it, `report.md` and its pictures.
"""

import argparse
import fnmatch
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
import torch
from rich.console import Console

from approx.evaluation.memory import is_out_of_memory, memory_limit, peak_mb
from approx.evaluation.race import OK, Runner, race
from approx.evaluation.record import environment
from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import Neighbours, timed
from bench import cpu_cases, cpu_floor, cpu_page
from bench.parts import all_kept, keep, kept

CPU = torch.device("cpu")
LENGTHS, DTYPES, THREADS = (512, 1024, 2048, 4096, 8192), ("float32", "bfloat16"), (1, 2)
# Frames of 10, 30 and 60 s of sound.
FRAMES = (499, 1499, 2999)
LONGEST, LONGEST_LAYERS = 65_536, 12
MINUTES = 25.0
# The rounds of a part take so long at least. They are `ROUNDS` at least, or `FEW` where one takes longer than `LONG` seconds.
SECONDS, ROUNDS, FEW, LONG = 4.0, 5, 3, 2.0
WARM_UP_SECONDS = 0.1
QUICK = {"minutes": 2.0, "lengths": (512, 1024), "dtypes": ("float32",), "seconds": 0.0}


class Part(NamedTuple):
    """A race, or a measurement of one kind."""

    suite: str
    mode: str
    dtype: str
    threads: int
    length: int
    batch: int = 1

    @property
    def id(self) -> str:
        """What `--only` is matched with, and the name of the file in which it is kept."""
        length = f"{self.length}" if self.batch == 1 else f"{self.length}x{self.batch}"
        return f"{self.suite}/{self.mode}/{self.dtype}/{self.threads}/{length}"

    @property
    def causal(self) -> bool:
        """Whether a query sees its past alone."""
        return self.suite in ("attention-causal", "gpt2", "decode")

    @property
    def layers(self) -> int:
        """Layers that run."""
        return 1 if self.suite.startswith("attention") else cpu_cases.LAYERS


def planned(threads: tuple[int, ...], dtypes: tuple[str, ...], lengths: tuple[int, ...]) -> Iterator[Part]:
    """All parts. Training is timed on all threads, where it is done, and not at the greatest length."""
    for count in threads:
        for dtype in dtypes:
            for length in lengths:
                for suite in ("attention", "attention-causal", "roberta", "gpt2"):
                    yield Part(suite, "forward", dtype, count, length)
                    if count == max(threads) and length <= 4096:
                        yield Part(suite, "train", dtype, count, length)
                if length <= 4096 and (dtype == "float32" or count == max(threads)):
                    for batch in (1, 8):
                        yield Part("decode", "forward", dtype, count, length, batch)
            for frames in FRAMES:
                yield Part("wav2vec2", "forward", dtype, count, frames)
                if count == max(threads):
                    yield Part("wav2vec2", "train", dtype, count, frames)


def cost(part: Part, rates: dict[str, Any]) -> float:
    """Seconds that one turn of everybody takes, from counted operations and measured rates: for the order, not for a claim."""
    tokens = part.batch if part.suite == "decode" else part.length
    hidden = cpu_cases.HEADS * cpu_cases.SIZE
    outside = 0 if part.suite.startswith("attention") else tokens * 24 * hidden**2
    each = cpu_cases.cases(part.causal, part.length, decoding=part.suite == "decode")
    exact = cpu_cases.Case("", cpu_cases.SDPA, {})
    inside = [cpu_cases.mechanism_of(case, part.causal).flops(part.length) for case in [exact, exact, *each]]
    share = part.batch / part.length if part.suite == "decode" else 1
    flops = part.layers * sum(outside + share * one for one in inside) * (3 if part.mode == "train" else 1)
    return flops / rates[f"{part.dtype}/{part.threads}"]["flops"]


def measure(part: Part, seconds: float, rounds: int) -> dict[str, Any]:
    """Let all contenders of a part take turns."""
    begun, neighbours, train = time.perf_counter(), Neighbours(), part.mode == "train"
    torch.set_num_threads(part.threads)
    dtype = getattr(torch, part.dtype)
    with torch.set_grad_enabled(train), memory_limit(CPU):
        if part.suite.startswith("attention"):
            found = list(cpu_cases.attention(part.length, dtype, causal=part.causal, train=train))
        else:
            found = list(cpu_cases.model(part.suite, part.length, dtype, batch=part.batch, train=train))
        runners = {one.name: Runner(one.call, turns=2 if one.role == "base" else 1) for one in found}
        race(list(runners.values()), CPU, rounds=rounds, seconds=seconds, warm_up_seconds=WARM_UP_SECONDS)
    exact = [name for name in (cpu_cases.SDPA, "exact", "full") if name in runners and runners[name].status == OK]
    best = min(exact, key=lambda name: float(np.median(_times(runners[name], part.threads)[0])), default=None)
    base = runners[cpu_cases.SDPA]
    rows = []
    for one in found:
        runner = runners[one.name]
        row: dict[str, Any] = {"name": one.name, "role": one.role, "status": runner.status}
        if runner.status == OK:
            ms, good = _times(runner, part.threads)
            low, middle, high = (float(x) for x in np.quantile(ms[good], (0.1, 0.5, 0.9)))
            shares = [sample.busy for turns in runner.rounds for sample in turns]
            row |= {"median_ms": middle, "p10_ms": low, "p90_ms": high, "least_ms": float(ms[good].min())}
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
        "contenders": rows,
    }


def _times(runner: Runner, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of each round and which to believe: the processor's time on one thread, all of which count."""
    if threads > 1:
        return runner.by_round()
    ms = np.array([statistics.mean(sample.ms * sample.busy for sample in turns) for turns in runner.rounds])
    return ms, np.ones(len(ms), dtype=bool)


def _ratio(base: Runner, other: Runner, threads: int) -> list[float] | None:
    """Base over other with its interval, over the rounds in which both are to be believed."""
    if base.status != OK or other.status != OK:
        return None
    (first, good), (second, fine) = _times(base, threads), _times(other, threads)
    both = good & fine if (good & fine).sum() >= FEW else np.ones_like(good)
    low, high = ratio_interval(first[both].tolist(), second[both].tolist())
    return [float(np.median(first[both]) / np.median(second[both])), low, high]


def longest(case: cpu_cases.Case, threads: int) -> dict[str, Any]:
    """One forward of 65,536 tokens through twelve base-sized layers: its time, and the memory beyond model and input."""
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
    """Measure what is asked for and not kept yet, as far as the minutes reach; then put the record together."""
    folder, begun = options.output / "parts", time.perf_counter()
    rates: dict[str, Any] = {}
    for threads in options.threads:
        for dtype in options.dtypes:
            key = f"{dtype}/{threads}"
            rates[key] = kept(folder, f"rates/{key}") or cpu_floor.calibrate(dtype, threads)
            keep(folder, f"rates/{key}", rates[key])
    parts = [part for part in planned(options.threads, options.dtypes, options.lengths) if _asked(part.id, options)]
    ordered = sorted(((cost(part, rates), part) for part in parts), key=lambda each: each[0])
    for place, (turn, part) in enumerate(ordered):
        if kept(folder, part.id):
            continue
        rounds = ROUNDS if turn < LONG else FEW
        # Warm-up, memory and rounds, at half of the speed of a plain product, and making the models.
        expected = 5 + options.seconds + 2 * turn * (rounds + 4)
        if time.perf_counter() - begun + expected > 60 * options.minutes:
            left = sum(kept(folder, other.id) is None for _, other in ordered[place:])
            console.print(f"The minutes are used up; {left} parts are left. Run the same command again to go on.")
            break
        console.print(f"{place + 1}/{len(ordered)} {part.id}", highlight=False)
        keep(folder, part.id, measure(part, options.seconds, rounds))
        gc.collect()
    if options.longest:
        for case in cpu_cases.cases(False, LONGEST):
            name = f"longest/{case.name}"
            if _asked(name, options) and not kept(folder, name):
                console.print(name, highlight=False)
                keep(folder, name, longest(case, max(options.threads)))
    _gather(options.output, planned(THREADS, DTYPES, LENGTHS))


def _asked(name: str, options: argparse.Namespace) -> bool:
    return fnmatch.fnmatchcase(name, options.only)


def _gather(output: Path, everything: Iterator[Part]) -> None:
    """Write the record of all parts that are kept, and name those of the whole plan that are not."""
    found = all_kept(output / "parts")
    done = {Part(**{name: one[name] for name in Part._fields}).id for one in found if "contenders" in one}
    made = {
        "command": shlex.join(["python", "bench/cpu.py", *sys.argv[1:]]),
        "rates": [one for one in found if "flops" in one],
        "parts": [one for one in found if "contenders" in one],
        "longest": [one for one in found if one.get("suite") == "longest"],
        "left": sorted(part.id for part in everything if part.id not in done),
        "environment": environment(),
    }
    (output / "record.json").write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if set(found) - set(DTYPES):
        raise argparse.ArgumentTypeError(f"{text} was asked for; allowed are {', '.join(DTYPES)}")
    return found


def main() -> int:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder of the parts, the record and the pages"
    )
    parser.add_argument("--quick", action="store_true", help="two minutes: short inputs, float32")
    parser.add_argument("--only", default="*", metavar="GLOB", help="parts whose name matches")
    parser.add_argument("--lengths", type=_numbers, help="tokens, separated by commas")
    parser.add_argument("--dtypes", type=_words, help="float32,bfloat16")
    parser.add_argument("--threads", type=_numbers, default=THREADS, help="1,2")
    parser.add_argument("--minutes", type=float, help=f"begin no part that would end later ({MINUTES:g})")
    parser.add_argument("--longest", action="store_true", help="65,536 tokens through twelve layers too, however long")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the pages from the record")
    options = parser.parse_args()
    usual = {"minutes": MINUTES, "lengths": LENGTHS, "dtypes": DTYPES, "seconds": SECONDS}
    for name, value in (usual | QUICK if options.quick else usual).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if not options.redraw:
        run(options, Console(stderr=True))
    sys.stdout.write(cpu_page.write(options.output, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
