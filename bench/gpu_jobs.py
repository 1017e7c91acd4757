"""The jobs of the processes of `bench/gpu.py`: inspect the machine, verify or compile a contender, or time a part."""

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from approx_kernels.dispatch.checked import unchecked
from bench import gpu_cases
from bench.gpu_checks import keep_all, sources
from bench.gpu_machine import calibrate, described
from bench.gpu_race import Part, measure
from bench.gpu_verify import verify, verify_decoding
from bench.gpu_workers import SPENT, LostError, Say, told

# Statuses of contenders that were not verified for these inputs, or that would compile while others are timed.
UNVERIFIED, UNCOMPILED = "not verified in time, so not timed", "not compiled in time, so not timed"
LATE = (UNVERIFIED, UNCOMPILED)


def work(given: dict[str, Any], say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    """Run one job: `given` has its `kind`, the `device`, and the arguments of that kind."""
    device = torch.device(given["device"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # Every length is compiled separately, and after a few the compiler would give up.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    kinds = {
        "machine": _machine,
        "verification": _verification,
        "checks": _checks,
        "compilation": _compilation,
        "part": _part,
    }
    # The kernels verified here have not passed their check yet.
    with unchecked():
        return kinds[given["kind"]](given, device, say, without)


def _machine(given: dict[str, Any], device: torch.device, say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    return {"environment": described(device), "rates": calibrate(device)}


def _verification(given: dict[str, Any], device: torch.device, say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    name = given["name"]
    result: dict[str, Any] = {"errors": {}, "kernels": [], "graphs": {}, "sources": sources(given["suite"], name)}
    if name in without:
        return result | {"status": without[name]}
    say(name)
    try:
        dtype = getattr(torch, given["dtype"])
        decoding = given["suite"] == "decode"
        result |= verify_decoding(name, dtype, device) if decoding else verify(given["suite"], name, dtype, device)
    except Exception as error:  # what fails here is not timed, and the page says why
        result["status"] = told(error)
    _alive(device, result["status"])
    spent = any(said and said.startswith("cannot") for said in result["graphs"].values())
    return result | ({SPENT: True} if spent else {})


def _checks(given: dict[str, Any], device: torch.device, say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    return keep_all(given["checks"], device)


def _compilation(given: dict[str, Any], device: torch.device, say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    """Compile slow kernels here, in parallel with others, instead of during timing."""
    part, name = Part(**given["part"]), given["name"]
    if name in without:
        return {"status": without[name]}
    say(name)
    train, dtype = part.mode == "train", getattr(torch, part.dtype)
    how = {"batch": part.batch, "length": part.length, "dtype": dtype, "device": device, "train": train}
    only = gpu_cases.inputs(part.suite, **how)
    one = next(
        each for each in gpu_cases.contenders(part.suite, part.mode, part.length, dtype, device) if each.name == name
    )
    with torch.set_grad_enabled(train):
        forward, leaves, grad = one.make(only[0])
        out = forward()
        if train:
            torch.autograd.grad(out, leaves, grad)
    _alive(device, "ok")
    return {"status": "ok"}


def _part(given: dict[str, Any], device: torch.device, say: Say, without: Mapping[str, str]) -> dict[str, Any]:
    part = Part(**given["part"])
    # Captures collect garbage, and would each scan everything that was ever imported.
    gc.collect()
    gc.freeze()
    late = dict.fromkeys(given.get("uncompiled", ()), UNCOMPILED)
    return measure(part, device, say, _refusing(part, given["verified"], {**late, **without}))


def _refusing(part: Part, verified: Mapping[str, Any], without: Mapping[str, str]) -> Callable[[str, str], str | None]:
    """Which contenders not to run: lost before, incorrect, or unable to be captured as graphs.

    In a model only mechanisms matter; the rest of it is PyTorch's.
    """
    alone = part.suite.startswith("attention")

    def refuse(name: str, role: str) -> str | None:
        if name in without:
            return without[name]
        if not alone and role != "variant":
            return None
        verification = verified.get(name)
        if verification is None:
            return UNVERIFIED
        if verification["status"] != "ok":
            return f"not timed: {verification['status']}"
        said = verification["graphs"].get(part.mode) if alone and part.way == "graph" else None
        return said if said and said.startswith(("cannot", "gives")) else None

    return refuse


def _alive(device: torch.device, status: str) -> None:
    """Abandon the process if its device no longer responds."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise LostError(status) from None
