"""The seam alone: the changes that surgery makes to a model, and exact attention through it in an unconverted model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from approx.conversion import surgery
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.dispatch import IMPLEMENTATION, fastest_exact
from approx_kernels.dispatch import findings
from approx_kernels.runtime.cache_folder import private_folder
from zoo import difference, outputs, tiny

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["BertModel", "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_changes_only_attention(architecture, dtype, grad, monkeypatch):
    model = tiny(architecture).to(dtype).eval()
    # As many rows as a long text has, and as few as a decoding step.
    calls = [example_inputs(model, length, batch=batch) for batch, length in ((8, 64), (1, 1))]

    def logits() -> list[torch.Tensor]:
        with torch.set_grad_enabled(grad):
            return [model(**inputs)[0].detach() for inputs in calls]

    before, layers = logits(), {name: type(module) for name, module in model.named_modules()}
    surgery.convert(model, Plan.of("sdpa"))
    # Other layers must not change, whatever the machine.
    monkeypatch.setattr(findings, "machine", pytest.fail)
    for actual, expected in zip(logits(), before, strict=True):
        assert torch.equal(actual, expected)
    types = {name: type(module) for name, module in model.named_modules() if name and ".mechanism" not in name}
    assert types == {name: kind for name, kind in layers.items() if name}
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model", "LlamaModel", "WhisperModel"])
def test_a_model_that_is_not_converted_attends_exactly_by_the_seam(architecture):
    model = tiny(architecture).eval()
    sound = architecture == "WhisperModel"
    inputs = example_inputs(model, 20, batch=1 if sound else 2, padded=0 if sound else 5)
    before, stock = outputs(model, inputs), model.config._attn_implementation
    with fastest_exact(model):
        assert model.config._attn_implementation == IMPLEMENTATION
        after = outputs(model, inputs)
    assert model.config._attn_implementation == stock
    mask = inputs.get("attention_mask", torch.ones(1, 1)).bool()
    real = mask if mask.shape == before[0].shape[:2] else slice(None)
    assert difference([before[0][real]], [after[0][real]]) < 1e-5


_FORWARD = """
import hashlib, json, sys
import torch, transformers
from approx.conversion import surgery
from approx.planning.plan import Plan
torch.set_num_threads(2)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
digests = []
for dtype in (torch.float32, torch.bfloat16):
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=600, **sizes)).eval()
    surgery.convert(model, Plan.of("exact"))
    model.to(dtype)
    with torch.inference_mode():
        out = model(torch.arange(520)[None] % 50).last_hidden_state
    digests.append(hashlib.sha256(out.float().numpy().tobytes()).hexdigest())
probes = [name for name in sys.modules if name.startswith("approx_kernels") and "probe" in name]
print(json.dumps({"bits": digests, "threads": torch.get_num_threads(), "probes": probes}))
"""


@pytest.mark.slow
def test_fresh_processes_measure_nothing_and_compute_the_same_bits(tmp_path):
    made = []
    # Processes may share compiled code; findings about the machine would be stored beside it.
    compiled = private_folder("compiled")
    for name in ("one", "another"):
        cache = tmp_path / name
        cache.mkdir()
        (cache / "compiled").symlink_to(compiled)
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        environment = {**os.environ, "APPROX_CACHE": str(cache), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", _FORWARD], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        made.append(json.loads(done.stdout))
        assert {path.name for path in cache.iterdir()} <= {"compiled"}, "something was found out about the machine"
    assert made[0] == made[1]
    assert len(made[0]["bits"]) == 2
    assert (made[0]["threads"], made[0]["probes"]) == (2, [])
