"""The jobs of the processes of `bench/gpu.py`: inspect the machine, try a contender, time a part, or verify a mechanism."""

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from approx_kernels.dispatch.checked import unchecked
from bench import gpu_models
from bench.cpu_cases import HEADS
from bench.gpu_cases import SUITES
from bench.gpu_checks import keep_all, sources
from bench.gpu_graphs import captured
from bench.gpu_machine import calibrate, described
from bench.gpu_race import Part, measure
from bench.gpu_verify import verify, verify_decoding
from bench.gpu_workers import SPENT, LostError, Row, Say, in_one_line

# The status of a contender whose try did not come to an end.
UNTRIED = "not tried in time, so not timed"


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
    everyone = gpu_models.contenders(part.suite, part.length, part.batch, getattr(torch, part.dtype), device)
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
