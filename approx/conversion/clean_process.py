"""A process without approx, approx_kernels and triton, in which a written folder has to work.

Importing PyTorch and transformers takes most of the time of such a check. One process therefore imports them while the
folder is still being written, and loads each folder in a separate fork. Where processes cannot be forked after these
imports, each folder gets its own process.
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

from approx.conversion import widened
from approx_kernels.runtime.cache_folder import cache_folder

# macOS libraries do not survive a fork, and Windows has no fork.
_FORKS = sys.platform == "linux"
# The check runs on the CPU, and a process that has initialised CUDA cannot be forked. The code in a folder gets no token.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}


class ReloadError(Exception):
    """The folder did not load or gave no outputs; the message is the reason."""


class Reloader:
    """The process that reloads folders; it starts importing at once."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._home = tempfile.TemporaryDirectory(prefix="approx-fresh-")
        self._said = Path(self._home.name, "said")
        # In append mode, writes restart at the beginning after the file is truncated.
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
        """Whether it still runs and belongs to this process, not to a parent that was forked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def first_outputs(self, folder: Path, auto: str, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        """See the module's function of the same name."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory(dir=self._home.name) as scratch:
            for number, each in enumerate(inputs):
                save_file({key: x.contiguous() for key, x in each.items()}, f"{scratch}/{number}.safetensors")
            asked = {"folder": str(folder.resolve()), "auto": auto, "scratch": scratch, "calls": len(inputs)}
            # Share the compiled code and probe results: another implementation would round differently.
            asked |= {"threads": get_num_threads(), "cache": str(cache_folder().absolute())}
            # It imports nothing of approx, and both processes have to multiply alike.
            asked |= {"alike": str(Path(widened.__file__).absolute())}
            try:
                print(json.dumps(asked), file=self._process.stdin, flush=True)
                status = self._process.stdout.readline().strip()
            except BrokenPipeError:
                status = ""
            if status != "0":
                said = self._said.read_text("utf-8", "replace").strip().splitlines()
                raise ReloadError(said[-1] if said else "it died")
            outputs = load_file(f"{scratch}/outputs.safetensors")
            return [outputs[str(number)] for number in range(len(inputs))]

    def close(self) -> None:
        """Kill the process."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
            self._home.cleanup()


_current: Reloader | None = None
_lock = Lock()


def begin() -> None:
    """Start the process, so that it imports while other work is done."""
    with _lock:
        _usable()


def first_outputs(folder: Path, auto: str, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
    """Load a folder in a fresh process and run it there, ignoring its `exact_below`.

    Args:
        folder: Folder of the checkpoint.
        auto: The auto class of transformers that loads it.
        inputs: Inputs of each call; the first calls the model, the others its base model, without a cache.

    Returns:
        The first output of each call.

    Raises:
        ReloadError: if loading or running fails.
    """
    with _lock:
        reloader = _usable()
        try:
            return reloader.first_outputs(folder, auto, inputs)
        finally:
            if not _FORKS:
                reloader.close()


def _usable() -> Reloader:
    global _current
    if _current is None or not _current.usable:
        _current = Reloader()
    return _current


# Source text, so that it does not depend on imports of this process.
_SERVER = """
import inspect, json, os, runpy, shutil, sys, traceback
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("approx", "approx_kernels", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked in this check", name=name)
sys.meta_path.insert(0, Absent())
asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
# transformers may prompt for trusting code, or print; neither must read from or write to the pipes.
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
import torch, transformers
from safetensors.torch import load_file, save_file
# The modules of all families import mostly the same; importing one family now saves time later.
from transformers import BertModel

def reload(folder, auto, scratch, calls, threads, cache, alike):
    torch.set_num_threads(threads)
    os.environ["APPROX_CACHE"] = cache
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    for module in model.modules():
        if hasattr(module, "exact_below"):
            module.exact_below = 0
    outputs = {}
    with runpy.run_path(alike)["widened"](model), torch.inference_mode():
        for number in range(calls):
            part, inputs = model.base_model if number else model, load_file(f"{scratch}/{number}.safetensors")
            if number and "use_cache" in inspect.signature(part.forward).parameters:
                inputs["use_cache"] = False
            outputs[str(number)] = part(**inputs)[0].contiguous()
    save_file(outputs, f"{scratch}/outputs.safetensors")

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
