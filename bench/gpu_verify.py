"""Verification of kernels before timing: outputs and gradients against float64, CUDA graphs against eager calls; and
from these whether `auto` may use the kernels of an op on this GPU.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from approx_kernels.dispatch.checked import OPS, Check, digest, identity, keep_check, unchecked
from approx_kernels.dispatch.implementation import chosen, forget, implementation
from bench.cpu_cases import HEADS, SDPA, Case
from bench.gpu_cases import COMPILED, Inputs, Step, built, contenders, inputs, of_suite
from bench.gpu_workers import in_one_line
from tests.closeness import error_and_budget

# Samples, tokens and heads: a tile or two, or less with padding; an odd number; many tokens, with few heads so that all
# pairs fit in float64; and a number at which heads are split to fill a card.
SHAPES = ((3, 150, HEADS), (2, 1000, HEADS), (1, 8192, 1), (1, 2048, HEADS))
# The shapes that are compiled.
COMPILED_SHAPES = SHAPES[1:2]
# Pairs of queries and keys, over heads and samples, up to which references take all samples, and float64; beyond it
# they take the first sample, and float32.
PAIRS = 2**28
# As in the tests: sums over tiles round a few times more than a single sum.
FACTOR = 6.0
# Peers only need to compute the same.
SAME = 0.05
NAMES = ("out", "dq", "dk", "dv")
# Default `topk` of improved clusters.
KEPT = 32
# Hashed inputs are multiples of one over this.
PARTS = 64
# Decoded tokens, and tokens before them.
LENGTH, LAST = 1000, 3
# Calls before a capture, which compile, allocate, and choose.
_WARM = 3
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


def captured(call: Callable[[], object], calls: int) -> Callable[[], None]:
    """Capture this many consecutive calls as one graph.

    Returns:
        A function that replays it; the graph and the memory of its results live as long as the function.

    Raises:
        RuntimeError: if the call synchronises or cannot be captured. The process should then not be used for another
            graph.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            call()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except RuntimeError as error:
        # Ending a failed capture is an error too, which hides the first.
        raise error.__context__ or error from None
    finally:
        # A failed capture leaves its own stream as the current one.
        torch.cuda.set_stream(current)
    return graph.replay


def verify(
    suite: str,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    *,
    train: bool = True,
    graph: bool = True,
) -> dict[str, Any]:
    """Run one contender of a suite on fresh inputs, with the given or all shapes (samples, tokens and heads).

    Args:
        suite: The suite.
        name: The contender.
        dtype: The precision.
        device: The device.
        shapes: Samples, tokens and heads; by default some that make kernels take all their paths.
        train: Whether to compute gradients.
        graph: Whether to capture CUDA graphs too.

    Returns:
        `status`, `ok` or the error; `errors`, for outputs and gradients, including parameters, the largest over the
        shapes with its budget; the ops that ran `kernels`; and `graphs`, for forward and train whether a captured graph
        gives the eager results: `equal`, or why it cannot be used, or None without graphs.
    """
    causal = suite == "attention-causal"
    result: dict[str, Any] = {"errors": {}, "kernels": [], "graphs": {"forward": None, "train": None}}
    wrong: list[str] = []
    for batch, length, heads in shapes or (COMPILED_SHAPES if name in COMPILED else SHAPES):
        how = {"batch": batch, "length": length, "heads": heads, "dtype": dtype, "device": device, "train": train}
        values = inputs(suite, **how, seed=length)[0]
        one = next(
            (each for each in contenders(suite, "train", length, dtype, device, every=True) if each.name == name), None
        )
        if one is None:
            # It materialises all pairs, which are too many here.
            continue
        like = next(case for case in [Case(SDPA, SDPA, {}), *of_suite(suite, 1)] if case.name == one.like)
        if like.mechanism == "improved-clustered":
            _set_apart(values)
        mechanism = built(like, causal, dtype, device, values)
        _make_hashes_exact(mechanism, values)
        whole = batch * heads * length**2 <= PAIRS
        few = values if whole else _first_sample(values)
        # A sum over samples that the references leave out has nothing to be compared with.
        learned = [f"d{name}" for name, _ in mechanism.named_parameters()] if whole or batch == 1 else []
        names = (*NAMES, *learned) if train else NAMES[:1]
        with implementation("reference"):
            plain = _real(_run(_step(mechanism, few), train), few)
            wide_dtype = torch.float64 if heads * length**2 <= PAIRS else torch.float32
            q, k, v = (x.detach().to(wide_dtype).requires_grad_(train) for x in few[:3])
            wide = Inputs(q, k, v, few.grad.to(wide_dtype), few.mask)
            exact = _real(_run(_step(copy.deepcopy(mechanism).to(wide_dtype), wide), train), few)
        ours = one.role == "variant"
        forget()
        step = _step(mechanism, values) if ours else one.make(values)
        # On a GPU kernels run first, checked or not; elsewhere they are interpreted.
        with unchecked(), implementation("auto" if device.type == "cuda" else "triton"):
            results = _run(step, train)
        result["kernels"] = sorted(_in_kernels() | {*result["kernels"]})
        found = results if one.packed or whole else [x[:1] for x in results[: len(NAMES)]] + results[len(NAMES) :]
        actual = [x[: len(plain[0])] for x in found] if one.packed else _real(found, few)
        for place, one_found, one_plain, one_exact in zip(names, actual, plain, exact, strict=False):
            error, budget = error_and_budget(one_found, one_plain, one_exact, FACTOR)
            budget = budget if ours else max(budget, SAME)
            # NaN fails this comparison.
            if not error <= budget:
                wrong.append(f"{place} at {length} tokens has error {error:.1e}, allowed is {budget:.1e}")
            worst = result["errors"].get(place, [0.0, budget])
            if math.isfinite(error) and error / budget >= worst[0] / worst[1]:
                result["errors"][place] = [error, budget]
        if device.type == "cuda" and graph:
            # Those of the last shape.
            result["graphs"] = _graphs(step, results, train)
    return result | {"status": "failed: " + "; ".join(wrong) if wrong else "ok"}


@torch.no_grad()
def verify_decoding(name: str, dtype: torch.dtype, device: torch.device, length: int = LENGTH) -> dict[str, Any]:
    """Pass a mechanism the last tokens of a sequence one by one; returns the same as `verify`, for outputs only."""
    values = inputs("attention-causal", batch=2, length=length, dtype=dtype, device=device, seed=length)[0]
    case = next(case for case in of_suite("decode", 1) if case.name == name)
    mechanism = built(case, True, dtype, device, values)
    last = range(length - LAST, length)
    with implementation("reference"):
        plain = mechanism(values.q, values.k, values.v)[:, :, last.start :]
        exact = copy.deepcopy(mechanism).double()(*(x.double() for x in values[:3]))[:, :, last.start :]
    forget()
    outs, state = [], None
    keeps = mechanism.decode_state != "cache"
    # The others have no separate kernel for it, so none could be interpreted; performer has one only for the prompt.
    interpreted = device.type == "cpu" and case.mechanism in ("flash", "linear")
    prompt = interpreted or (device.type == "cpu" and case.name == "performer estimator=positive")
    kernels: set[str] = set()
    with unchecked(), implementation("triton" if interpreted else "auto"):
        if keeps:
            with implementation("triton" if prompt else "auto"):
                _, state = mechanism.decode(*(x[:, :, : last.start] for x in values[:3]))
            kernels |= _in_kernels()
        for place in last:
            q, k, v = (x[:, :, place : place + 1] for x in values[:3])
            if keeps:
                out, state = mechanism.decode(q, k, v, None, state)
            else:
                out = mechanism(q, *(x[:, :, : place + 1] for x in values[1:3]))
            outs.append(out)
    error, budget = error_and_budget(torch.cat(outs, 2), plain, exact, FACTOR)
    wrong = "" if error <= budget else f"failed: out has error {error:.1e}, allowed is {budget:.1e}"
    kernels |= _in_kernels()
    errors = {"out": [error, budget]} if math.isfinite(error) else {}
    return {"status": wrong or "ok", "errors": errors, "kernels": sorted(kernels), "graphs": {}}


def _in_kernels() -> set[str]:
    """The ops that last ran kernels."""
    return {op for op, way in chosen().items() if way == "triton"}


@torch.no_grad()
def _set_apart(values: Inputs) -> None:
    """Make the mean query of every cluster weigh the first `topk` keys most, by more than 16 bits round.

    Otherwise kernels and reference choose others among scores that are equal in 16 bits, and gradients depend on the
    choice.
    """
    values.q[..., 0] = 3.0
    values.k[:, :, :KEPT, 0] += 16.0


@torch.no_grad()
def _make_hashes_exact(mechanism: Any, values: Inputs) -> None:
    """Round the inputs of the clustering, so that its products are exact in float32 in any order of additions.

    Otherwise a query on a plane to within rounding may fall on either side, and get another cluster's output.
    """
    planes = getattr(mechanism, "planes", None)
    for x in () if planes is None else (planes, values.q):
        x.copy_(x.bfloat16().float().mul(PARTS).round().div(PARTS))


def _step(mechanism: Any, values: Inputs) -> Step:
    leaves = (*values[:3], *mechanism.parameters())
    return lambda: mechanism(values.q, values.k, values.v, values.mask), leaves, values.grad


@torch.no_grad()
def _first_sample(values: Inputs) -> Inputs:
    trained = values.q.requires_grad
    q, k, v, grad = (x.detach()[:1].requires_grad_(trained) for x in values[:4])
    return Inputs(q, k, v, grad.detach(), None if values.mask is None else values.mask[:1])


def _run(step: Step, train: bool = True) -> list[Tensor]:
    forward, leaves, grad = step
    with torch.set_grad_enabled(train):
        out = forward()
    if not train:
        return [out]
    # Learned parameters may be unused with so few tokens.
    grads = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
    # A graph kept alive ties its leaves to this stream, and no CUDA graph could be captured on another.
    return [out.detach(), *grads]


def _real(results: list[Tensor], values: Inputs) -> list[Tensor]:
    """Results for real tokens, [tokens, H, D], with padding; and gradients of parameters."""
    if values.mask is None:
        return results
    by_token, others = results[: len(NAMES)], results[len(NAMES) :]
    return [*(x.transpose(1, 2)[values.mask] for x in by_token), *others]


def _graphs(step: Step, eager: list[Tensor], train: bool) -> dict[str, str | None]:
    with torch.no_grad():
        forward = _replayed(lambda: [step[0]()], eager[:1])
    usable = forward == "equal" or forward.startswith("close")
    return {"forward": forward, "train": _replayed(lambda: _run(step), eager) if usable and train else forward}


def _replayed(run: Callable[[], list[Tensor]], eager: list[Tensor]) -> str:
    made: list[Tensor] = []

    def keeping() -> None:
        made[:] = run()

    try:
        replay = captured(keeping, 1)
        for x in made:
            x.detach().fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, it is what the page says
        return f"cannot be captured: {in_one_line(error)}"
    if all(torch.equal(one, other) for one, other in zip(made, eager, strict=True)):
        return "equal"
    apart = max(
        float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30))
        for one, other in zip(made, eager, strict=True)
    )
    # Sums that depend on the order of additions, as in PyTorch's backward passes, are never bit-equal: in float32 two
    # eager runs differ by up to a dozen roundings. A graph that reads the wrong memory is off by orders more.
    close = apart <= 16 * torch.finfo(eager[0].dtype).eps
    return f"close, {apart:.0e} apart" if close else f"gives something else: {apart:.1e} apart"


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
