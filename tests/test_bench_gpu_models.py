"""Models of the GPU benchmark where there is no GPU: nothing in them may wait for the device, or they could be no CUDA graphs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from bench import gpu_models

# What brings a number to the processor, or makes a shape that depends on one.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "repeat_interleave")


class Waits(TorchDispatchMode):
    """The operators that a GPU would have to be waited for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        chosen = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(x is not None and x.dtype == torch.bool for x in chosen):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def waits(call):
    call()
    with torch.no_grad(), Waits() as mode:
        call()
    return mode.found


@pytest.mark.parametrize("suite", ["roberta", "roberta-padded", "gpt2", "decode"])
def test_models_can_be_graphs(suite, monkeypatch):
    monkeypatch.setattr(gpu_models, "LAYERS", 1)
    # Only while a graph is captured transformers keeps from reading masks.
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    alike = ("sdpa", "no attention") if suite == "roberta-padded" else ("sdpa", "no attention", "flash", "linear")
    given = suite, 40, 2, torch.float32, torch.device("cpu")
    with torch.no_grad():
        ran = {name: waits(call) for name, _, call in gpu_models.contenders(*given) if name in alike}
    assert {"sdpa"} < set(ran)
    assert {name: found for name, found in ran.items() if found} == {}


def test_what_waits_is_found():
    mask = torch.tensor([True, False])
    assert waits(lambda: bool(mask.all())) == ["_local_scalar_dense"]
    assert waits(lambda: mask.float()[mask]) == ["index"]
