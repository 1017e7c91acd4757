"""Calls of the public ops as JSON: the arguments as plain values, with tensors and functions described.

A call is refused with a ValueError, or gives in C what it gives in plain PyTorch; nothing else happens.
"""

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from approx.errors import ApproxError, Exit
from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import cluster_queries, draw_centroids, draw_planes, fit_centroids
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.fastest.api import fastest_attention
from approx_kernels.ops.flash.api import flash, flash_attention
from approx_kernels.ops.linear.api import linear_attention, linear_decode
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns import reference as masks
from approx_kernels.ops.patterns.api import local_attention, pattern_attention
from approx_kernels.ops.patterns.reference import bigbird_lists, draw_blocks
from approx_kernels.ops.performer.api import draw_projection, performer_attention, performer_decode
from approx_kernels.ops.topk.api import topk_attention
from approx_kernels.tokens import check_least, root_above

# Real numbers of a tensor and places along a dimension that are allocated; what has more is one number, seen
# everywhere.
_MOST_NUMBERS, _MOST_PLACES = 2**14, 2**10
_OPS: tuple[Callable[..., Any], ...] = (
    adaptive_span_attention,
    causal_clustered_attention,
    cluster_queries,
    clustered_attention,
    draw_blocks,
    draw_centroids,
    draw_planes,
    draw_projection,
    draw_projections,
    exact_attention,
    fastest_attention,
    fit_centroids,
    flash,
    flash_attention,
    linear_attention,
    linear_decode,
    local_attention,
    lsh_attention,
    pattern_attention,
    performer_attention,
    performer_decode,
    topk_attention,
)
OPS = {op.__name__: op for op in _OPS}


def _normal(*shape: int, **more: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "float32", "fill": "normal", "layout": "whole", "device": "cpu"} | more


def _of(kind: str, steps: Any = (None,), **settings: Any) -> tuple[str, dict[str, Any]]:
    """A call of the pattern of that class."""
    return "pattern_attention", {**_QKV, "pattern": {"kind": kind, **settings}, "steps": list(steps), **_FORM}


_MASK = _normal(2, 21, dtype="bool", fill="mask")
_QKV = {"q": _normal(2, 4, 21, 8), "k": _normal(2, 2, 21, 8), "v": _normal(2, 2, 21, 6), "key_mask": _MASK}
_FORM = {"scale": 0.3, "dropout": 0.0}
_CAUSAL = {"causal": True, **_FORM}
_LONG = {"q": _normal(1, 1, 150, 8), "k": _normal(1, 1, 150, 8), "v": _normal(1, 1, 150, 8)}
_DRAWN = {"planes": _normal(20, 9), "draws": _normal(30, dtype="int64", fill="draws"), "iterations": 2}
_FIXED = {"centroids": _normal(4, 3, 8), "selectors": _normal(4, 3, 9), "chunk": 4, "topk": 2}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "adaptive_span": ("adaptive_span_attention", {**_QKV, "spans": _normal(4, fill="ones"), "ramp": 3, **_CAUSAL}),
    "bigbird": _of("Listed", size=4, draws=_normal(9, 1, dtype="int64", fill="draws"), compatible=False),
    "block": _of("Blocks", causal=True, size=4, neighbours=1, shift=1),
    "causal_clustered": ("causal_clustered_attention", {**_QKV, **_FIXED, **_FORM}),
    "clustered": ("clustered_attention", {**_QKV, **_DRAWN, "clusters": 4, "topk": 3, **_FORM}),
    "frozen": (
        "clustered_attention",
        {**_QKV, "selectors": _normal(4, 3, 9), "clusters": 3, "iterations": 1, "topk": None, **_FORM},
    ),
    "cluster": ("cluster_queries", {"q": _normal(3, 21, 8), **_DRAWN, "clusters": 4}),
    "draw_blocks": ("draw_blocks", {"random": 2, "seed": 0}),
    "draw_centroids": ("draw_centroids", {"heads": 2, "size": 4, "clusters": 3, "seed": 0}),
    "draw_planes": ("draw_planes", {"size": 4, "bits": 20, "bias": True, "clusters": 3, "seed": 0}),
    "draw_projection": ("draw_projection", {"size": 4, "features": 9, "orthogonal": True, "seed": 0}),
    "draw_rounds": (
        "draw_projections",
        {"size": 4, "rounds": 2, "variant": "shared", "causal": False, "seed": 0},
    ),
    "exact": ("exact_attention", {**_QKV, **_CAUSAL}),
    "fastest": ("fastest_attention", {**_LONG, "key_mask": None, **_CAUSAL}),
    "fit": (
        "fit_centroids",
        {"q": _normal(2, 21, 8), "k": _normal(2, 21, 8), "clusters": 3, "iterations": 2, "seed": 0},
    ),
    "flash": ("flash", {**_QKV, "scale": 0.3, "left": 3, "right": 2, "spans": None, "ramp": 1, "both": True}),
    "flash_packed": ("flash", {**_LONG, "scale": 0.3, "lengths": [100, 50]}),
    "flash_attention": ("flash_attention", {**_QKV, **_CAUSAL}),
    "global": _of("Window", left=2, right=2, tokens=[0, 5], see_all=True),
    "linear": ("linear_attention", {**_QKV, **_CAUSAL, "feature_map": "elu", "eps": 1e-6, "input_scale": 1.0}),
    "learned": (
        "linear_attention",
        {
            **_QKV,
            **_CAUSAL,
            "feature_map": "hedgehog",
            "maps": [_normal(4, 8, 8), _normal(4, 8, 8)],
            "window": 3,
            "mix": _normal(4, fill="ones"),
        },
    ),
    "decode": (
        "linear_decode",
        {
            "q": _normal(2, 4, 1, 8),
            "k": _normal(2, 2, 1, 8),
            "v": _normal(2, 2, 1, 6),
            "state": {"sums": _normal(2, 2, 8, 7, fill="ones")},
        },
    ),
    "local": ("local_attention", {**_QKV, "left": 3, "right": 1, **_FORM}),
    "lsh": (
        "lsh_attention",
        {
            **_QKV,
            "projections": _normal(2, 10, 1),
            "variant": "asymmetric",
            "cluster": 4,
            "dedup": True,
            "causal": False,
        }
        | _FORM,
    ),
    "lsh_buckets": (
        "lsh_attention",
        {
            **_QKV,
            "projections": _normal(2, 8, 16),
            "variant": "asymmetric",
            "cluster": 4,
            "dedup": False,
            "causal": True,
        }
        | _FORM,
    ),
    "lsh_shared": (
        "lsh_attention",
        {**_QKV, "projections": _normal(2, 8, 64), "variant": "shared", "cluster": 4, "dedup": False, "causal": False}
        | {"buckets": 4}
        | _FORM,
    ),
    "performer": (
        "performer_attention",
        {**_QKV, "projection": _normal(4, 9, 8), "offsets": _normal(4, 9), "share": _normal(4, fill="ones"), **_CAUSAL}
        | {"kernel": "softmax"},
    ),
    "performer_decode": (
        "performer_decode",
        {
            "q": _normal(2, 2, 1, 8),
            "k": _normal(2, 2, 1, 8),
            "v": _normal(2, 2, 1, 6),
            "projection": _normal(9, 8),
            "state": {"sums": _normal(2, 2, 9, 7, fill="ones"), "top": _normal(2, 2, 1, 9)},
            "scale": 0.3,
        },
    ),
    "strided": _of("Strided", causal=True, stride=5, steps=[1, 2, None]),
    "strided_rows": _of("Strided", stride="root", steps=[None]),
    "summary": _of("Summaries", stride=5, summary=2, inside="past, future", steps=[1, 2, 3, 4]),
    "topk": ("topk_attention", {**_QKV, "topk": 3, **_CAUSAL}),
}


def write(folder: Path) -> None:
    """Write a file for each call."""
    folder.mkdir()
    for name, (op, arguments) in CALLS.items():
        text = json.dumps({"op": op, "arguments": arguments}, indent=1)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def called(target: Path) -> None:
    """Make the call of a file.

    Raises:
        ApproxError: if the file describes no call, or the op refuses it with a ValueError.
        AssertionError: if C and plain PyTorch give different results.
    """
    op, make, plain = _read(target)
    outcomes = []
    for impl in ("cpu", "reference") if "impl" in inspect.signature(op).parameters else (None,):
        torch.manual_seed(0)
        try:
            outcomes.append(op(**make(), **({} if impl is None else {"impl": impl})))
        except ValueError as error:
            outcomes.append(error)
        except (NotImplementedError, RuntimeError) as error:
            # Meta tensors have no numbers to read, and a machine has only so much memory.
            if not re.search("meta|allocate memory|bad_alloc", str(error)):
                raise
            outcomes.append(error)
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not re.search("cannot run|has no implementation", str(outcome)):
            raise ApproxError(str(outcome), Exit.USAGE)
    results = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    if len(results) == 2 and plain:
        _alike(results[0], results[1], make().get("key_mask"))


def _alike(one: Any, other: Any, key_mask: Tensor | None) -> None:
    if isinstance(one, tuple) and isinstance(other, tuple):
        # States of decoding differ in what they store.
        return _alike(one[0], other[0], key_mask)
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    if one.device.type == "meta":
        return None
    if key_mask is not None and one.ndim == 4:
        # Outputs of padding have no meaning; queries are the last of the keys, and none before them.
        real = key_mask[:, max(key_mask.shape[1] - one.shape[2], 0) :]
        real = torch.cat([real.new_zeros(len(real), one.shape[2] - real.shape[1]), real], 1)[:, None, :, None]
        one, other = one.where(real, 0.0), other.where(real, 0.0)
    tolerance = 5e-2 if one.dtype in (torch.float16, torch.bfloat16) else 2e-3
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return None


def _read(target: Path) -> tuple[Callable[..., Any], Callable[[], dict[str, Any]], bool]:
    """The op, what makes its arguments, and whether these are ordinary numbers without chance."""
    try:
        call = json.loads(target.read_text("utf-8"))
        op, arguments = OPS[call["op"]], call["arguments"]
        inspect.signature(op).bind(**arguments)
        if "impl" in arguments or "notes" in arguments:
            raise ValueError("impl and notes are chosen here")
        if isinstance(arguments.get("iterations"), int) and arguments["iterations"] > 100:
            raise ValueError("more than a test has time for")

        def make() -> dict[str, Any]:
            return {name: _decoded(name, value) for name, value in arguments.items()}

        make()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ApproxError(f"{target} describes no call: {type(error).__name__}", Exit.USAGE) from error
    # Among scores that are equal each implementation chooses its own.
    tensors = [arguments[name] for name in "qkv" if isinstance(arguments.get(name), dict)]
    apart = all(each.get("fill") == "normal" for each in tensors)
    return op, make, apart and not arguments.get("dropout") and _is_plain(arguments)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return (
            value.get("fill") not in ("nan", "inf", "large")
            and value.get("layout") != "expanded"
            and all(map(_is_plain, value.values()))
        )
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not isinstance(value, float) or (math.isfinite(value) and abs(value) < 10)


def _decoded(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(f"{name} {place}", each) for place, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "kind" in value:
        settings = {key: _decoded(f"{name} {key}", each) for key, each in value.items()}
        return lambda count: _pattern(count, **settings)
    if "shape" in value:
        return _tensor(name, value)
    return {key: _decoded(f"{name} {key}", each) for key, each in value.items()}


def _pattern(count: int, /, kind: str, **settings: Any) -> masks.Pattern:
    if settings.get("stride") == "root":
        settings["stride"] = root_above(count)
    if isinstance(settings.get("tokens"), list):
        settings["tokens"] = tuple(settings["tokens"])
    kinds = {each.__name__: each for each in masks.Pattern.__subclasses__()}
    try:
        if "draws" in settings:
            check_least("block", settings.get("size"), 1)
            blocks = -(-count // settings["size"])
            settings["lists"] = bigbird_lists(blocks, settings.pop("draws"), settings.pop("compatible", False))
        return kinds[kind](**settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{kind} is no pattern with these settings: {error}") from error


def _tensor(name: str, about: dict[str, Any]) -> Tensor:
    shape, dtype = about["shape"], getattr(torch, about["dtype"])
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if not all(isinstance(size, int) for size in shape):
        raise ValueError("a shape is of whole numbers")
    large = math.prod(shape) > _MOST_NUMBERS or any(size > _MOST_PLACES for size in shape)
    if large and max(shape) < 2**30:
        raise ValueError("more than a test has time for")
    whole = [1] * len(shape) if large or about["layout"] == "expanded" else shape
    fill = about["fill"]
    numbers = torch.randn(whole, generator=generator) if fill == "normal" else torch.ones(whole)
    match fill:
        case "nan" | "inf":
            numbers = numbers * float(fill)
        case "large":
            numbers = numbers * 1e30
        case "mask":
            numbers = torch.rand(whole, generator=generator) < 0.7
        case "draws":
            numbers = torch.randint(2**31, whole, generator=generator)
        case "negative":
            numbers = numbers * -7
    numbers = numbers.to(dtype).expand(shape)
    if about["layout"] == "transposed" and len(shape) > 1:
        numbers = numbers.transpose(-1, -2).contiguous().transpose(-1, -2)
    if about["layout"] == "apart":
        numbers = numbers.repeat_interleave(2, -1)[..., ::2]
    return (numbers.to_sparse() if about["layout"] == "sparse" else numbers).to(about["device"])
