"""Models with windows of their own: their sliding layers stay as they are, and their full layers convert."""

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers.masking_utils import sliding_window_causal_mask_function

from approx.conversion import convert, surgery, verify
from approx.errors import ApproxError, Exit
from approx.inspection import inspect
from approx.planning.anatomy import anatomy
from approx.planning.cost import predict
from approx.planning.plan import Plan
from approx.seam import windows as own_windows
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from approx_kernels.ops.patterns.api import local_attention
from decoders import assert_same, decoder, generated, prompts, rule
from zoo import difference, error_of, exact_plan, outputs, tiny

SLIDING, FULL = "sliding_attention", "full_attention"
# Architecture -> changes of its tiny config, and the window of each layer.
MIXED: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "ModernBertForMaskedLM": ({}, [None, 4, None]),
    "ModernBertDecoderForCausalLM": ({}, [None, 4, None]),
    "Gemma2ForCausalLM": ({"attn_logit_softcapping": None}, [8, None, 8]),
    "Gemma3ForCausalLM": ({"layer_types": [SLIDING, SLIDING, FULL]}, [8, 8, None]),
    "Qwen2ForCausalLM": ({"use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
    "Qwen3ForCausalLM": ({"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]}, [8, None, 8]),
    # Its sliding layers have sinks too, and its values are narrower than its keys.
    "MiMoV2FlashForCausalLM": ({}, [8, None, 8]),
}
DECODERS = [name for name in MIXED if name.endswith("CausalLM")]


def made(architecture: str) -> Any:
    return tiny(architecture, **MIXED[architecture][0])


def kept_layers(architecture: str) -> list[int]:
    return [layer for layer, window in enumerate(MIXED[architecture][1]) if window is not None]


@pytest.mark.parametrize("architecture", MIXED)
def test_full_layers_convert_and_sliding_layers_stay(architecture):
    model = made(architecture)
    facts = anatomy(model.config, type(model))
    assert [site.window for site in facts.sites] == MIXED[architecture][1]
    assert [site.layer for site in facts.sites if site.kept] == kept_layers(architecture)
    plan = Plan.of("local", left=4)
    check = verify.exact_limit(model, plan)
    assert check.passed, check.detail
    before = outputs(model)
    receipt = surgery.convert(model, plan)
    assert receipt.left == kept_layers(architecture)
    assert difference(outputs(model), before) > 1e-6
    assert [check for check in (verify.padding(model), verify.causality(model)) if check.passed is False] == []
    surgery.revert(model)
    assert difference(outputs(model), before) == 0.0


@pytest.mark.parametrize("architecture", ["ModernBertForMaskedLM", "Qwen3ForCausalLM", "MiMoV2FlashForCausalLM"])
def test_attention_weights_are_those_of_the_base(architecture):
    model = made(architecture)
    model.set_attn_implementation("eager")
    inputs = {"input_ids": torch.randint(5, 90, (2, 20)), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    with torch.no_grad():
        before = model(**inputs, output_attentions=True).attentions
        surgery.convert(model, Plan.of("full"))
        after = model(**inputs, output_attentions=True).attentions
    assert difference(list(after), list(before)) < 1e-5


@pytest.mark.parametrize("architecture", DECODERS)
def test_generates_with_a_cache_what_the_base_generates(architecture):
    model = decoder(architecture, **MIXED[architecture][0])
    inputs = prompts(model)
    before = {beams: generated(model, inputs, num_beams=beams) for beams in (1, 3)}
    # A ring, a recurrent state, an ordinary cache, and notes about keys.
    for mechanism in ("sinks", "linear", "full", "clustered"):
        if (plan := exact_plan(model, mechanism)) is None:
            continue
        surgery.exchange(model, plan)
        for beams, expected in before.items():
            assert_same(generated(model, inputs, num_beams=beams), expected)
        surgery.revert(model)


@pytest.mark.parametrize("mechanism", ["sinks", "linear", "local", "clustered"])
def test_a_mechanism_next_to_a_sliding_cache_decodes_as_without_a_cache(mechanism):
    architecture = "Gemma3ForCausalLM"
    model = decoder(architecture, rule(mechanism), **MIXED[architecture][0])
    inputs = prompts(model)
    assert_same(generated(model, inputs, num_beams=3), generated(model, inputs, num_beams=3, use_cache=False))


def test_layers_that_share_keys_stay_since_a_state_has_none_for_the_others():
    model = decoder("Gemma3nForCausalLM")
    facts = anatomy(model.config, type(model))
    assert [site.layer for site in facts.convertible] == [1]
    assert {site.kept for site in facts.sites if site.layer in (3, 5)} == {"keys that it shares with other layers"}
    inputs = prompts(model)
    before = generated(model, inputs)
    surgery.exchange(model, exact_plan(model, "sinks") or Plan.of("full"))
    assert_same(generated(model, inputs), before)


def test_a_sliding_layer_named_by_its_number_is_refused_with_the_reason():
    model = made("Gemma3ForCausalLM")
    for layers in ("1", "0-2", "-2"):
        error = error_of(lambda layers=layers: surgery.convert(model, Plan.of("local", layers=layers)))
        assert error is not None
        assert error.exit_code == Exit.UNSUPPORTED
        assert "layer 1 of Gemma3ForCausalLM cannot be converted: it has a sliding window of 8 tokens" in str(error)
        assert "Layers that can: 2." in str(error)
    surgery.convert(model, Plan.of("local", layers="-1"))


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("MistralForCausalLM", {"sliding_window": 8}, ["layers 0-2 have a sliding window of 8 tokens", "sliding_window to null"]),
        ("Gemma2ForCausalLM", {}, ["layers 0,2 have soft-capped scores and a sliding window", "layer 1 has soft-capped scores"]),
        ("GptOssForCausalLM", {}, ["layer 1 has attention sinks with learned scores", "layers 0,2"]),
    ],
)  # fmt: skip
def test_a_model_without_a_layer_to_convert_is_refused_by_the_kind_of_each(architecture, changes, words):
    with pytest.raises(ApproxError) as caught:
        anatomy(tiny(architecture, **changes).config, getattr(transformers, architecture))
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert [word for word in words if word not in str(caught.value)] == []


def test_windows_without_effect_can_be_set_aside_as_the_refusal_says():
    whole, windowed = (tiny("MistralForCausalLM", sliding_window=size) for size in (None, 24))
    assert difference(outputs(whole), outputs(windowed)) == 0.0
    assert verify.exact_limit(whole, Plan.of("local", left=4)).passed


def test_the_ceiling_has_the_attention_of_layers_that_stay():
    windowed, whole = (tiny("MistralForCausalLM", sliding_window=size) for size in (8, None))
    for model, changes in ((windowed, False), (whole, True)):
        before = outputs(model)
        with attention_free(model):
            assert (difference(outputs(model), before) > 1e-6) == changes


def test_layers_that_stay_count_as_outside():
    model = made("Gemma3ForCausalLM")
    facts = anatomy(model.config, type(model))
    (cost,) = predict(facts, Plan.of("sdpa").resolve(facts), [64])
    (whole,) = predict(anatomy((tiny("Gemma3ForCausalLM", layer_types=[FULL] * 3)).config, type(model)), {}, [64])
    assert cost.flops_exact * 3 == whole.flops_exact == whole.flops_planned
    assert cost.flops_outside + cost.flops_exact == whole.flops_outside + whole.flops_exact


@pytest.mark.parametrize(
    "architecture", ["ModernBertForMaskedLM", "ModernBertDecoderForCausalLM", "Gemma3ForCausalLM", "Qwen2ForCausalLM"]
)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_sliding_layers_compute_their_window_alone_and_the_same_result(architecture, padding, monkeypatch):
    model = tiny(architecture, **MIXED[architecture][0] | {"max_position_embeddings": 512})
    inputs = {"input_ids": torch.randint(5, 90, (2, 300)), "attention_mask": torch.ones(2, 300, dtype=torch.long)}
    inputs["attention_mask"][1, 250:] = int(padding == "none")
    if padding == "left":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    real = inputs["attention_mask"].bool()
    windows: list[int] = []

    def counted(*args: Any, left: int, right: int, **kwargs: Any) -> torch.Tensor:
        windows.append(left + right)
        return local_attention(*args, left=left, right=right, **kwargs)

    monkeypatch.setattr(own_windows, "local_attention", counted)
    for form in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        windows.clear()
        with form:
            expected = model(**inputs).logits[real].detach()
            assert windows == []
            with fastest_exact(model):
                found = model(**inputs).logits[real].detach()
        sizes = [window for window in MIXED[architecture][1] if window]
        bidirectional = architecture == "ModernBertForMaskedLM"
        assert windows == [2 * size if bidirectional else size - 1 for size in sizes]
        assert difference([found], [expected]) < 1e-5


def test_a_mask_that_says_more_than_a_window_is_obeyed(monkeypatch):
    model = tiny("Qwen2ForCausalLM", **MIXED["Qwen2ForCausalLM"][0] | {"max_position_embeddings": 512})
    ids = torch.randint(5, 90, (1, 600))

    def refused(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("the window alone was computed")

    monkeypatch.setattr(own_windows, "local_attention", refused)
    with torch.no_grad(), fastest_exact(model), pytest.raises(RuntimeError, match="the window alone"):
        model(ids)
    # Two texts in one row.
    packed = {"input_ids": ids, "position_ids": torch.arange(300).repeat(2)[None], "use_cache": False}
    with torch.no_grad():
        expected = model(**packed).logits
        with fastest_exact(model):
            assert difference([model(**packed).logits], [expected]) < 1e-5


def test_a_mask_changed_after_it_was_made_is_obeyed(monkeypatch):
    alone: list[int] = []

    def counted(*args: Any, left: int, **kwargs: Any) -> torch.Tensor:
        alone.append(left)
        return local_attention(*args, left=left, **kwargs)

    monkeypatch.setattr(own_windows, "local_attention", counted)
    mask = own_windows.key_mask(
        1, 300, 300, mask_function=sliding_window_causal_mask_function(8), local_size=8, device="cpu"
    )
    assert mask is not None
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    module = torch.nn.Module()
    windowed, _ = own_windows.attention(module, q, k, v, mask)
    assert difference([windowed], [F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)]) < 1e-5
    mask[:, :, 100:, 90:100] = False
    changed, _ = own_windows.attention(module, q, k, v, mask)
    assert difference([changed], [F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)]) < 1e-5
    assert difference([changed], [windowed]) > 1e-3
    assert alone == [7]


def test_the_cost_of_a_long_input_counts_windows_and_not_all_pairs():
    facts = anatomy(made("Gemma3ForCausalLM").config, transformers.Gemma3ForCausalLM)
    short, long = predict(facts, Plan.of("sdpa").resolve(facts), [128, 1024])
    # Sliding layers count as outside: from 256 tokens on, their share grows with the length, not with its square.
    assert long.flops_outside < 10 * short.flops_outside
    assert long.flops_exact > 60 * short.flops_exact


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForCausalLM", pytest.param("ModernBertForMaskedLM", marks=pytest.mark.slow)]
)
def test_folders_are_inspected_converted_verified_and_reverted_bit_for_bit(architecture, tmp_path):
    made(architecture).save_pretrained(tmp_path / "base")
    kept = kept_layers(architecture)
    found = inspect(str(tmp_path / "base"))
    assert [layer.window for layer in found.layers] == MIXED[architecture][1]
    receipt = convert.convert(tmp_path / "base", tmp_path / "out", Plan.of("local", left=4))
    assert receipt.left == kept
    assert [check.name for check in receipt.checks if check.passed is False] == []
    assert {check.name: check.passed for check in receipt.checks}["reload without approx is bit-equal"]
    assert any("sliding window" in note and "stay" in note for note in receipt.notes)
    assert [check for check in verify.verify(tmp_path / "out").checks if check.passed is False] == []
    convert.revert(tmp_path / "out", tmp_path / "reverted")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "reverted"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
