"""Attention functions for unconverted models: they compute what a conversion computes, and a package of them needs no approx."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from approx.checkpoints.bundle import write_kernel
from approx.conversion import surgery
from approx.errors import ApproxError
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.unconverted import attention_function
from zoo import tiny

NAMES = {
    "local__left_4__right_2": ("local", {"left": 4, "right": 2}),
    "improved_clustered__clusters_3__topk_4": ("improved-clustered", {"clusters": 3, "topk": 4}),
    "lsh__rounds_1__cluster_8": ("lsh", {"rounds": 1, "cluster": 8}),
    "block__size_8": ("block", {"size": 8}),
    "strided__stride_4__mode_interleave": ("strided", {"stride": 4, "mode": "interleave"}),
    "sinks__sinks_1__window_6": ("sinks", {"sinks": 1, "window": 6}),
}


def registered(name):
    """The name of an attention function, as transformers registers that of a package."""
    AttentionInterface.register(name, attention_function(name))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    return name


@pytest.mark.parametrize(
    ("family", "name"),
    [("BertForSequenceClassification", name) for name in NAMES if "strided" not in name and "sinks" not in name]
    + [("LlamaForCausalLM", name) for name in NAMES if "clustered" not in name and "lsh" not in name],
)
def test_computes_what_a_conversion_computes(family, name):
    mechanism, settings = NAMES[name]
    model, converted = tiny(family), tiny(family)
    surgery.convert(converted, Plan.of(mechanism, **settings))
    inputs = example_inputs(model, 40, batch=2, padded=9)
    real = inputs["attention_mask"].bool() if "Causal" in family else slice(None)
    with torch.no_grad():
        exact = model(**inputs).logits[real]
        model.set_attn_implementation(registered(name))
        found, expected = model(**inputs).logits[real], converted(**inputs).logits[real]
    assert torch.equal(found, expected)
    assert not torch.equal(found, exact)


def test_generates_what_a_conversion_generates():
    model, converted = tiny("LlamaForCausalLM"), tiny("LlamaForCausalLM")
    surgery.convert(converted, Plan.of("local", left=4, right=0))
    model.set_attn_implementation(registered("local__left_4__right_0"))
    ids = example_inputs(model, 20)["input_ids"]
    texts = [each.generate(ids, max_new_tokens=12, do_sample=False) for each in (model, converted)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("linaer", "There is no attention 'linaer'. This package has"),
        ("local__wide_3", "'wide_3' states no setting and value.*left, right"),
        ("local__left_-3", "'local__left_-3': .*left"),
        ("linear", "has parameters or is fitted to a model.*Convert the model"),
        ("longformer__global_tokens_separator__separator_3", "chooses keys by token ids"),
    ],
)
def test_a_name_that_cannot_be_had_is_explained(name, words):
    with pytest.raises(AttributeError, match=words):
        attention_function(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 4}, "passes 'sliding_window'"),
        ({"output_attentions": True}, "asked for attention weights"),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "more than two dimensions"),
        ({"key": torch.zeros(1, 2, 9, 4), "value": torch.zeros(1, 2, 9, 4)}, "has other keys than queries"),
    ],
)
def test_refuses_layers_that_a_conversion_keeps_exact(change, words):
    q = torch.zeros(1, 2, 8, 4)
    attend = attention_function("local")
    assert attend(torch.nn.Identity(), q, q, q)[0].shape == (1, 8, 2, 4)
    with pytest.raises(ApproxError, match=f"A Identity .*{words}.*Convert the model with approx"):
        attend(torch.nn.Identity(), **{"query": q, "key": q, "value": q, **change})


def test_clusters_of_decoders_need_a_conversion():
    q, layer = torch.zeros(1, 2, 8, 4), torch.nn.Identity()
    layer.is_causal = True  # type: ignore[assignment]  # as an attention layer has it
    with pytest.raises(ApproxError, match="causal form of ClusteredAttention with these settings is fitted"):
        attention_function("clustered")(layer, q, q, q)


def test_alternating_layers_have_to_know_their_number():
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ApproxError, match="'block' alternates between layers, but a Identity"):
        attention_function("block")(torch.nn.Identity(), q, q, q)


@pytest.mark.slow
def test_a_package_runs_without_approx(tmp_path):
    mechanisms = write_kernel(tmp_path, "approx-attention")
    assert {"clustered", "lsh", "local"} <= {*mechanisms}
    assert not {"linear", "performer", "exact"} & {*mechanisms}
    place = tmp_path / "build" / "torch-universal"
    assert json.loads((place / "metadata.json").read_text())["name"] == "approx-attention"
    code = """
import importlib.util, sys, torch
sys.modules["approx"] = sys.modules["approx_kernels"] = None
spec = importlib.util.spec_from_file_location("package", sys.argv[1])
package = sys.modules["package"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
assert not hasattr(package, "flash_attn_varlen_func") and hasattr(package, "flash_attn_forward")
q, k, v = torch.randn(3, 1, 2, 50, 8, generator=torch.Generator().manual_seed(1))
out, _ = package.local__left_3__right_3(torch.nn.Identity(), q, k, v)
i = torch.arange(50)
near = (i[:, None] - i).abs() <= 3
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), near)
assert torch.allclose(out.double(), exact.transpose(1, 2), atol=1e-5)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(place / "__init__.py")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
