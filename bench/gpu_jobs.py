"""What the processes of `bench/gpu.py` do: describe the machine, try a contender, time a part, or verify a mechanism."""

import gc
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from approx.evaluation.record import environment
from approx.evaluation.statistics import ratio_interval
from approx.evaluation.timing import OK, OUT_OF_MEMORY, Runner, is_out_of_memory, race, timed
from approx_kernels.dispatch.checked import unchecked
from bench import gpu_cases
from bench.cpu_cases import HEADS
from bench.cpu_floor import products_in
from bench.gpu_cases import SUITES, Part, compiled_for, importance, of_models, rotating, versions
from bench.gpu_verify import captured, keep_all, sources, verify, verify_decoding
from bench.gpu_workers import SPENT, LostError, Row, Say, in_one_line

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
T = TypeVar("T")
_CPU = torch.device("cpu")

ROUNDS, BLOCK_MS, WARM_UP_SECONDS = 20, 2.0, 0.05
# Twenty turns of slower contenders would take the time of others.
SLOW_MS = 200.0
# A whole model takes longer, and varies less.
ROUNDS_OF_MODELS = 10
# Minimum duration of a graph, and maximum number of calls in it.
GRAPH_MS, MOST_CALLS = 1.0, 64
# Enough for an interval of two digits; the default would take longer than the rounds.
RESAMPLES = 1000
# The status of a contender whose try did not come to an end.
UNTRIED = "not tried in time, so not timed"


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


@dataclass(eq=False)
class Guarded(Runner):
    """A runner that turns errors into its status; if the device no longer responds, the process is abandoned.

    Args:
        name: Name of the contender.
        role: Role of the contender.
        say: Receives the name and role before the contender runs.
        device: Device it runs on.
        calls: Calls of the contender per call of the runner.
    """

    name: str = ""
    role: str = ""
    say: Say = print
    device: torch.device = _CPU
    calls: int = 1
    first_s: float | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run a function for this runner; returns None if it fails."""
        self.say({"name": self.name, "role": self.role})
        try:
            return action()
        except Exception as error:  # one that fails must not stop the others
            self.status = OUT_OF_MEMORY if is_out_of_memory(error) else in_one_line(error)
        # Outside the handler, where the traceback no longer holds the tensors of the failed call.
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                raise LostError(self.status) from None
        return None


Contenders = Iterator[tuple[str, str, Callable[[], object], int]]


def measure(
    part: Part,
    device: torch.device,
    say: Say,
    refuse: Callable[[str, str], str | None] = lambda name, role: None,
    before: Mapping[str, Row] | None = None,
    rounds: int | None = None,
) -> dict[str, Any]:
    """Run all contenders of a part: exact attention first, then each other one in turns with the base and the best exact.

    Args:
        part: The part.
        device: Its device.
        say: Receives the name and role of each contender before it runs, and its row as soon as it is measured.
        refuse: From a contender's name and role to the reason not to run it, or None.
        before: The rows of an earlier process that was lost; other contenders than exact attention are not run again.
        rounds: Turns of each; None for as many as a record needs.
    """
    begun, known = time.perf_counter(), before or {}
    rounds = rounds or (ROUNDS if part.suite in gpu_cases.SUITES else ROUNDS_OF_MODELS)

    def prepared(name: str, role: str, call: Callable[[], object], sets: int) -> Guarded:
        runner = Guarded(call, name=name, role=role, say=say, device=device, turns=2 if role == "base" else 1)
        lost = known[name]["status"] if name in known and known[name]["status"] != OK else None
        if why := lost or refuse(name, role):
            runner.status = why
            return runner
        runner.attempt(lambda: _first(runner))
        if runner.status == OK and part.way == "graph":
            runner.attempt(lambda: _as_graph(runner, sets))
            # The memory of an aborted capture stays allocated, and the next graph might use it.
            if runner.status != OK and device.type == "cuda":
                raise LostError(f"cannot be captured: {runner.status}")
        return runner

    def raced(runners: list[Guarded]) -> None:
        race(
            runners,
            device,
            rounds=rounds,
            seconds=0.0,
            warm_up_seconds=WARM_UP_SECONDS,
            block_ms=BLOCK_MS,
            memory=part.way == "eager",
        )

    with torch.set_grad_enabled(part.mode == "train"):
        contenders = sorted(_contenders(part, device), key=lambda one: importance(one[0], one[1]))
        exact = [prepared(*one) for one in contenders if one[1] in ("base", "exact")]
        raced(exact)
        best = min((one for one in exact if one.status == OK), key=lambda one: float(np.median(_ms(one))), default=None)
        base = next((one for one in exact if one.role == "base"), None)
        for one in exact:
            say(_row(one, base, best))
        for name, role, call, sets in contenders[len(exact) :]:
            if name in known:
                continue
            runner = prepared(name, role, call, sets)
            rivals = [_again(one) for one in dict.fromkeys((base, best)) if one is not None and one.status == OK]
            if runner.status == OK:
                raced([*rivals, runner])
            again = {one.name: one for one in rivals}
            say(_row(runner, *(again.get(one.name) if one else None for one in (base, best))))
    turns = None if base is None or base.status != OK else base.by_turn()[0]
    return {
        **part._asdict(),
        "best_exact": None if best is None else best.name,
        "spread": None if turns is None else float(np.median(turns[0]) / np.median(turns[1])),
        "took_s": time.perf_counter() - begun,
        "watched": watched(),
    }


def _again(one: Guarded) -> Guarded:
    """The same contender, to be measured anew."""
    return replace(one, rounds=[], turns=1)


def _contenders(part: Part, device: torch.device) -> Contenders:
    """Name, role and call of all contenders, and the number of calls after which inputs repeat."""
    dtype = getattr(torch, part.dtype)
    if not part.suite.startswith("attention"):
        for name, role, call in of_models(part.suite, part.length, part.batch, dtype, device):
            yield name, role, call, 1
        return
    train = part.mode == "train"
    sets = gpu_cases.sets_for(part.batch, part.length, dtype, device)
    how = {"batch": part.batch, "length": part.length, "dtype": dtype, "device": device, "sets": sets, "train": train}
    inputs = gpu_cases.inputs(part.suite, **how)
    for one in gpu_cases.contenders(part.suite, part.mode, part.length, dtype, device, compiled_for(part)):
        yield one.name, one.role, rotating(one.make, inputs, train), sets


def _first(runner: Guarded) -> None:
    """The first call, which compiles what is not compiled yet; very slow contenders get only one more."""
    begun = time.perf_counter()
    runner.call()
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    runner.first_s = time.perf_counter() - begun
    if runner.device.type == "cuda" and runner.role != "base":
        ms = timed(runner.call, 1, runner.device).ms
        runner.status = f"{ms:.0f} ms, too slow to take turns" if ms > SLOW_MS else runner.status


def _as_graph(runner: Guarded, sets: int) -> None:
    """Capture enough calls in one graph for timing, and at least as many as there are inputs."""
    ms = timed(runner.call, sets, runner.device).ms
    rounds = math.ceil(GRAPH_MS / max(ms, 1e-3) / sets)
    calls = sets * max(1, min(rounds, MOST_CALLS // sets))
    runner.call, runner.calls = captured(runner.call, calls), calls


def _ms(runner: Guarded) -> np.ndarray:
    """Milliseconds per call, for each round."""
    return runner.by_round()[0] / runner.calls


def _row(one: Guarded, base: Guarded | None, best: Guarded | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": one.name, "role": one.role, "status": one.status, "first_s": one.first_s}
    if one.status != OK:
        return row
    ms = _ms(one)
    low, middle, high = (float(x) for x in np.quantile(ms, (0.1, 0.5, 0.9)))
    row |= {"median_ms": middle, "p10_ms": low, "p90_ms": high, "least_ms": float(ms.min()), "samples": len(ms)}
    row |= {"peak_mb": one.peak_mb, "calls": one.calls}
    return row | {"against_sdpa": _ratio(base, one), "against_best": _ratio(best, one)}


def _ratio(base: Guarded | None, other: Guarded) -> list[float] | None:
    """Ratio of base to other, with its interval."""
    if base is None or base.status != OK:
        return None
    first, second = _ms(base), _ms(other)
    low, high = ratio_interval(first.tolist(), second.tolist(), resamples=RESAMPLES)
    return [float(np.median(first) / np.median(second)), low, high]


def work(arguments: dict[str, Any], say: Say, before: Mapping[str, Row]) -> dict[str, Any]:
    """Run one job: `given` has its `kind`, the `device`, and the arguments of that kind."""
    device = torch.device(arguments["device"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # Every length is compiled separately, and after a few the compiler would give up.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    kinds = {"machine": _machine, "try": _try, "part": _part, "verification": _verification, "checks": _checks}
    # The kernels verified here have not passed their check yet.
    with unchecked():
        return kinds[arguments["kind"]](arguments, device, say, before)


def _machine(arguments: dict[str, Any], device: torch.device, say: Say, before: Mapping[str, Row]) -> dict[str, Any]:
    return {"environment": described(device), "rates": calibrate(device)}


def _try(arguments: dict[str, Any], device: torch.device, say: Say, before: Mapping[str, Row]) -> dict[str, Any]:
    """Run a contender once on the shapes of a part, compare it with its reference, and capture it.

    Its process ends with it, whatever happened: one that wrote where it must not may have spoiled what others would
    read.
    """
    part, name = Part(**arguments["part"]), arguments["name"]
    if name in before:
        return {"name": name, "status": before[name]["status"], SPENT: True}
    say({"name": name, "role": arguments["role"]})
    train, graph = part.mode == "train", part.way == "graph"
    try:
        if part.suite in SUITES:
            shapes = [(part.batch, part.length, HEADS)]
            how: dict[str, Any] = {"shapes": shapes, "train": train, "graph": graph}
            found = verify(part.suite, name, getattr(torch, part.dtype), device, **how)
            refused = (found["graphs"].get(part.mode) or "").startswith(("cannot", "gives"))
            status = found["graphs"][part.mode] if found["status"] == "ok" and graph and refused else found["status"]
        else:
            found, status = {"errors": {}}, "ok"
            if part.suite == "decode" and arguments["role"] == "variant":
                found = verify_decoding(name, getattr(torch, part.dtype), device, part.length)
                status = found["status"]
            status = runs(part, name, device) if status == "ok" else status
    except Exception as error:  # what fails here is not timed, and the page says why
        found, status = {}, in_one_line(error)
    _alive(device, status)
    return {"name": name, "status": status, "errors": found.get("errors", {}), SPENT: True}


def runs(part: Part, name: str, device: torch.device) -> str:
    """`ok` if a model's outputs are numbers, and the same from a captured graph; or what is wrong with them."""
    everyone = of_models(part.suite, part.length, part.batch, getattr(torch, part.dtype), device)
    call = next(call for each, _, call in everyone if each == name)
    outputs: list[Tensor] = []

    def keeping() -> None:
        out = call()
        assert isinstance(out, Tensor), "a call returns the last hidden states"
        outputs[:] = [out]

    with torch.no_grad():
        keeping()
        eager = outputs[0].clone()
        if device.type == "cuda" and part.way == "graph":
            replay = captured(keeping, 1)
            outputs[0].fill_(torch.nan)
            replay()
            torch.cuda.synchronize()
    if not bool(eager.isfinite().all() and outputs[0].isfinite().all()):
        return "failed: outputs are not finite"
    # A state counts every call, so a decoded token differs from the one before.
    same = part.suite == "decode" or torch.allclose(outputs[0], eager, rtol=0.05, atol=0.05)
    return "ok" if same else "gives something else as a graph"


def _part(arguments: dict[str, Any], device: torch.device, say: Say, before: Mapping[str, Row]) -> dict[str, Any]:
    # Captures collect garbage, and would each scan everything that was ever imported.
    gc.collect()
    gc.freeze()
    return measure(Part(**arguments["part"]), device, say, refusing(arguments["tried"]), before)


def refusing(tried: Mapping[str, str]) -> Callable[[str, str], str | None]:
    """Which contenders not to time: those whose try went wrong, or did not come to an end."""

    def refuse(name: str, role: str) -> str | None:
        status = tried.get(name, UNTRIED)
        return None if status == "ok" else status if status == UNTRIED else f"not timed: {status}"

    return refuse


def _verification(
    arguments: dict[str, Any], device: torch.device, say: Say, before: Mapping[str, Row]
) -> dict[str, Any]:
    name = arguments["name"]
    result: dict[str, Any] = {"errors": {}, "kernels": [], "graphs": {}, "sources": sources(arguments["suite"], name)}
    if name in before:
        return result | {"status": before[name]["status"]}
    say({"name": name, "role": "variant"})
    try:
        dtype = getattr(torch, arguments["dtype"])
        decoding = arguments["suite"] == "decode"
        result |= verify_decoding(name, dtype, device) if decoding else verify(arguments["suite"], name, dtype, device)
    except Exception as error:  # what fails here is not used, and the page says why
        result["status"] = in_one_line(error)
    _alive(device, result["status"])
    spent = any(message and message.startswith("cannot") for message in result["graphs"].values())
    return result | ({SPENT: True} if spent else {})


def _checks(arguments: dict[str, Any], device: torch.device, say: Say, before: Mapping[str, Row]) -> dict[str, Any]:
    return keep_all(arguments["checks"], device)


def _alive(device: torch.device, status: str) -> None:
    """Abandon the process if its device no longer responds."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise LostError(status) from None
