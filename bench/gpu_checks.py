"""What the verifications of `bench/gpu.py` say of each op: whether `auto` may take its kernels on this GPU."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from approx_kernels.dispatch.checked import OPS, Check, identity, keep_check

# The ops whose kernels a mechanism may run, and nobody else's: bidirectional, causal, and token by token.
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
# Ops that launch what another one launches, and that no mechanism calls by themselves where kernels run.
_WITHIN = MappingProxyType({"clustered_attention": ("cluster_queries",)})


def ops_of(suite: str, name: str) -> list[str]:
    """The ops that a contender's verification speaks for; none for what is not ours."""
    ops = RUN_BY.get(name.partition(" ")[0], ())
    if suite == "decode":
        return [_DECODED.get(op, op) for op in ops]
    return [_CAUSAL.get(op, op) for op in ops] if suite == "attention-causal" else list(ops)


def sources(suite: str, name: str) -> dict[str, str]:
    """What a verification that runs now is about: the sources and versions of each op."""
    return {op: identity(op) for op in ops_of(suite, name)}


def outdated(found: Mapping[str, Any]) -> bool:
    """Whether what was verified is no longer what is there; what was lost altogether counts until it is tried again."""
    if found.get("kind") != "verification" or "error" in found:
        return False
    return found.get("sources") != sources(found["suite"], found["name"])


def checks(verified: Iterable[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> dict[str, Check]:
    """What verifications say of each op and dtype.

    An op has failed where anything that may run it failed. It has passed where everything `wanted` that may run it is right and
    some of it ran the kernels. Of the rest nothing is said, and what was verified from other sources says nothing.

    Args:
        verified: What was verified: `suite`, `dtype`, `name`, `status` or `error`, `kernels` and `sources`.
        wanted: All that has to be: `suite`, `dtype` and `name`.
    """
    known = {(one["suite"], one["dtype"], one["name"]): one for one in verified if not outdated(one)}
    found: dict[str, Check] = {}
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
            found[op] = Check(passed, wrong)
    return found


def _status(row: Mapping[str, Any]) -> str:
    return row.get("status") or row["error"]


def _ran(op: str, row: Mapping[str, Any]) -> bool:
    return any(op == ran or op in _WITHIN.get(ran, ()) for ran in row.get("kernels", ()))


def keep_all(found: Mapping[str, Sequence[Any]], device: torch.device) -> dict[str, Any]:
    """Keep what was found of each op where `auto` looks for it; what was not checked stays as it is."""
    for op, (passed, wrong) in found.items():
        keep_check(op, str(device), Check(passed, wrong))
    return {"checks": {op: list(check) for op, check in found.items()}}
