"""A process without approx, approx_kernels and triton, in which a written folder has to work.

Importing PyTorch and transformers takes most of such a check. So one process begins with that while the folder is still
being made, and each folder is loaded in a fork of it, which has seen no other. Where a process cannot be forked after these
imports, each folder gets one of its own.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Lock

from safetensors.torch import load_file, save_file
from torch import Tensor, get_num_threads

from approx_kernels.runtime.cache_folder import cache_folder

# Libraries of macOS do not survive a fork, and Windows has none.
_FORKS = sys.platform == "linux"
# The check is one of the CPU, and what has looked for GPUs cannot be forked.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class ReloadError(Exception):
    """The folder did not load or gave nothing, for the reason that stands here."""


class Reloader:
    """The process; it begins to import at once."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._home = tempfile.TemporaryDirectory(prefix="approx-fresh-")
        self._said = Path(self._home.name, "said")
        # What is appended to starts again once it is truncated.
        with self._said.open("a") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, *(["forks"] if _FORKS else [])],
                cwd=self._home.name,
                env={**os.environ, **_ENVIRONMENT, "HF_MODULES_CACHE": f"{self._home.name}/modules"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it still runs, and is this process's, not that of one it was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def first_outputs(self, folder: Path, auto: str, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        """See the function of this name."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory(dir=self._home.name) as scratch:
            for number, each in enumerate(inputs):
                save_file({key: x.contiguous() for key, x in each.items()}, f"{scratch}/{number}.safetensors")
            asked = {"folder": str(folder.resolve()), "auto": auto, "scratch": scratch, "calls": len(inputs)}
            # What was compiled and found for this process holds there too; another way to attend would round otherwise.
            asked |= {"threads": get_num_threads(), "cache": str(cache_folder().absolute())}
            try:
                print(json.dumps(asked), file=self._process.stdin, flush=True)
                status = self._process.stdout.readline().strip()
            except BrokenPipeError:
                status = ""
            if status != "0":
                said = self._said.read_text("utf-8", "replace").strip().splitlines()
                raise ReloadError(said[-1] if said else "it died")
            found = load_file(f"{scratch}/outputs.safetensors")
            return [found[str(number)] for number in range(len(inputs))]

    def close(self) -> None:
        """End it, whatever it does."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
            self._home.cleanup()


_current: Reloader | None = None
_lock = Lock()


def begin() -> None:
    """Let the process import what it needs, while there is other work to be done."""
    with _lock:
        _usable()


def first_outputs(folder: Path, auto: str, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
    """Load a folder in a fresh process and run it there, its mechanisms at any length, whatever their `exact_below` says.

    Args:
        folder: Of the checkpoint.
        auto: The auto class of transformers that loads it.
        inputs: What the model is called with, one call after another; after the first its base model is called, without a cache.

    Returns:
        The first output of each call.

    Raises:
        ReloadError: if there is none.
    """
    with _lock:
        found = _usable()
        try:
            return found.first_outputs(folder, auto, inputs)
        finally:
            if not _FORKS:
                found.close()


def _usable() -> Reloader:
    global _current
    if _current is None or not _current.usable:
        _current = Reloader()
    return _current


# It is text: whatever this process has imported must not help it.
_SERVER = """
import inspect, json, os, shutil, sys, traceback
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("approx", "approx_kernels", "triton"):
            raise ModuleNotFoundError(f"{name} is kept out of this check", name=name)
sys.meta_path.insert(0, Absent())
asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
# transformers may ask whether to trust code; here nobody answers, and nothing but an answer passes for one.
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
import torch, transformers
from safetensors.torch import load_file, save_file
# The file of one family brings what those of all import.
from transformers import BertModel

def reload(folder, auto, scratch, calls, threads, cache):
    torch.set_num_threads(threads)
    os.environ["APPROX_CACHE"] = cache
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    for module in model.modules():
        if hasattr(module, "exact_below"):
            module.exact_below = 0
    found = {}
    with torch.inference_mode():
        for number in range(calls):
            part, inputs = model.base_model if number else model, load_file(f"{scratch}/{number}.safetensors")
            if number and "use_cache" in inspect.signature(part.forward).parameters:
                inputs["use_cache"] = False
            found[str(number)] = part(**inputs)[0].contiguous()
    save_file(found, f"{scratch}/outputs.safetensors")

def status(**wanted):
    try:
        reload(**wanted)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in asked:
    os.truncate("said", 0)
    shutil.rmtree("modules", ignore_errors=True)
    child = os.fork() if "forks" in sys.argv else None
    if child == 0:
        os._exit(status(**json.loads(line)))
    answers.write(f"{os.waitpid(child, 0)[1] if child else status(**json.loads(line))}\\n")
    answers.flush()
"""
