"""The targets of the kernels on an H200, and their state in a record of `bench/gpu.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from approx_kernels.ops.flash.triton import FORWARD
from approx_kernels.ops.patterns.reference import bigbird_lists
from bench.cpu_cases import HEADS, SIZE, Case, mechanism_of
from bench.cpu_floor import limit, work_of
from bench.gpu_cases import SUITES, TOKENS, of_suite
from bench.pages import asked_and_found
from bench.parts import find, row

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ATTENTION, CAUSAL, PADDED = SUITES
WINDOWS = ("local left=128 right=128", "local left=256 right=256")
IMPROVED = "improved-clustered iterations="
NAN = float("nan")
# Against the best of SDPA's back ends end to end, by length; NaN means no target.
ENCODER = {
    "linear": (1.06, 1.17, 1.38, 1.81, 2.67, 4.41),
    "performer": (0.98, 1.08, 1.27, 1.67, 2.46, 4.06),
    WINDOWS[0]: (1.03, 1.13, 1.34, 1.75, 2.58, 4.26),
    WINDOWS[1]: (NAN, 1.07, 1.26, 1.65, 2.44, 4.02),
    "bigbird": (NAN, 1.08, 1.27, 1.67, 2.46, 4.06),
    "clustered iterations=3": (1.03, 1.11, 1.25, 1.62, 2.40, 3.95),
    "clustered iterations=10": (1.00, 1.04, 1.11, 1.41, 2.08, 3.42),
    f"{IMPROVED}3": (0.9, 0.96, 1.07, 1.38, 2.04, 3.37),
    f"{IMPROVED}10": (NAN, 0.91, 0.96, 1.22, 1.81, 2.98),
    "lsh rounds=1": (0.96, 1.06, 1.25, 1.64, 2.42, 3.99),
    "lsh rounds=4": (NAN, NAN, NAN, 1.25, 1.84, 3.03),
}
PREFILL = {"linear": (1.00, 1.06, 1.17, 1.39, 1.83, 2.71)}
# Largest time over floor.
FLOORS = {
    name: most
    for name in ("linear", *WINDOWS, "bigbird", "clustered iterations=3", f"{IMPROVED}3")
    if (most := limit(name)) is not None
}
# Queries that a tensor core multiplies at once with keys of a window.
TILE = 128
# Tokens in the cache and batch -> speed-up over exact attention with a cache that does not grow.
DECODING = {(1024, 32): 1.6, (4096, 32): 4.0, (1024, 1): 1.0}


class Target(NamedTuple):
    """A target at some lengths: its description, the number by length, and how to measure it, None if it was not measured."""

    what: str
    asked: dict[int, float]
    measured: Callable[[dict[str, Any], int], float | None]
    at_most: bool = False


def targets() -> list[Target]:
    """All of them, each at its lengths."""
    long = {length: 0.95 for length in LENGTHS if length >= 1024}
    wanted = [
        Target("own flash against cuDNN, forward", long, _against("forward", "sdpa cudnn", "flash")),
        Target(
            "own flash against FlashAttention-2, forward and backward",
            dict.fromkeys(LENGTHS, 1.0),
            _against("train", "sdpa flash", "flash"),
        ),
        Target(
            "own flash against SDPA with a mask, half of it padding",
            dict.fromkeys((512, 2048, 8192), 2.0),
            _against("forward", "sdpa", "flash", PADDED),
        ),
        Target("linear, share of the bandwidth of a copy", dict.fromkeys(LENGTHS, 0.6), _bandwidth),
        Target("causal linear against fla, forward", dict.fromkeys(LENGTHS, 1.8), _against_fla("forward")),
        Target("causal linear against fla, forward and backward", dict.fromkeys(LENGTHS, 1.3), _against_fla("train")),
    ]
    for name in (*WINDOWS, "bigbird"):
        what = f"`{name}`, rate on computed blocks over the own dense one"
        wanted.append(Target(what, dict.fromkeys(LENGTHS[2:], 0.85), _dense_share(name)))
    for name, most in FLOORS.items():
        asked = {length: most for length in LENGTHS if not (name == WINDOWS[1] and length < 1024)}
        wanted.append(Target(f"`{name}`, time over floor, at most", asked, _over_floor(name), at_most=True))
    for suite, label, table in (("roberta", "RoBERTa-base", ENCODER), ("gpt2", "GPT-2-small, prefill", PREFILL)):
        for name, numbers in table.items():
            asked = {length: least for length, least in zip(LENGTHS, numbers, strict=True) if least == least}
            wanted.append(Target(f"{label}, `{name}` against the best SDPA", asked, _end_to_end(suite, name)))
    for (length, batch), least in DECODING.items():
        what = f"GPT-2-small, one token, batch {batch}, `linear` against SDPA with a static cache"
        wanted.append(Target(what, {length: least}, _decoding(batch)))
    return wanted


def judged(made: dict[str, Any]) -> list[list[str]]:
    """One row per target: its description, and by length the target, the result, and whether it was reached."""
    rows = []
    for target in targets():
        cells = []
        for length in LENGTHS:
            if length not in target.asked:
                cells.append("–")
                continue
            value, asked = target.measured(made, length), target.asked[length]
            cells.append(_at_most(value, asked) if target.at_most else asked_and_found(value, asked))
        rows.append([target.what, *cells])
    return rows


def _at_most(value: float | None, most: float) -> str:
    if value is None:
        return f"{most:g}: not measured"
    return f"{most:g}: {value:.2f}, {'reached' if value <= most else 'not reached'}"


def part_of(
    made: dict[str, Any], suite: str, mode: str, length: int, batch: int | None = None, way: str = "graph"
) -> dict[str, Any] | None:
    """A part in bfloat16, by default at the common number of tokens per step."""
    batch = max(TOKENS // length, 1) if batch is None else batch
    return find(made, suite=suite, mode=mode, dtype="bfloat16", length=length, batch=batch, way=way)


def floor_ms(made: dict[str, Any], case: Case, part: dict[str, Any]) -> float | None:
    """Minimum milliseconds of one layer's attention at the card's product and copy rates; None if unknown."""
    rates, width = made["rates"], getattr(torch, part["dtype"]).itemsize
    if part["dtype"] not in rates:
        return None
    work = work_of(case, part["length"], part["suite"] == CAUSAL, TILE)
    seconds = work.flops / rates[part["dtype"]] + work.signs / rates.get("int8", rates[part["dtype"]])
    return 1e3 * part["batch"] * part["length"] * HEADS * max(seconds, work.numbers * width / rates["copy"])


def over_floor(made: dict[str, Any], part: dict[str, Any] | None, name: str) -> float | None:
    """Time over floor of one of our mechanisms, or of SDPA; None if either is unknown, as with padding."""
    if part is None or part["suite"] == PADDED or (contender := row(part, name)) is None:
        return None
    known = [Case("sdpa", "sdpa", {}), *of_suite(part["suite"], 1)]
    case = next((case for case in known if case.name == ("sdpa" if contender["role"] == "exact" else name)), None)
    least = None if case is None else floor_ms(made, case, part)
    return None if least is None else contender["median_ms"] / least


_Measure = Callable[[dict[str, Any], int], float | None]


def _against(mode: str, other: str, name: str, suite: str = ATTENTION) -> _Measure:
    def ratio(made: dict[str, Any], length: int) -> float | None:
        part = part_of(made, suite, mode, length)
        theirs, ours = row(part, other), row(part, name)
        return None if theirs is None or ours is None else theirs["median_ms"] / ours["median_ms"]

    return ratio


def _against_fla(mode: str) -> _Measure:
    def ratio(made: dict[str, Any], length: int) -> float | None:
        part = part_of(made, CAUSAL, mode, length)
        names = [] if part is None else [one["name"] for one in part["contenders"] if one["name"].startswith("fla ")]
        theirs = [one["median_ms"] for name in names if (one := row(part, name))]
        ours = row(part, "linear")
        return min(theirs) / ours["median_ms"] if theirs and ours else None

    return ratio


def _bandwidth(made: dict[str, Any], length: int) -> float | None:
    ours = row(part_of(made, ATTENTION, "forward", length), "linear")
    # Queries, keys, values and outputs, once, in 16 bits.
    return None if ours is None else 4 * 2 * TOKENS * HEADS * SIZE / (ours["median_ms"] / 1e3) / made["rates"]["copy"]


def _dense_share(name: str) -> _Measure:
    def ratio(made: dict[str, Any], length: int) -> float | None:
        part = part_of(made, ATTENTION, "forward", length)
        ours, dense = row(part, name), row(part, "flash")
        if ours is None or dense is None:
            return None
        return computed_pairs(name, length) / length**2 * dense["median_ms"] / ours["median_ms"]

    return ratio


def computed_pairs(name: str, length: int) -> int:
    """Pairs of queries and keys in all tiles that the flash kernel computes for one head of a sparse mechanism."""
    case = next(case for case in of_suite(ATTENTION, 1) if case.name == name)
    mechanism = mechanism_of(case, False)
    if case.mechanism == "bigbird":
        blocks = -(-length // mechanism.block)
        lists = bigbird_lists(blocks, mechanism.draws, False)
        return sum(len(keys) or blocks for keys in lists) * mechanism.block**2
    rows, columns = (FORWARD["narrow"][0].tiles[size] for size in ("BM", "BN"))
    pairs = 0
    for first in range(0, length, rows):
        begin = max(first - mechanism.left, 0) // columns
        end = -(-min(min(first + rows, length) + mechanism.right, length) // columns)
        pairs += (end - begin) * columns * rows
    return pairs


def _over_floor(name: str) -> _Measure:
    return lambda made, length: over_floor(made, part_of(made, ATTENTION, "forward", length), name)


def _end_to_end(suite: str, name: str) -> _Measure:
    def ratio(made: dict[str, Any], length: int) -> float | None:
        # Eager if the model cannot be captured as a graph.
        ways = (part_of(made, suite, "forward", length, way=way) for way in ("graph", "eager"))
        ours = next((one for part in ways if (one := row(part, name))), None)
        return None if ours is None or ours["against_best"] is None else ours["against_best"][0]

    return ratio


def _decoding(batch: int) -> _Measure:
    def ratio(made: dict[str, Any], length: int) -> float | None:
        ways = (part_of(made, "decode", "forward", length, batch, way) for way in ("graph", "eager"))
        ours = next((one for part in ways if (one := row(part, "linear"))), None)
        return None if ours is None or ours["against_sdpa"] is None else ours["against_sdpa"][0]

    return ratio
