"""Hashes of everything that results depend on: weights, plan, dtype, code, and examples."""

import ast
import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from approx.checkpoints.checkpoint import Checkpoint
from approx.evaluation.prediction_cache import fingerprint
from approx.tasks.task import Split, Task
from approx_kernels.cpu.compile import compiler_obstacle
from approx_kernels.dispatch.findings import found, instructions

_BESIDE_WEIGHTS = (".json", ".txt", ".model")
_COMPUTES = ("checkpoints", "conversion", "evaluation", "measuring", "mechanisms", "planning", "seam", "tasks")


def identity(opened: Checkpoint) -> str:
    """Hash everything that the outputs of an opened checkpoint depend on.

    The config includes the plan: every mechanism with its settings and seed. Random and calibrated state is among the
    weights. The generation config decides what a model of speech or text writes.
    """
    model: Any = opened.model
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    generation = getattr(model, "generation_config", None)
    ways = None if generation is None else generation.to_dict()
    versions = (torch.__version__, transformers.__version__, code())
    return fingerprint(type(model).__name__, opened.weights_sha256, config, ways, str(model.dtype), versions)


def computed_by(device: torch.device, *, fast_products: bool = False) -> str:
    """What computes on a device: instruction set, C or PyTorch, and the implementations that a probe chose.

    These round differently. They are not part of the identity, which is the same on every machine.
    """
    if device.type == "cuda":
        computes = torch.cuda.get_device_name(device)
    else:
        computes = f"{instructions()}, {'PyTorch alone' if compiler_obstacle() else 'C'}"
    ways = {subject: one.get("way") for subject, one in found(device.type).items()}
    return computes + (f", {fingerprint(ways)}" if ways else "") + ", fast products" * fast_products


def beside(folder: Path) -> str:
    """Hash the files of a checkpoint's folder other than weights: config and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _BESIDE_WEIGHTS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def examples_read(task: Task, split: Split) -> str:
    """Hash a task's settings and its loaded examples, regardless of their location."""
    rows = [(one.id, one.brief, one.label, one.group) for one in split.examples]
    return fingerprint(task.name, vars(task), split.name, split.subset, rows)


@functools.cache
def code(rooms: tuple[str, ...] = _COMPUTES) -> str:
    """Hash the code that results depend on, so that results of other code are not reused.

    Commands, pipeline and publishing do not compute results and are left out, as are docstrings and comments.

    Args:
        rooms: Packages of approx to include, besides the kernels. Training is left out by default: no measurement of a
            finished model depends on it.
    """
    hashed = hashlib.sha256()
    for package, parts in (("approx", rooms), ("approx_kernels", ("",))):
        spec = find_spec(package)
        for place in map(Path, (spec.submodule_search_locations if spec else None) or ()):
            for path in sorted(path for room in parts for path in (place / room).rglob("*") if path.is_file()):
                if path.suffix in (".py", ".c", ".h"):
                    source = path.read_bytes()
                    computes = what_computes(source) if path.suffix == ".py" else source
                    hashed.update(path.relative_to(place).as_posix().encode() + b"\0" + computes)
    return hashed.hexdigest()


def what_computes(source: bytes) -> bytes:
    """The syntax tree of a Python source without docstrings; it has no comments and no line breaks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return ast.dump(tree).encode()
