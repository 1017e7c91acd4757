"""The page and the plot of `bench/gpu.py`, and the targets of the kernels on an H200 with what a record says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from approx_kernels.dispatch.checked import OPS
from approx_kernels.ops.flash.triton import FORWARD
from approx_kernels.ops.patterns.reference import bigbird_lists
from bench.cpu_cases import HEADS, SIZE, Case, mechanism_of
from bench.cpu_floor import limit, work_of
from bench.gpu_cases import ATTENTION, CAUSAL, LAYERS, LENGTHS, PACKAGES, PADDED, SUITES, TOKENS, of_suite
from bench.gpu_jobs import UNTRIED
from bench.pages import MODES, asked_and_found, draw, find, names, ratio, row, table

_SUITES = {
    "attention": "One layer's attention by itself",
    "attention-causal": "One layer's causal attention by itself",
    "attention-padded": "One layer's attention by itself, half of it padding",
    "roberta": "RoBERTa-base by its sizes",
    "roberta-padded": "RoBERTa-base by its sizes, half of the tokens padding",
    "gpt2": "GPT-2-small by its sizes, prefill",
    "decode": "GPT-2-small by its sizes, one token on top of so many",
}
_WAYS = {"graph": "as a CUDA graph", "eager": "eagerly"}
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


def right(made: dict[str, Any]) -> bool:
    """Whether no test failed, all of ours passed verification, and none was found wrong where it was to be timed."""
    ours = {case.name for suite in (*SUITES, "decode") for case in of_suite(suite, 1)}
    wrong = [one for one in made["verified"] if one["name"] in ours and one.get("status") != "ok"]
    rows = [row for part in made["parts"] for row in part["contenders"] if row["role"] == "variant"]
    wrong += [row for row in rows if row["status"].startswith("not timed: failed")]
    return not wrong and not (made["tests"] or {}).get("failed")


def report(made: dict[str, Any], output: Path) -> str:
    """The page of a record, in Markdown; its plot is written into a folder."""
    machine, picture = made["environment"], _drawn(made, output)
    text = [
        "# Attention on a GPU",
        f"{machine['gpu']}, {machine.get('memory_gb', 0):.0f} GB, driver {machine.get('driver') or 'unknown'}, CUDA "
        f"{machine.get('cuda')}, cuDNN {machine.get('cudnn')}, torch {machine['torch']}, triton {machine['triton']}, transformers "
        f"{machine['transformers']}, {_others(machine)}; {machine['processor']}. 12 heads of 64; {TOKENS:,} tokens a step where no "
        f"other batch is given. Models have {LAYERS} layers with random weights, without a head. All in one column took "
        "turns with SDPA; times are medians, ratios are how many times as fast, bold where the 95 % interval lies above 1 and above "
        "the noise: what SDPA differs from itself there, or a mechanism gains over no attention at all. "
        "Inputs are random, which clustering needs all its iterations for, and change from call to call, so that no cache "
        "holds them. The first call of each, which compiles, is timed apart. The best exact is the fastest of SDPA's back ends. "
        f"Made by `{made['command']}` in {made['minutes']:.0f} minutes.",
    ]
    if made["left"]:
        text.append(f"{len(made['left'])} parts of the plan were not measured; they stand at the end.")
    text += ["## Numbers to reach", "What was asked on an H200, then what was found."]
    text.append(table(["what", *(f"{length:,}" for length in LENGTHS)], judged(made)))
    if picture:
        text.append(f"![speed-up against length]({picture})")
    text += [*_tests(made), *_machine(made), *_checks(made), *_verified(made), *_floors(made)]
    text += [piece for suite in _SUITES for piece in _suite(made, suite)]
    failed = [f"- `{_outcome(one)}`: {one['error']}" for one in made["parts"] if "error" in one]
    text += ["## Parts that failed", "\n".join(failed)] if failed else []
    if made["left"]:
        text += ["## Not measured", "\n".join(f"- `{name}`" for name in made["left"])]
    return "\n\n".join(text) + "\n"


def _others(machine: dict[str, Any]) -> str:
    return ", ".join(f"{name} {machine.get(name) or 'not installed'}" for name in PACKAGES if name in machine)


def _outcome(one: dict[str, Any]) -> str:
    return f"{one['suite']}/{one['mode']}/{one['dtype']}/{one['length']}x{one['batch']}/{one['way']}"


def _tests(made: dict[str, Any]) -> list[str]:
    tests = made["tests"]
    if tests is None:
        return ["## Tests", "They were not run."]
    end = "" if tests["finished"] else f" They did not come to an end (exit code {tests['exit_code']})."
    text = ["## Tests", f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} were skipped.{end}"]
    return [*text, "\n".join(f"- {name}" for name in tests["failures"])] if tests["failures"] else text


def _machine(made: dict[str, Any]) -> list[str]:
    rates = made["rates"]
    rows = [[name, f"{rate / 1e12:.1f} TFLOP/s"] for name, rate in rates.items() if name != "copy"]
    seen = [one["watched"] for one in made["parts"] if one.get("watched")]
    text = [
        "## What the card can do",
        table(["what", "rate"], [*rows, ["copy, read and written", f"{rates['copy'] / 1e9:.0f} GB/s"]]),
    ]
    if seen:
        spans = [
            f"{key} {min(words, key=_number)} to {max(words, key=_number)}"
            for key in seen[0]
            if (words := [one[key] for one in seen if key in one])
        ]
        text.append(f"As nvidia-smi read it after each part: {', '.join(spans)}.")
    return text


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return 0.0


def _checks(made: dict[str, Any]) -> list[str]:
    """Which kernels `auto` uses from now on, according to the verifications."""
    checks = made.get("checks", {})
    rows = []
    for op in OPS:
        passed, wrong = checks.get(op, ((), {}))
        reasons = "; ".join(f"{dtype}: {why}" for dtype, why in wrong.items()) or "–"
        rows.append([f"`{op}`", ", ".join(passed) or "–", _cell(reasons)])
    return [
        "## What `auto` takes on this GPU",
        "The kernels of an op in the precisions in which all that runs them is right; PyTorch in all others, also in those where "
        "verification did not come to an end. Another run goes on with it.",
        table(["op", "kernels passed their check in", "kernels are wrong in"], rows, words=3),
    ]


def _verified(made: dict[str, Any]) -> list[str]:
    """One row per contender that ran kernels or is incorrect; the others are counted."""
    rows, fine = [], 0
    for one in made["verified"]:
        status = one.get("status") or one["error"]
        if status == "ok" and not one["kernels"]:
            fine += 1
            continue
        errors = [one.get("errors", {}).get(name) for name in ("out", "dq", "dk", "dv")]
        graphs = one.get("graphs") or {}
        rows.append(
            [
                f"`{one['name']}`",
                one["suite"],
                one["dtype"],
                ", ".join(one.get("kernels", [])) or "–",
                _cell(status),
                *(_cell(graphs.get(mode) or "–") for mode in ("forward", "train")),
                *("–" if pair is None else f"{pair[0]:.1e} of {pair[1]:.1e}" for pair in errors),
            ]
        )
    head = [
        "attention",
        "suite",
        "precision",
        "kernels",
        "found",
        "graph, forward",
        "graph, backward too",
        "out",
        "dq",
        "dk",
        "dv",
    ]
    return [
        "## Right before fast",
        "Root mean square errors against float64, relative, and what is allowed: six times what the plain computation in "
        "the same precision errs, or six roundings; of others, that they compute the same. A graph is compared with eager calls, bit "
        f"by bit. {fine} more, which run no kernel of ours, are right as well.",
        table(head, rows, words=7),
    ]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _floors(made: dict[str, Any]) -> list[str]:
    rows = []
    for suite, suffix in (("attention", ""), ("attention-causal", ", causal")):
        parts = {length: part_of(made, suite, "forward", length) for length in LENGTHS}
        for name in names([part for part in parts.values() if part]):
            ratios = [over_floor(made, parts[length], name) for length in LENGTHS]
            if any(ratios):
                rows.append([f"`{name}`{suffix}", *("–" if one is None else f"{one:.1f}" for one in ratios)])
    if not rows:
        return []
    return [
        "## Time ÷ floor",
        "Forward of attention by itself in bfloat16 as a CUDA graph, over the least time that its counted products take at the "
        "rates above, or its inputs and outputs at the rate of the copy, whichever is longer. Exponentials, sorting and choosing are "
        "not counted.",
        table(["attention", *(f"{length:,}" for length in LENGTHS)], rows),
    ]


def _suite(made: dict[str, Any], suite: str) -> list[str]:
    parts = [part for part in made["parts"] if part["suite"] == suite and part["contenders"]]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for part in parts:
        whole = suite != "decode" and part["batch"] == max(TOKENS // part["length"], 1) and part["length"] < TOKENS
        step = None if whole or part["length"] == TOKENS else part["batch"]
        groups.setdefault((part["mode"], part["dtype"], part["way"], step), []).append(part)
    text = [f"## {_SUITES[suite]}"] if groups else []
    for (mode, dtype, way, batch), chosen in groups.items():
        chosen = sorted(chosen, key=lambda part: part["length"])
        title = f"{MODES[mode]}, {dtype}, {_WAYS[way]}" + (f", batch {batch}" if batch else "")
        rows = [[f"`{name}`", *(_figure(part, name) for part in chosen)] for name in names(chosen)]
        untried = [row[0] for row in rows if set(row[1:]) == {"–"}]
        rows = [row for row in rows if row[0] not in untried]
        rows.append(["best exact attention", *(part["best_exact"] or "–" for part in chosen)])
        rows.append(
            ["SDPA against itself", *("–" if part["spread"] is None else f"{part['spread']:.2f}" for part in chosen)]
        )
        text += [
            f"### {title[0].upper()}{title[1:]}",
            "Milliseconds; against default SDPA / against the best exact."
            + (f" There was no time to try {', '.join(untried)}." if untried else ""),
            table(["attention", *(f"{part['length']:,}" for part in chosen)], rows),
        ]
    return text


def _figure(part: dict[str, Any], name: str) -> str:
    one = next((one for one in part["contenders"] if one["name"] == name), None)
    if one is None or one["status"] == UNTRIED:
        return "–"
    if one["status"] != "ok":
        return _cell(one["status"])
    return f"{one['median_ms']:.3g}; {ratio(part, name, 'against_sdpa')} / {ratio(part, name, 'against_best')}"


def _drawn(made: dict[str, Any], output: Path) -> str | None:
    """Speed-up over the best exact attention against length, one line per mechanism; returns the file name."""
    parts = [part for length in LENGTHS if (part := part_of(made, "attention", "forward", length))]
    lines: dict[str, list[tuple[int, float]]] = {}
    for part in parts:
        for name in names([part]):
            contender = row(part, name)
            if contender and contender["role"] in ("variant", "peer") and contender["against_best"]:
                lines.setdefault(name, []).append((part["length"], contender["against_best"][0]))
    if not lines:
        return None
    draw(lines, "times as fast as the best of SDPA, one layer's attention, bfloat16", output / "attention.svg")
    return "attention.svg"


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
    for suite, label, by_name in (("roberta", "RoBERTa-base", ENCODER), ("gpt2", "GPT-2-small, prefill", PREFILL)):
        for name, numbers in by_name.items():
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
            value = target.measured(made, length)
            cells.append(asked_and_found(value, target.asked[length], at_most=target.at_most))
        rows.append([target.what, *cells])
    return rows


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
