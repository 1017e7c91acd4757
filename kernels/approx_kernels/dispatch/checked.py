"""Whether the Triton kernels of an op have passed their check, on this kind of GPU with these sources and versions.

Calls never run a check. `python bench/gpu.py` compares every op with its reference on the GPU and stores the results
with the findings of `approx doctor --probe`. What it found on the GPUs that this package was made on is in
`verified.json`. Until an op has passed in a dtype, here or there, `auto` uses PyTorch for it.
"""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.dispatch.findings import found, keep
from approx_kernels.gpu.language import CAPABILITY, HOPPER, assembler, assembler_obstacle, triton
from approx_kernels.runtime.pytorch import constant_result

# Every op with kernels, and its folder.
OPS: Mapping[str, str] = MappingProxyType(
    {
        "adaptive_span_attention": "adaptive_span",
        "bigbird_attention": "patterns",
        "block_attention": "patterns",
        "causal_clustered_attention": "clustered",
        "cluster_queries": "clustering",
        "clustered_attention": "clustered",
        "flash": "flash",
        "flash_attention": "flash",
        "global_token_attention": "patterns",
        "linear_attention": "linear",
        "linear_decode": "linear",
        "local_attention": "patterns",
        "lsh_attention": "lsh",
        "performer_attention": "performer",
        "performer_decode": "performer",
        "strided_attention": "patterns",
        "summary_attention": "patterns",
        "topk_attention": "topk",
    }
)
# By compute capability: the `gpu`, `triton` and `ptxas` that `python bench/gpu.py -o reports/gpu` ran with, and by op
# the digest of its sources and the dtypes in which it passed.
VERIFIED = Path(__file__).with_name("verified.json")
# Prefix of the findings that are checks.
ABOUT = "kernels of "
AGAIN = "`python bench/gpu.py -o FOLDER`, in a checkout of approx, checks them"

# Modules, by their names in the flat layout, on which the results of Triton kernels do not depend.
_UNCOUNTED = re.compile(r"_kernels_(cpu|dispatch|runtime)_|(cpu|reference)$")
_trusting: list[bool] = []


class Check(NamedTuple):
    """Result of the check of an op: the dtypes in which it passed, and the errors in others."""

    passed: Sequence[str]
    wrong: Mapping[str, str]


@contextmanager
def unchecked() -> Iterator[None]:
    """Let `auto` use kernels that have not passed their check, to check and time them."""
    _trusting.append(True)
    try:
        yield
    finally:
        _trusting.pop()


def doubt(op: str, x: Tensor) -> str | None:
    """Why `auto` does not use the kernels of an op for tensors like this one, with the remedy; None if it may.

    Always None except for CUDA tensors: elsewhere kernels run only on explicit request.
    """
    if _trusting or not x.is_cuda:
        return None
    device, why = str(x.device), _doubt(op, str(x.device), str(x.dtype))
    if why is None and torch.is_autocast_enabled(x.device.type):
        # Some ops compute in the autocast dtype, others in their own.
        why = _doubt(op, device, str(torch.get_autocast_dtype(x.device.type)))
    return why


@constant_result
def _doubt(op: str, device: str, dtype: str) -> str | None:
    kind, check = dtype.removeprefix("torch."), check_of(op, device)
    anyway = "ask for impl='triton' to run them anyway."
    if check is None:
        return f"they have not been checked on this GPU with these versions; {AGAIN}. Or {anyway}"
    if kind in check.wrong:
        return f"their check on this GPU failed in {kind}: {check.wrong[kind]}. After a fix, {AGAIN}. Or {anyway}"
    if kind not in check.passed:
        return f"they have not been checked in {kind} on this GPU; {AGAIN}. Or {anyway}"
    return None


def check_of(op: str, device: str) -> Check | None:
    """The check of an op's kernels on a device, `cuda` or `cuda:1`, made there or shipped; None without one."""
    kept = found(device).get(ABOUT + op)
    if kept is not None and kept.get("of") == identity(op):
        return Check(kept["passed"], kept["wrong"])
    return _shipped(op, device)


def _shipped(op: str, device: str) -> Check | None:
    """The check that this package brings for GPUs of the same compute capability.

    It is valid for the same sources, compiled by the same minor version of Triton and any assembler that is right
    there.
    """
    if torch.device(device).type != "cuda" or not VERIFIED.is_file():
        return None
    capability = torch.cuda.get_device_capability(device)
    known: dict[str, Any] = json.loads(VERIFIED.read_text(encoding="utf-8")).get("{}.{}".format(*capability), {})
    one = known.get("ops", {}).get(op)
    if one is None or one["of"] != digest(op) or assembler_obstacle(*capability) is not None:
        return None
    return Check(one["passed"], {}) if _minor(getattr(triton, "__version__", "")) == _minor(known["triton"]) else None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def keep_check(op: str, device: str, check: Check) -> None:
    """Store the result of a check, for this process and later ones.

    Raises:
        OSError: if it cannot be written.
    """
    keep(device, ABOUT + op, {"of": identity(op), "passed": list(check.passed), "wrong": dict(check.wrong)})


@functools.cache
def identity(op: str) -> str:
    """The subject of an op's check: a digest of its sources, and the versions of torch, triton and its assemblers."""
    versions = f"torch {torch.__version__}, triton {getattr(triton, '__version__', None)}, ptxas {_assemblers()}"
    return f"{digest(op)}, {versions}"


@functools.cache
def digest(op: str) -> str:
    """A digest of the sources of an op.

    They are all modules that it imports from this package, except C, the choice of an implementation, how PyTorch calls
    it, and the references, with which the kernels are compared on every machine.
    Their syntax trees are hashed: comments, docstrings, formatting and the layout of the files, in folders or flat as
    in a converted checkpoint, do not matter.
    """
    here = Path(__file__)
    files = _in_folders(here.parents[1]) if here.stem == "checked" else {x.stem: x for x in here.parent.glob("*.py")}
    return _digest(files, f"approx_kernels_ops_{OPS[op]}_api")


def _assemblers() -> str:
    """The versions of all assemblers that Triton may run; a process that compares identities may not ask the GPU."""
    used = [assembler(capability) for capability in (CAPABILITY, HOPPER, (10, 0))]
    return " and ".join(dict.fromkeys("unknown" if one is None else one.version for one in used))


def _in_folders(root: Path) -> dict[str, Path]:
    """The files of the package by their names in the flat layout."""
    flat = {}
    for path in root.rglob("*.py"):
        inner = path.relative_to(root).with_suffix("").parts
        flat["_".join(("approx_kernels", *(part for part in inner if part != "__init__")))] = path
    return flat


def _digest(files: Mapping[str, Path], first: str) -> str:
    """A hash of a module and everything it imports from `files`."""
    waiting, read = [first], dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name in read or name not in files or _UNCOUNTED.search(name):
            continue
        tree = ast.parse(files[name].read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("approx_kernels"):
                # As in a converted checkpoint, where all files are in one folder.
                node.level, node.module = 1, (node.module or "").replace(".", "_")
                waiting.append(node.module)
        read[name] = written(tree)
    whole = "\n".join(f"{name}\n{read[name]}" for name in sorted(read))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def written(node: object) -> str:
    """A part of a syntax tree as text, which is the same in all versions of Python.

    It has no positions, docstrings, empty fields and imports of modules that do not count in a digest.
    """
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if isinstance(node, list):
        return f"[{', '.join(written(each) for each in node if not _is_silent(each))}]"
    if isinstance(node, ast.AST):
        fields = [(name, each) for name, each in ast.iter_fields(node) if each is not None and each != []]
        return f"{type(node).__name__}({', '.join(f'{name}={written(each)}' for name, each in sorted(fields))})"
    return ascii(node)


def _is_silent(node: object) -> bool:
    """Whether a statement is a docstring, or imports a module that does not count."""
    if isinstance(node, ast.ImportFrom):
        return _UNCOUNTED.search(node.module or "") is not None
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
