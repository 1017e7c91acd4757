"""Programs that decode: logits and a state from tokens and a state, as PyTorch decodes, in constant memory where mechanisms can."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from approx.checkpoints import exported
from approx.conversion import decoding, export, surgery
from approx.conversion.verify import difference
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from zoo import tiny

LAYERS = {
    "GPT2LMHeadModel": ("n_layer", "n_positions"),
    "LlamaForCausalLM": ("num_hidden_layers", "max_position_embeddings"),
}
# Keys of Llama are shared by heads, positions of GPT-2 are learned. Windows are shorter and longer than the pieces that are read.
CASES = [
    ("LlamaForCausalLM", "linear", {"window": 16, "sinks": 2}),
    ("GPT2LMHeadModel", "linear", {"window": 0, "sinks": 0}),
    ("GPT2LMHeadModel", "linear", {"window": 1, "sinks": 0}),
    ("GPT2LMHeadModel", "linear", {"gate": False, "window": 16}),
    ("LlamaForCausalLM", "linear", {"gate": False, "feature_map": "elu"}),
    ("LlamaForCausalLM", "linear", {"feature_map": "gated", "window": 16, "sinks": 2}),
    ("LlamaForCausalLM", "performer", {"window": 16, "sinks": 2, "features": 16}),
    ("GPT2LMHeadModel", "performer", {"window": 0, "sinks": 0, "features": 16}),
    ("LlamaForCausalLM", "performer", {"window": 0, "sinks": 0, "features": 16, "kernel": "relu"}),
    ("LlamaForCausalLM", "sinks", {"sinks": 2, "window": 16}),
    ("GPT2LMHeadModel", "sinks", {"sinks": 0, "window": 70}),
    ("LlamaForCausalLM", "local", {"left": 16}),
    ("GPT2LMHeadModel", "local", {"left": 0}),
]
FAST = CASES[0]


def decoder(family, *rules):
    """A tiny model of one layer for each rule: a mechanism and its settings, or None for a layer that stays as it is."""
    layers, most = LAYERS[family]
    model = tiny(family, **{layers: len(rules), most: 300}).eval()
    named = [Rule(rule[0], str(layer), rule[1]) for layer, rule in enumerate(rules) if rule is not None]
    if named:
        surgery.convert(model, Plan(tuple(named)))
    return model


def opened(model, folder):
    """The program of a model in ONNX Runtime, and the state before the first token."""
    with torch.no_grad(), export.quiet():
        first = decoding.first_state(model)
        program, inputs, outputs = decoding.program(model, first)
        export._save_onnx(program, model, folder / "model.onnx", inputs, outputs)
    return exported.session(folder / "model.onnx", "onnxruntime"), first


def off(model, session, first, *size):
    """The largest relative difference of the program's logits from PyTorch's."""
    with torch.no_grad():
        return difference(*decoding.compared(model, lambda inputs: [*session.run(inputs).values()], first, *size))


@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case is not FAST)) for case in CASES],
)
def test_a_program_decodes_as_the_model_does_in_constant_memory(family, name, settings, tmp_path):
    model = decoder(family, (name, settings))
    session, first = opened(model, tmp_path)
    assert not first.growing
    for size in ((1, 2), (1, 12), (3, 40), (2, 120)):
        assert off(model, session, first, *size) < 1e-4, size
    state, token = dict(first.tensors), torch.tensor([[5]])
    # Learned positions end.
    for _ in range(1000 if family[0] == "L" else 250):
        found = session.run({"input_ids": token, "attention_mask": torch.ones_like(token), **state})
        token = found.pop("logits")[:, -1].argmax(-1, keepdim=True)
        state = {each.replace("present", "past", 1): x for each, x in found.items()}
    assert {each: x.shape for each, x in state.items()} == {each: x.shape for each, x in first.tensors.items()}
    assert all(x.isfinite().all() for x in state.values())


@pytest.mark.slow
def test_the_cache_of_exact_layers_grows(tmp_path):
    model = decoder("LlamaForCausalLM", ("linear", {"window": 16}), None)
    session, first = opened(model, tmp_path)
    assert first.growing == [1]
    assert first.tensors["past.1.key"].shape[2] == first.tensors["past.mask"].shape[1] == 0
    for size in ((1, 2), (3, 40), (2, 120)):
        assert off(model, session, first, *size) < 1e-4, size
    ids = torch.full((1, 9), 7)
    found = session.run({"input_ids": ids, "attention_mask": torch.ones_like(ids), **first.tensors})
    assert found["present.1.key"].shape[2] == found["present.mask"].shape[1] == 9


@pytest.mark.slow
def test_exports_a_decoder_with_its_first_state(tmp_path):
    decoder("GPT2LMHeadModel", None).save_pretrained(tmp_path / "base")
    made = export.export(tmp_path / "base", tmp_path / "program", format="onnx", decode=True)
    assert max(made.largest_relative_difference.values()) < 1e-4
    assert "keep the keys and values of all tokens, so the state grows" in "".join(made.notes)
    report = json.loads((tmp_path / "program" / export.EXPORTED).read_text())
    first = np.load(tmp_path / "program" / decoding.FIRST_STATE)
    assert report["inputs"] == ["input_ids", "attention_mask", *first]
    assert report["state"] == {name: list(first[name].shape) for name in first}
    assert made.state_bytes == 8
    with pytest.raises(ApproxError, match=r"decodes from a state, which evaluate and bench do not run\. Export"):
        exported.load(tmp_path / "program")


def test_refuses_what_does_not_decode(tmp_path):
    for format, quantize in (("torch-export", None), ("onnx", "int8")):
        with pytest.raises(ApproxError, match="--decode is for programs in float32 of the format 'onnx'"):
            export.export("quickstart", tmp_path / "program", decode=True, format=format, quantize=quantize)
    with pytest.raises(ApproxError, match="decoders that write text and take position_ids; this is a Bert") as refused:
        decoding.refuse_undecodable(tiny("BertForSequenceClassification"))
    assert refused.value.exit_code == Exit.UNSUPPORTED
    strided = decoder("GPT2LMHeadModel", ("strided", {}))
    with pytest.raises(ApproxError, match=r"strided cannot be exported: .* Convert with one of .*performer.*sinks"):
        export.refuse_unexportable(strided, "onnx", decode=True)
    export.refuse_unexportable(decoder("GPT2LMHeadModel", ("performer", {})), "onnx", decode=True)


@pytest.mark.parametrize("settings", [{"window": 4, "sinks": 1}, {"window": 0, "sinks": 0}])
def test_performer_stays_exact_where_keys_rise(settings):
    """Keys far larger than earlier ones are computed pair by pair in PyTorch, and everything is in a program."""
    kind: Any = MECHANISMS["performer"]
    mechanism = kind(2, 8, causal=True, scale=1.0, features=16, estimator="positive", floor=0.0, **settings)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, 24, 8, generator=generator) for _ in "qkv"]
    # The tenth key is large, and so is the feature that it points to.
    parts[1][:, :, 9] *= 12.0
    mask = torch.ones(1, 12, dtype=torch.bool)

    class Decode(torch.nn.Module):
        def forward(self, q, k, v, key_mask, state):
            return mechanism.decode(q, k, v, key_mask, state)

    with torch.no_grad():
        expected = [mechanism.decode(*(x[:, :, :12] for x in parts), mask)]
        expected.append(mechanism.decode(*(x[:, :, 12:] for x in parts), mask, dict(expected[0][1])))
        state = None
        for half, (right, _) in zip((slice(12), slice(12, None)), expected, strict=True):
            inputs = *(x[:, :, half] for x in parts), mask, state
            out, state = torch.export.export(Decode(), inputs).module()(*inputs)
            torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-4)
