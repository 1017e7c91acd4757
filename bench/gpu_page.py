"""The page and the plot made from a record of `bench/gpu.py`."""

import json
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx_kernels.dispatch.checked import OPS
from bench.gpu_cases import SUITES, TOKENS, of_suite
from bench.gpu_jobs import UNTRIED
from bench.gpu_models import LAYERS
from bench.gpu_peers import PACKAGES
from bench.gpu_targets import LENGTHS, judged, over_floor, part_of
from bench.pages import draw, ratio, table
from bench.parts import names, row

_SUITES = {
    "attention": "One layer's attention by itself",
    "attention-causal": "One layer's causal attention by itself",
    "attention-padded": "One layer's attention by itself, half of it padding",
    "roberta": "RoBERTa-base by its sizes",
    "roberta-padded": "RoBERTa-base by its sizes, half of the tokens padding",
    "gpt2": "GPT-2-small by its sizes, prefill",
    "decode": "GPT-2-small by its sizes, one token on top of so many",
}
_MODES = {"forward": "forward", "train": "forward and backward"}
_WAYS = {"graph": "as a CUDA graph", "eager": "eagerly"}


def write(source: Path, output: Path) -> tuple[str, bool]:
    """Write `report.md` and the plot into a folder from its own `record.json` or another's.

    Returns:
        The text, and whether all tests passed and all of our kernels are correct.

    Raises:
        ApproxError: if there is no record.
    """
    path = source / "record.json"
    if not path.is_file():
        raise ApproxError(
            f"{path} is not there. Run `python bench/gpu.py -o {source}` on a machine with a GPU.", Exit.UNAVAILABLE
        )
    made = json.loads(path.read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    text = report(made, _drawn(made, output))
    (output / "report.md").write_text(text, encoding="utf-8")
    return text, right(made)


def right(made: dict[str, Any]) -> bool:
    """Whether no test failed, all of ours passed verification, and none was found wrong where it was to be timed."""
    ours = {case.name for suite in (*SUITES, "decode") for case in of_suite(suite, 1)}
    wrong = [one for one in made["verified"] if one["name"] in ours and one.get("status") != "ok"]
    rows = [row for part in made["parts"] for row in part["contenders"] if row["role"] == "variant"]
    wrong += [row for row in rows if row["status"].startswith("not timed: failed")]
    return not wrong and not (made["tests"] or {}).get("failed")


def report(made: dict[str, Any], picture: str | None) -> str:
    """The record in Markdown."""
    machine = made["environment"]
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
        title = f"{_MODES[mode]}, {dtype}, {_WAYS[way]}" + (f", batch {batch}" if batch else "")
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
