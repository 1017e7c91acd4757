"""The targets of the CPU work, and their state in a record of `bench/cpu.py`."""

from typing import Any, NamedTuple

import numpy as np

from bench.cpu_cases import CEILING, EXACT, REFERENCES
from bench.cpu_peers import COUNTERPARTS
from bench.pages import asked_and_found
from bench.parts import find, noise, row


class Target(NamedTuple):
    """Smallest end-to-end speed-up by length, over default SDPA and over the best exact attention."""

    suite: str
    name: str
    dtype: str
    against_sdpa: tuple[float, ...]
    against_best: tuple[float, ...] = ()
    batch: int = 1


LENGTHS = (512, 1024, 2048, 4096, 8192)
TARGETS = (
    Target("roberta", "exact", "bfloat16", (1.25, 1.35, 1.6, 2.1, 2.2)),
    Target("roberta", "linear", "bfloat16", (1.45, 1.75, 2.6, 4.6, 8.3), (1.17, 1.33, 1.65, 2.15, 3.9)),
    Target("roberta", "local left=128 right=128", "bfloat16", (1.3, 1.55, 2.25, 3.8, 7.0), (1.05, 1.2, 1.4, 1.75, 3.2)),
    Target("roberta", "clustered iterations=3", "bfloat16", (1.38, 1.6, 2.35, 4.0, 7.4), (1.1, 1.2, 1.45, 1.85, 3.4)),
    Target(
        "roberta", "improved-clustered iterations=3", "bfloat16", (1.2, 1.3, 2.0, 3.7, 6.6), (0.95, 1.0, 1.2, 1.7, 3.0)
    ),
    Target("gpt2", "linear", "bfloat16", (1.4, 1.45, 1.8, 2.45, 4.0)),
    Target("decode", "linear", "float32", (1.25, 2.5, 4.0, 7.0), batch=8),
)
# Share of the speed-up without any attention, at 4,096 tokens.
SHARES = {
    "linear": 0.9,
    "local left=128 right=128": 0.75,
    "clustered iterations=3": 0.75,
    "improved-clustered iterations=3": 0.7,
}
THREADS, SHARED_AT, LONGEST_GB, EXPONENT = 2, 4096, 24, 1.1
RACED_IDIAP = (512, 1024, 2048, 4096)


def share(part: dict[str, Any] | None, name: str) -> float | None:
    """The speed-up of a contender over that without attention."""
    timed, free = row(part, name), row(part, CEILING)
    return None if timed is None or free is None else timed["against_sdpa"][0] / free["against_sdpa"][0]


def judged(made: dict[str, Any]) -> list[list[str]]:
    """One row per target: its name; for each length the target, the result and whether it was reached; and why not."""
    lines = []
    for target in TARGETS:
        for key, asked in (("against_sdpa", target.against_sdpa), ("against_best", target.against_best)):
            cells: list[str] = []
            reasons: dict[str, list[str]] = {}
            for length, least in zip(LENGTHS, asked, strict=False):
                place = {"suite": target.suite, "mode": "forward", "dtype": target.dtype, "threads": THREADS}
                part = find(made, **place, length=length, batch=target.batch)
                contender = row(part, target.name)
                cells.append(asked_and_found(None if contender is None else contender[key][0], least))
                if part and contender and contender[key][0] < least:
                    reason, figure = _why(part, contender, key, least)
                    reasons.setdefault(reason, []).append(f"{figure} ({length:,})")
            if cells:
                where = {"roberta": "encoder", "gpt2": "GPT-2 prefill", "decode": f"GPT-2 decode, batch {target.batch}"}
                against = "default SDPA" if key == "against_sdpa" else "best exact"
                cells += ["–"] * (len(LENGTHS) - len(cells))
                why = "; ".join(f"{reason} {', '.join(figures)}" for reason, figures in reasons.items())
                lines.append([where[target.suite], f"`{target.name}`", target.dtype, against, *cells, why or "–"])
    return lines


def _why(part: dict[str, Any], contender: dict[str, Any], key: str, least: float) -> tuple[str, str]:
    """The reason why a contender misses its target (noise, the rest of the model, or itself), and the figure that shows it."""
    if contender[key][0] * noise(part) >= least:
        return "within the noise of", f"{noise(part) - 1:.1%}"
    free = row(part, CEILING)
    if free is None:
        return "no attention at all", "not measured"
    subject = "no attention at all" + ", its cache still copied," * (part["suite"] == "decode")
    if free[key][0] < least:
        return f"{subject} reaches", f"{free[key][0]:.2f}"
    return f"share of what {subject} reaches:", f"{contender[key][0] / free[key][0]:.2f}"


def other_targets(made: dict[str, Any]) -> list[list[str]]:
    """The other targets: share of the ceiling, peers, growth of memory, the longest input."""
    lines = []
    for name, least in SHARES.items():
        for dtype in ("float32", "bfloat16"):
            place = {"suite": "roberta", "mode": "forward", "dtype": dtype, "threads": THREADS, "length": SHARED_AT}
            what = f"share of the ceiling at {SHARED_AT:,} tokens, `{name}`, {dtype}"
            ratio = share(find(made, **place), name)
            alone = row(find(made, **{**place, "suite": "attention"}), name)
            why = f": by itself it is {alone['against_sdpa'][0]:.1f} times as fast as default SDPA" if alone else ""
            lines.append([what, asked_and_found(ratio, least) + why * (ratio is not None and ratio < least)])
    raced, outcome = _idiap(made)
    what = "faster than idiap's fast-transformers, attention only, one thread, 512 to 4,096 tokens"
    lines.append([f"{what}: {', '.join(raced)}" if raced else what, outcome])
    grown = exponents(made)
    over = [f"`{name}` n^{slope:.2f}" for name, slope in grown.items() if slope > EXPONENT]
    outcome = "not measured" if not grown else f"not reached: {', '.join(over)}" if over else "reached"
    lines.append([f"peak memory of an approximation grows as n^{EXPONENT} at most", outcome])
    failed = [one["name"] for one in made["longest"] if not fits(one)]
    outcome = (
        "not measured" if not made["longest"] else "reached" if not failed else f"not reached: {', '.join(failed)}"
    )
    lines.append([f"65,536 tokens through twelve layers in {LONGEST_GB} GB, of what was run", outcome])
    return lines


def fits(one: dict[str, Any]) -> bool:
    """Whether a run of the longest input, including weights, stayed within the memory."""
    return one["status"] == "ok" and one["peak_mb"] + one["weights_mb"] <= 1e3 * LONGEST_GB


def exponents(made: dict[str, Any]) -> dict[str, float]:
    """The slope of log memory over log length of one layer's attention, for each approximation."""
    points: dict[str, list[tuple[int, float]]] = {}
    for part in made["parts"]:
        if (part["suite"], part["mode"], part["dtype"], part["threads"]) == (
            "attention",
            "forward",
            "float32",
            THREADS,
        ):
            for one in part["contenders"]:
                exact = one["name"] in (*EXACT, *REFERENCES)
                # Below this, buffers of a fixed size dominate.
                if one["role"] == "variant" and one["status"] == "ok" and not exact and part["length"] >= 1024:
                    points.setdefault(one["name"], []).append((part["length"], one["peak_mb"]))
    enough = {name: np.log2(seen) for name, seen in points.items() if len(seen) >= 3 and min(seen)[1] > 0}
    return {name: float(np.polyfit(seen[:, 0], seen[:, 1], 1)[0]) for name, seen in enough.items()}


def against_peers(made: dict[str, Any], counterparts: dict[str, str]) -> list[dict[str, Any]]:
    """Each peer in each part, and the relative speed of our counterpart."""
    races = []
    for part in made["parts"]:
        for one in part["contenders"]:
            ours = row(part, counterparts.get(one["name"], ""))
            if one["role"] == "peer" and one["status"] == "ok" and ours:
                ratio = one["median_ms"] / ours["median_ms"]
                races.append({**part, "peer": one["name"], "ours": ours["name"], "ratio": ratio})
    return races


def _idiap(made: dict[str, Any]) -> tuple[list[str], str]:
    """The mechanisms of idiap that ran against ours, and whether ours was faster than each."""
    races = [
        one
        for one in against_peers(made, dict(COUNTERPARTS))
        if one["peer"].startswith("idiap") and one["threads"] == 1 and one["mode"] == "forward"
    ]
    if not races:
        return [], "not measured: it is not installed here"
    raced = list(dict.fromkeys(one["peer"].removeprefix("idiap ") for one in races))
    slower = [f"{one['peer']} at {one['length']:,}: {one['ratio']:.2f}" for one in races if one["ratio"] <= 1]
    missing = sorted(set(RACED_IDIAP) - {one["length"] for one in races})
    if missing:
        slower.append(f"not measured at {', '.join(f'{length:,}' for length in missing)}")
    return raced, f"not reached: {'; '.join(slower)}" if slower else "reached"
