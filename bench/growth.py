"""How the cost of every mechanism grows with the length: time and peak memory of a forward, and their exponents.

    python bench/growth.py -o reports/growth

One layer's attention, batch 1, on random inputs: k-means converges slowest on random queries, so clustering uses
all its iterations. The exponent is the slope of a straight line through the logarithms of length and cost; 1 is
linear, 2 quadratic. Writes `record.json` and, from it, `report.md` and `growth.svg`; `--redraw` rebuilds only these
two.
"""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from approx.evaluation.record import environment
from approx.evaluation.timing import Neighbours, is_out_of_memory, memory_limit, peak_mb, timed
from approx.mechanisms import MECHANISMS
from bench.pages import figure, line, main, table

HEADS, SIZE = 4, 64
LENGTHS = tuple(2**power for power in range(10, 16))
LONGEST_EXACT = 2**13
SECONDS, LEAST, MOST = 4.0, 5, 25


class Case(NamedTuple):
    """A mechanism with its settings, and the exponent that it must not exceed; None for no limit."""

    mechanism: str
    bound: float | None
    settings: Mapping[str, Any] = MappingProxyType({})
    causal: bool = False

    @property
    def name(self) -> str:
        """The mechanism with its non-default settings."""
        words = [f"{key}={value}" for key, value in self.settings.items()]
        return " ".join([self.mechanism, *words, *(["causal"] if self.causal else [])])


CASES = (
    Case("full", None),
    Case("sdpa", None),
    Case("exact-topk", None),
    Case("linear", 1.1),
    Case("linear", 1.1, causal=True),
    Case("linear", 1.1, {"window": 64}, causal=True),
    Case("performer", 1.1),
    Case("performer", 1.1, causal=True),
    Case("clustered", 1.1),
    Case("improved-clustered", 1.1),
    Case("improved-clustered", 1.1, causal=True),
    Case("lsh", 1.1),
    Case("lsh", 1.1, causal=True),
    Case("local", 1.1),
    Case("local", 1.1, {"right": 0}, causal=True),
    Case("block", 1.1),
    Case("longformer", 1.1),
    Case("bigbird", 1.1),
    Case("sinks", 1.1, {"window": 252}, causal=True),
    Case("adaptive-span", 1.1, {"max_span": 256}),
    Case("strided", 1.6),
    Case("fixed", 1.6, {"stride": None}),
    # A stride that does not grow with the length costs a fraction of exact attention, so these promise nothing.
    Case("strided", None, causal=True),
    Case("fixed", None),
    Case("ltr", 1.6),
    Case("rtl", 1.6),
)


def measure(case: Case, length: int) -> dict[str, Any]:
    """Median and spread of the milliseconds of a forward pass, and its peak memory, at one length."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 1, HEADS, length, SIZE, generator=generator)
    kind = MECHANISMS[case.mechanism]
    settings = {**kind.published, **case.settings}
    mechanism = kind(HEADS, SIZE, causal=case.causal, scale=SIZE**-0.5, **settings).eval()
    device = torch.device("cpu")

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return mechanism(q, k, v)

    try:
        with memory_limit(device):
            call()
            times = [timed(call, 1, device).ms]
            while len(times) < LEAST or (sum(times) < 1e3 * SECONDS and len(times) < MOST):
                times.append(timed(call, 1, device).ms)
            peak = peak_mb(call, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"length": length, "status": "out of memory"}
    low, middle, high = statistics.quantiles(times, n=4)
    return {"length": length, "status": "ok", "ms": middle, "quartiles": [low, high], "peak_mb": peak}


def exponent(points: list[dict[str, Any]], cost: str) -> dict[str, float]:
    """Slope of log cost over log length, with its standard error."""
    lengths, costs = (np.log2([point[key] for point in points]) for key in ("length", cost))
    (slope, _), covariance = np.polyfit(lengths, costs, 1, cov=True)
    return {"slope": float(slope), "error": float(covariance[0, 0] ** 0.5)}


def record() -> dict[str, Any]:
    """Measure all cases."""
    neighbours = Neighbours()
    cases = []
    for case in track(CASES, "measuring", console=Console(stderr=True)):
        kind = MECHANISMS[case.mechanism]
        exact = kind.always_exact or kind.quadratic
        points = [measure(case, length) for length in LENGTHS if not exact or length <= LONGEST_EXACT]
        fitted = [point for point in points if point["status"] == "ok"]
        cases.append(
            {
                **case._asdict(),
                "settings": dict(case.settings),
                "name": case.name,
                "points": points,
                "time": exponent(fitted, "ms"),
                "memory": exponent(fitted, "peak_mb"),
            }
        )
    return {
        "command": "python bench/growth.py",
        "shape": {"batch": 1, "heads": HEADS, "head_dim": SIZE, "dtype": "float32"},
        "crowded": neighbours.crowded(),
        "cases": cases,
        "environment": environment(torch.get_num_threads()),
    }


def exceeds(case: dict[str, Any]) -> bool:
    """Whether time or memory grows faster than the case allows."""
    return case["bound"] is not None and max(case["time"]["slope"], case["memory"]["slope"]) > case["bound"]


def report(made: dict[str, Any], output: Path) -> str:
    """The page of a record, in Markdown; its plot is written into a folder."""
    draw(made, output / "growth.svg")
    lengths = sorted({point["length"] for case in made["cases"] for point in case["points"]})
    head = ["mechanism", "time grows as", "memory grows as", "bound", *(f"ms at {length:,}" for length in lengths)]
    rows = []
    for case in made["cases"]:
        by_length = {point["length"]: point for point in case["points"]}
        figures = [f"{by_length[n]['ms']:.3g}" if by_length.get(n, {}).get("status") == "ok" else "–" for n in lengths]
        slopes = [f"n^{case[cost]['slope']:.2f} ± {case[cost]['error']:.2f}" for cost in ("time", "memory")]
        bound = (
            "–" if case["bound"] is None else f"**{case['bound']}, exceeded**" if exceeds(case) else f"{case['bound']}"
        )
        rows.append([f"`{case['name']}`", *slopes, bound, *figures])
    machine, shape = made["environment"], made["shape"]
    note = "Other programs were using the cores.\n\n" if made["crowded"] else ""
    return (
        "# How cost grows with the length\n\n"
        f"One forward of one layer's attention: batch {shape['batch']}, {shape['heads']} heads of {shape['head_dim']}, "
        f"{shape['dtype']}, random inputs; median milliseconds on {machine['processor']}, {machine['threads']} threads, torch "
        f"{machine['torch']}. Exponents are fitted to all lengths shown, with their standard error; memory is the peak beyond "
        f"the inputs. Made by `{made['command']}`.\n\n{note}![time against length](growth.svg)\n\n"
        f"{table(head, rows)}\n"
    )


def draw(made: dict[str, Any], path: Path) -> None:
    """Time against length, both logarithmic, one line per case."""
    with figure(path) as axes:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for number, case in enumerate(made["cases"]):
            points = [point for point in case["points"] if point["status"] == "ok"]
            line(axes, number, case["name"], [(point["length"], point["ms"]) for point in points])
        axes.set_xlabel("tokens")
        axes.set_ylabel("milliseconds of a forward")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    # 1 if a bound is exceeded.
    sys.exit(any(exceeds(case) for case in main(__doc__, record, report)["cases"]))
