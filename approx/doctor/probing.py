"""Probe exact attention on this machine, and describe the findings for `approx doctor`.

The findings of `bench/gpu.py` about GPU kernels are described here, too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from approx.errors import ApproxError, Exit
from approx.measuring import products
from approx.progress import Progress, silent
from approx_kernels.dispatch import checked, findings
from approx_kernels.gpu.language import triton
from approx_kernels.ops.fastest.choice import LENGTHS, Case
from approx_kernels.ops.fastest.probe import measure
from approx_kernels.ops.fastest.ways import DEFAULT

_DTYPES = (torch.float32, torch.bfloat16)
_FORMS = (
    *({}, {"causal": True}, {"padded": True}, {"causal": True, "padded": True}, {"few": True}),
    *({"training": True}, {"causal": True, "training": True}),
)
_AGAIN = "measure again with `approx doctor --probe`"


def probe(progress: Progress = silent) -> None:
    """Replace the findings of an earlier probe: measure common forms of exact attention and, on a CPU, `fast_products`.

    Other forms of attention keep fixed defaults.

    Raises:
        ApproxError: if earlier findings cannot be removed, or new ones cannot be stored.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        findings.forget(but=checked.ABOUT)
    except OSError as error:
        raise ApproxError(
            f"{findings.file()} cannot be removed: {error.strerror}. Remove it, or set APPROX_CACHE to another folder.",
            Exit.UNAVAILABLE,
        ) from None
    cases = [Case(device, dtype, length, **form) for dtype in _DTYPES for length in LENGTHS for form in _FORMS]
    work: dict[str, Callable[[], findings.Finding]] = {str(case): partial(measure, case) for case in cases}
    if products.obstacle(device) is None:
        work[products.ASKED] = products.measure
    for done, (subject, find) in enumerate(work.items()):
        progress(subject, done, len(work))
        try:
            finding = find()
        except (RuntimeError, MemoryError) as error:
            finding = {"way": DEFAULT, "failed": str(error).partition("\n")[0] or type(error).__name__}
        try:
            findings.keep(device, subject, finding)
        except OSError as error:
            raise ApproxError(
                f"The findings cannot be stored in {findings.file()}: {error.strerror}. Set APPROX_CACHE to a writable "
                "folder.",
                Exit.UNAVAILABLE,
            ) from None


def status_lines() -> Iterator[tuple[str, bool, str]]:
    """The findings as lines: subject, whether it is fine, and text with the remedy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {
        subject: finding for subject, finding in findings.found(device).items() if not subject.startswith(checked.ABOUT)
    }
    for subject, finding in known.items():
        about, _, kind = subject.partition(", ")
        if "failed" in finding:
            text = f"{DEFAULT}, because the probe failed: {finding['failed']}. Fix that, then {_AGAIN}"
            yield (
                about,
                False,
                f"{kind}: {text}" if kind else f"the probe failed: {finding['failed']}. Fix that, then {_AGAIN}",
            )
        elif about == "exact attention":
            yield about, True, f"{kind}: {_of_way(finding)}"
    if not any(subject.startswith("exact attention") for subject in known):
        yield "exact attention", True, "PyTorch's default; `approx doctor --probe` measures which one is fastest here"
    if device == "cuda" and triton is not None:
        yield from of_kernels(device)
    if device == "cpu":
        timed = known.get(products.ASKED)
        if timed is None or "failed" not in timed:
            yield products.ASKED, True, products.description(timed)
    if any(finding.get("crowded") for finding in known.values()):
        yield "findings", True, f"* other programs used the cores during the measurement: stop them, then {_AGAIN}"


def of_kernels(device: str) -> Iterator[tuple[str, bool, str]]:
    """Lines on the ops for which `auto` uses GPU kernels, and why it uses PyTorch for the others; see `status_lines`."""
    checks = {op: checked.check_of(op, device) for op in checked.OPS}
    by_dtypes: dict[str, list[str]] = {}
    for op, check in checks.items():
        if check and check.passed:
            by_dtypes.setdefault(", ".join(check.passed), []).append(op)
    for dtypes, ops in by_dtypes.items():
        yield "gpu kernels", True, f"passed their check in {dtypes}, so `auto` uses them: {', '.join(ops)}"
    for op, check in checks.items():
        for dtype, why in check.wrong.items() if check else ():
            yield "gpu kernels", False, f"{op} failed its check in {dtype}, so `auto` uses PyTorch: {why}"
    if unknown := [op for op, check in checks.items() if not check or not (check.passed or check.wrong)]:
        text = f"not checked on this GPU with these versions, so `auto` uses PyTorch: {', '.join(unknown)}; {checked.AGAIN}"
        yield "gpu kernels", False, text


def _of_way(finding: dict[str, Any]) -> str:
    way, times = finding["way"], finding["milliseconds"]
    gain = "" if way == DEFAULT else f", {times[DEFAULT] / times[way]:.2f}× {DEFAULT}"
    doubt = " *" if finding.get("crowded") else ""
    return f"{way}{gain}, error {finding['errors'][way]:.1e}{doubt}"
