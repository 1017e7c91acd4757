"""Dtypes of files: what a conversion and its reversal keep, whatever transformers loads them in."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from approx.checkpoints.manifest import MANIFEST
from approx.conversion import convert
from approx.conversion.convert import keep_dtypes
from approx.planning.plan import Plan
from tiny_study import tiny_checkpoint

PLAN = Plan.of("local", left=2, right=2)


def half(name: str, tensor: Tensor) -> Tensor:
    return tensor.half()


def half_but_norms(name: str, tensor: Tensor) -> Tensor:
    return tensor if "LayerNorm" in name or "position" in name else tensor.half()


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (half, {"dtype": "float16"}),
        (half, {"torch_dtype": "float16"}),
        (half, {}),
        # transformers loads these in another dtype than that of the file.
        (half, {"dtype": "float32"}),
        (half_but_norms, {}),
        (half_but_norms, {"dtype": "float16"}),
    ],
)
@pytest.mark.parametrize("max_length", [None, 50])
@pytest.mark.sample(3)
def test_the_dtype_of_every_tensor_survives_conversion_and_reversal(
    tmp_path, monkeypatch, change: Callable[[str, Tensor], Tensor], settings, max_length
):
    base = tiny_checkpoint(tmp_path / "base")
    state = load_file(base / "model.safetensors")
    # Numbers that 16 bits cannot hold.
    state = {name: change(name, tensor + 1e-6) for name, tensor in state.items()}
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | settings
    (base / "config.json").write_text(json.dumps(config))
    # The reload in a fresh process is slow, and is tested elsewhere.
    monkeypatch.setattr("approx.conversion.verify.fresh_process", lambda folder, model: convert.verify.causality(model))
    convert.convert(base, tmp_path / "converted", PLAN, max_length=max_length)
    written = load_file(tmp_path / "converted" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items() if name in state} == {
        name: tensor.dtype for name, tensor in state.items()
    }
    convert.revert(tmp_path / "converted", tmp_path / "reverted")
    assert (tmp_path / "reverted" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert not (tmp_path / "reverted" / MANIFEST).exists()


def test_keeps_the_values_of_trained_tensors(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    save_file({"same": torch.ones(2).half(), "trained": torch.ones(2).half()}, source / "model.safetensors")
    save_file({"same": torch.ones(2), "trained": torch.ones(2) + 1e-4, "new": torch.ones(2)}, target / "a.safetensors")
    names = dict.fromkeys(("same", "trained", "new"), "a.safetensors")
    index = {"metadata": {"total_size": 24}, "weight_map": names}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    keep_dtypes(source, target)
    written = load_file(target / "a.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        "same": torch.float16,
        "trained": torch.float32,
        "new": torch.float32,
    }
    assert torch.equal(written["trained"], torch.ones(2) + 1e-4)
    assert json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 20
