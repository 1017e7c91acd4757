"""Whether the Triton kernels of an op have passed their check here: on this kind of GPU, from these sources, in these versions.

No call runs a check. `python bench/gpu.py` compares every op with its reference on the GPU and keeps what it finds beside the
findings of `approx doctor --probe`; until an op has passed in a dtype, `auto` takes PyTorch for it there.
"""

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.dispatch.findings import found, keep
from approx_kernels.gpu.language import triton
from approx_kernels.runtime.torch_internals import constant_result

# Every op that has kernels, and its folder.
OPS: Mapping[str, str] = MappingProxyType(
    {
        "adaptive_span_attention": "adaptive_span",
        "bigbird_attention": "blocks",
        "block_attention": "blocks",
        "causal_clustered_attention": "clustered",
        "cluster_queries": "clustering",
        "clustered_attention": "clustered",
        "flash": "flash",
        "flash_attention": "flash",
        "global_token_attention": "global_tokens",
        "linear_attention": "linear",
        "linear_decode": "linear",
        "local_attention": "local",
        "lsh_attention": "lsh",
        "performer_attention": "performer",
        "performer_decode": "performer",
        "strided_attention": "strided",
        "summary_attention": "summaries",
        "topk_attention": "topk",
    }
)
# How the findings that are checks begin.
ABOUT = "kernels of "
AGAIN = "`python bench/gpu.py -o FOLDER`, in a checkout of approx, checks them"

_IMPORT = re.compile(r"^(\s*from )\.?(approx_kernels[\w.]*)(?= import )", re.MULTILINE)
_trusting: list[bool] = []


class Check(NamedTuple):
    """What the check of an op found: the dtypes in which it passed, and what was wrong in others."""

    passed: Sequence[str]
    wrong: Mapping[str, str]


@contextmanager
def unchecked() -> Iterator[None]:
    """Let `auto` take kernels that have not passed their check. For those who check and time them."""
    _trusting.append(True)
    try:
        yield
    finally:
        _trusting.pop()


def doubt(op: str, x: Tensor) -> str | None:
    """Why `auto` leaves out the kernels of an op for tensors like this one, with the remedy; None where it may take them.

    Only on CUDA tensors is there any doubt: elsewhere nothing but an explicit choice runs kernels.
    """
    if _trusting or not x.is_cuda:
        return None
    device, why = str(x.device), _doubt(op, str(x.device), str(x.dtype))
    if why is None and torch.is_autocast_enabled(x.device.type):
        # Some ops compute in that dtype, others in their own.
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
    """What was found of the kernels of an op on a device, `cuda` or `cuda:1`; None before a check of what is there now."""
    kept = found(device).get(ABOUT + op)
    if kept is None or kept.get("of") != identity(op):
        return None
    return Check(kept["passed"], kept["wrong"])


def keep_check(op: str, device: str, check: Check) -> None:
    """Keep what a check found, for this process and for those that begin later.

    Raises:
        OSError: if it cannot be written.
    """
    keep(device, ABOUT + op, {"of": identity(op), "passed": list(check.passed), "wrong": dict(check.wrong)})


@functools.cache
def identity(op: str) -> str:
    """What a check of an op is about: a digest of its sources, and the versions that run them.

    The sources are all that the op imports from this package, but those of C. Comments and empty lines do not count, nor does
    whether the files lie in their folders or side by side, as in a converted checkpoint.
    """
    here = Path(__file__)
    files = _in_folders(here.parents[1]) if here.stem == "checked" else {x.stem: x for x in here.parent.glob("*.py")}
    return f"{_digest(files, f'approx_kernels_ops_{OPS[op]}_api')}, torch {torch.__version__}, triton {_version()}"


def _version() -> str | None:
    return getattr(triton, "__version__", None)


def _in_folders(root: Path) -> dict[str, Path]:
    """The files of the package by the names that they have side by side."""
    flat = {}
    for path in root.rglob("*.py"):
        inner = path.relative_to(root).with_suffix("").parts
        flat["_".join(("approx_kernels", *(part for part in inner if part != "__init__")))] = path
    return flat


def _digest(files: Mapping[str, Path], first: str) -> str:
    """A number that changes with a module and all that it imports from `files`."""
    waiting, read = [first], dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name in read or name not in files or re.search(r"_kernels_cpu_|cpu$", name):
            continue
        text = files[name].read_text(encoding="utf-8")
        waiting += [needed.replace(".", "_") for _, needed in _IMPORT.findall(text)]
        lines = _IMPORT.sub(lambda it: f"{it[1]}.{it[2].replace('.', '_')}", text).splitlines()
        read[name] = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    whole = "\n".join(f"{name}\n{read[name]}" for name in sorted(read))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
