"""The machine that runs `bench/gpu.py`: its properties, its copy and product rates, and the results of the tests on it."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from approx.evaluation.record import environment
from approx.evaluation.timing import timed
from bench.cpu_floor import products_in
from bench.gpu_peers import versions

ROOT = Path(__file__).resolve().parent.parent
# Side of the matrices, bytes copied, and repetitions.
SIDE, COPIED, REPETITIONS = 8192, 2**30, 7
PRODUCTS = (
    ("bfloat16", torch.bfloat16, "highest"),
    ("float16", torch.float16, "highest"),
    ("tf32", torch.float32, "high"),
    ("float32", torch.float32, "highest"),
)
WATCHED = ("temperature.gpu", "clocks.sm", "clocks.mem", "power.draw", "utilization.gpu", "memory.used")
# Arguments of pytest: tests that need a GPU, only in the folders that have them; collecting all others would take much
# of the time, and packages that their files import may be missing.
TESTS = ("-m", "gpu", "--continue-on-collection-errors", "tests/kernels", "tests/evaluation")
# Processes for the tests: compiling takes most of their time.
TESTERS = 8
_DONE = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>[A-Z]+) (?P<name>tests/.+?)|(?P<own>tests/.+?) (?P<second>[A-Z]+)(?: \(.*\))?(?: +\[ *\d+%\])?)\s*$"
)


def described(device: torch.device) -> dict[str, Any]:
    """Versions, processor and GPU."""
    record = environment(gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    record |= versions()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        record |= {
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "multiprocessors": facts.multi_processor_count,
            "memory_gb": facts.total_memory / 1e9,
            "cache_mb": getattr(facts, "L2_cache_size", 0) / 1e6,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": asked("driver_version").get("driver_version"),
            "highest_clock_mhz": asked("clocks.max.sm").get("clocks.max.sm"),
        }
    return record | {"watched": watched()}


def watched() -> dict[str, str]:
    """Temperature, clocks, power and use of the GPU from nvidia-smi; empty without it."""
    return asked(*WATCHED)


def asked(*what: str) -> dict[str, str]:
    """The output of nvidia-smi for the first GPU that this process may use; settings are never changed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    # By number or by name.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = [tool, f"--id={chosen}", f"--query-gpu={','.join(what)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(what, (word.strip() for word in done.stdout.splitlines()[0].split(",")), strict=False))


def calibrate(device: torch.device, side: int = SIDE, copied: int = COPIED) -> dict[str, float]:
    """Operations per second of large products, by precision, and `copy`, bytes per second of a large copy, read and written.

    `int8` is left out if PyTorch has no product for it.
    """
    rates: dict[str, float] = {}
    for name, dtype, precision in PRODUCTS:
        with products_in(precision):
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            rates[name] = 2 * side**3 / _seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)
    try:
        a, b = (torch.randint(-1, 2, (side, side), device=device, dtype=torch.int8) for _ in range(2))
        rates["int8"] = 2 * side**3 / _seconds(lambda: torch._int_mm(a, b.t()), device)  # pyright: ignore[reportPrivateImportUsage]  # there is no other of int8
    except (RuntimeError, AttributeError):
        pass
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates["copy"] = 2 * copied / _seconds(lambda: target.copy_(source), device)
    return rates


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The minimum of some repetitions, since a rate is an upper bound of the machine."""
    call()
    return min(timed(call, 3, device).ms for _ in range(REPETITIONS)) / 1e3


def suite_passes(log: Path, seconds: float, arguments: Sequence[str] = TESTS) -> dict[str, Any]:
    """Run the tests that need a GPU in separate processes, and count the results.

    Args:
        log: The file for their output.
        seconds: Time limit; results until then count.
        arguments: Arguments of pytest.

    Returns:
        Counts `passed`, `failed` and `skipped`; `failures`, the names; `finished`, whether they completed; `command`.
    """
    command = [sys.executable, "-m", "pytest", *arguments, "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if importlib.util.find_spec("xdist") and cores >= 4:
        command += ["-n", str(min(TESTERS, cores // 2)), "--dist", "worksteal"]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = counted(log.read_text(encoding="utf-8", errors="replace"))
    shown = ["python", *command[1:]]
    # pytest exits with 0 or 1 after running all tests.
    return {"command": " ".join(shown), "finished": code in (0, 1), "exit_code": code, **said}


def counted(text: str) -> dict[str, Any]:
    """The outcome of each test from pytest's output with `-v`, in one process or several."""
    outcomes: dict[str, str] = {}
    for line in text.splitlines():
        if outcome := _DONE.match(line):
            outcomes[outcome["name"] or outcome["own"]] = outcome["first"] or outcome["second"]
    words = list(outcomes.values())
    failures = sorted(name for name, word in outcomes.items() if word in ("FAILED", "ERROR"))
    return {
        "passed": words.count("PASSED"),
        "failed": len(failures),
        "skipped": words.count("SKIPPED"),
        "failures": failures,
    }
