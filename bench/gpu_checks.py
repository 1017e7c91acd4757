"""From the verifications of `bench/gpu.py` to checks per op: whether `auto` may use its kernels on this GPU."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from approx_kernels.dispatch.checked import OPS, Check, digest, identity, keep_check

# The ops whose kernels a mechanism may run: bidirectional, causal, and decoding.
RUN_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "flash": ("flash_attention", "flash"),
        "exact-topk": ("topk_attention",),
        "clustered": ("clustered_attention", "cluster_queries", "flash"),
        "improved-clustered": ("clustered_attention", "cluster_queries", "flash"),
        "linear": ("linear_attention",),
        "performer": ("performer_attention",),
        "local": ("local_attention", "flash"),
        "block": ("block_attention", "flash"),
        "strided": ("strided_attention", "flash"),
        "fixed": ("summary_attention", "flash"),
        "ltr": ("summary_attention", "flash"),
        "rtl": ("summary_attention", "flash"),
        "longformer": ("global_token_attention", "flash"),
        "sinks": ("global_token_attention", "flash"),
        "bigbird": ("bigbird_attention", "flash"),
        "lsh": ("lsh_attention", "flash"),
        "adaptive-span": ("adaptive_span_attention", "flash"),
    }
)
_CAUSAL = MappingProxyType({"clustered_attention": "causal_clustered_attention"})
_DECODED = MappingProxyType({"linear_attention": "linear_decode", "performer_attention": "performer_decode"})
# Ops whose kernels another op launches, and that no mechanism calls directly.
_WITHIN = MappingProxyType({"clustered_attention": ("cluster_queries",)})
# Ops that compute exact attention, with the contender that runs each: PyTorch's own is as right.
_EXACT = MappingProxyType({"flash_attention": "flash"})


def ops_of(suite: str, name: str) -> list[str]:
    """The ops that a contender verifies; none for peers."""
    ops = RUN_BY.get(name.partition(" ")[0], ())
    if suite == "decode":
        return [_DECODED.get(op, op) for op in ops]
    return [_CAUSAL.get(op, op) for op in ops] if suite == "attention-causal" else list(ops)


def sources(suite: str, name: str) -> dict[str, str]:
    """The subject of a verification: the sources and versions of each op."""
    return {op: identity(op) for op in ops_of(suite, name)}


def outdated(result: Mapping[str, Any]) -> bool:
    """Whether a verification is of other sources than the current ones; lost ones stay current until they are retried."""
    if result.get("kind") != "verification" or "error" in result:
        return False
    return result.get("sources") != sources(result["suite"], result["name"])


def checks(verified: Iterable[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> dict[str, Check]:
    """The checks of each op and dtype, from verifications.

    An op has failed if anything that may run it failed. It has passed if everything `wanted` that may run it is correct
    and some of it ran the kernels. Otherwise there is no check, and verifications of other sources do not count.

    Args:
        verified: The verifications: `suite`, `dtype`, `name`, `status` or `error`, `kernels` and `sources`.
        wanted: All required ones: `suite`, `dtype` and `name`.
    """
    known = {(one["suite"], one["dtype"], one["name"]): one for one in verified if not outdated(one)}
    by_op: dict[str, Check] = {}
    for op in OPS:
        passed, wrong = list[str](), dict[str, str]()
        for dtype in dict.fromkeys(one["dtype"] for one in wanted):
            asked = [(one["suite"], dtype, one["name"]) for one in wanted if one["dtype"] == dtype]
            rows = [(key, known.get(key)) for key in asked if op in ops_of(key[0], key[2])]
            failed = [(key, _status(row)) for key, row in rows if row is not None and _status(row) != "ok"]
            if failed:
                (suite, _, name), status = failed[0]
                wrong[dtype] = f"{name} in {suite} {status}"
            elif all(row is not None for _, row in rows) and any(_ran(op, row) for _, row in rows if row):
                passed.append(dtype)
        if passed or wrong:
            by_op[op] = Check(passed, wrong)
    return by_op


def _status(row: Mapping[str, Any]) -> str:
    return row.get("status") or row["error"]


def _ran(op: str, row: Mapping[str, Any]) -> bool:
    return any(op == ran or op in _WITHIN.get(ran, ()) for ran in row.get("kernels", ()))


def keep_all(results: Mapping[str, Sequence[Any]], device: torch.device) -> dict[str, Any]:
    """Store the check of each op where `auto` looks for it; ops without a new check keep theirs."""
    for op, (passed, wrong) in results.items():
        keep_check(op, str(device), Check(passed, wrong))
    return {"checks": {op: list(check) for op, check in results.items()}}


def shipped(record: Mapping[str, Any]) -> dict[str, Any]:
    """The ops whose kernels `auto` takes on all GPUs of the record's compute capability, as `verified.json` holds them.

    They are those whose current sources passed; of exact attention, those that are faster than PyTorch's somewhere.
    """
    environment, ops = record["environment"], dict[str, Any]()
    for op, (passed, _) in record["checks"].items():
        verified = {one["sources"][op].partition(",")[0] for one in record["verified"] if op in one.get("sources", {})}
        rows = [row for part in record["parts"] for row in part["contenders"] if row["name"] == _EXACT.get(op)]
        wins = op not in _EXACT or any((row.get("against_best") or [0.0])[0] > 1.0 for row in rows)
        if passed and wins and verified == {digest(op)}:
            ops[op] = {"of": digest(op), "passed": passed}
    versions = {name: environment[name] for name in ("gpu", "triton")}
    return {environment["capability"]: {**versions, "ptxas": _assembled_by(record), "ops": ops}}


def _assembled_by(record: Mapping[str, Any]) -> str:
    return next(iter(record["verified"][0]["sources"].values())).rpartition(" ")[2]


def ship(record: Mapping[str, Any], path: Path) -> None:
    """Write what a record verified to `verified.json`; other compute capabilities keep theirs."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(known | shipped(record), indent=1) + "\n", encoding="utf-8")
