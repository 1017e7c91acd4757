"""What probes found out about exact attention on this machine, and how to find it out anew."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx_kernels import few_rows, findings, half_products, products, tiled_layers
from approx_kernels.exact.probe import Case, fastest
from approx_kernels.exact.ways import DEFAULT

_DTYPES = (torch.float32, torch.bfloat16)
_LENGTHS = (128, 512, 2048)
_FORMS = ({}, {"causal": True}, {"padded": True}, {"few": True})
_AGAIN = "measure anew with `approx doctor --probe`"


def probe(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Forget what was found, and measure the usual kinds of input; others are measured when they first occur.

    Raises:
        ApproxError: if what was found before cannot be removed.
    """
    try:
        findings.forget()
    except OSError as error:
        raise ApproxError(
            f"{findings.file()} cannot be removed: {error.strerror}. Remove it, or set APPROX_CACHE to another folder.",
            Exit.UNAVAILABLE,
        ) from None
    device = _device()
    if device == "cpu":
        products.worth_rows()
        half_products.least_rows(torch.bfloat16)
        with torch.no_grad():
            for dtype in _DTYPES:
                few_rows.worth_rows(1, device, dtype)
            tiled_layers.worth_tiles(tiled_layers.ROWS[-1], device, torch.float32)
    kinds = [(dtype, length, form) for dtype in _DTYPES for length in _LENGTHS for form in _FORMS]
    for done, (dtype, length, form) in enumerate(kinds):
        with products.fast_products(length, device, dtype) as switched:
            case = Case(device, dtype, 64, length, switched=switched, **form)
            if progress:
                progress(str(case), done, len(kinds))
            fastest(case)


def said() -> Iterator[tuple[str, bool, str]]:
    """What was found, line by line: what it is about, whether all is well, and what was found with its remedy."""
    known = findings.found(_device())
    for asked, finding in sorted(known.items(), key=lambda each: each[0].startswith("exact")):
        about, _, kind = asked.partition(", ")
        if "failed" in finding:
            yield about, False, _of_failure(kind, finding["failed"])
        elif about == products.ASKED:
            yield about, True, f"{kind}{': ' if kind else ''}{_of_products(finding)}"
        elif about in map(half_products.asked, half_products.DTYPES):
            yield from ((about, True, text) for text in _of_half_products(finding))
        elif about in map(few_rows.asked, few_rows.DTYPES):
            yield from ((about, True, text) for text in _of_few_rows(finding))
        elif about == tiled_layers.ASKED:
            yield from ((about, True, text) for text in _of_tiles(finding))
        elif about == "exact attention":
            yield about, True, f"{kind}: {_of_way(finding)}"
    if not any(asked.startswith("exact attention") for asked in known):
        yield "exact attention", False, f"not measured yet: it will be when it is first used, or {_AGAIN}"
    if any(finding.get("crowded") for finding in known.values()):
        yield "findings", True, f"* was measured while other programs used the cores: when they are gone, {_AGAIN}"
    if not _kept():
        remedy = "set APPROX_CACHE to a folder that can be written; until then every process measures for itself"
        yield "findings", False, f"cannot be kept in {findings.file()}: {remedy}"


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _kept() -> bool:
    holder = findings.file()
    while not holder.exists():
        holder = holder.parent
    return os.access(holder, os.W_OK)


def _of_products(finding: dict[str, Any]) -> str:
    gains = _gains(finding["gains"])
    if finding["rows"] is not None:
        text = f"switched from {finding['rows']} rows on ({gains}, error {finding['error']:.1e})"
    elif finding["error"] > products.LABEL:
        text = f"as PyTorch has them: the switch rounds to bfloat16 here (error {finding['error']:.1e})"
    else:
        text = f"as PyTorch has them: the switch gains too little here ({gains})"
    return text + _doubt(finding)


def _of_half_products(finding: dict[str, Any]) -> Iterator[str]:
    for layout, least in finding["rows"].items():
        gains = _gains(finding["gains"][layout])
        told = (
            f"as PyTorch has them, for float32 gains too little here ({gains})"
            if least is None
            else f"in float32, rounded once, from {least} row{'s' * (least > 1)} on ({gains})"
        )
        yield f"{layout}: {told}{_doubt(finding)}"


def _of_few_rows(finding: dict[str, Any]) -> Iterator[str]:
    for layout, (least, most) in finding["rows"].items():
        gains = _gains(finding["gains"][layout])
        told = (
            f"in C from {least} to {most} rows ({gains})"
            if most
            else f"as PyTorch has them, for C gains too little here ({gains})"
        )
        yield f"{layout}: {told}{_doubt(finding)}"


def _of_tiles(finding: dict[str, Any]) -> Iterator[str]:
    for layout, (least, most) in finding["rows"].items():
        told = f"{_gains(finding['gains'][layout])}, error {finding['error']:.1e}"
        chosen = f"in three parts of bfloat16 from {least} rows on" if most else "as PyTorch has them"
        yield f"{layout}: {chosen} ({told}){_doubt(finding)}"


def _of_failure(kind: str, why: str) -> str:
    return f"{kind}{': ' if kind else ''}as PyTorch has it, for the probe failed: {why}. Mend that, then {_AGAIN}"


def _gains(gains: dict[str, float]) -> str:
    return ", ".join(f"{gain}× at {rows} row{'s' * (rows != '1')}" for rows, gain in gains.items())


def _of_way(finding: dict[str, Any]) -> str:
    way, times = finding["way"], finding["milliseconds"]
    gain = "" if way == DEFAULT else f", {times[DEFAULT] / times[way]:.2f}× {DEFAULT}"
    return f"{way}{gain}, error {finding['errors'][way]:.1e}{_doubt(finding)}"


def _doubt(finding: dict[str, Any]) -> str:
    return " *" if finding.get("crowded") else ""
