"""What probes found out about exact attention on this machine, and how to find it out anew."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx_kernels import findings
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
    kinds = [(dtype, length, form) for dtype in _DTYPES for length in _LENGTHS for form in _FORMS]
    for done, (dtype, length, form) in enumerate(kinds):
        case = Case(device, dtype, 64, length, **form)
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


def _of_failure(kind: str, why: str) -> str:
    return f"{kind}{': ' if kind else ''}as PyTorch has it, for the probe failed: {why}. Mend that, then {_AGAIN}"


def _of_way(finding: dict[str, Any]) -> str:
    way, times = finding["way"], finding["milliseconds"]
    gain = "" if way == DEFAULT else f", {times[DEFAULT] / times[way]:.2f}× {DEFAULT}"
    return f"{way}{gain}, error {finding['errors'][way]:.1e}{_doubt(finding)}"


def _doubt(finding: dict[str, Any]) -> str:
    return " *" if finding.get("crowded") else ""
