"""Models that cannot be converted, and uses that a converted model does not support, give an error with the reason."""

from typing import Any

import pytest
import torch
import transformers

from approx.conversion import convert, surgery, verify
from approx.errors import ApproxError, Exit
from approx.inspection import inspect
from approx.inspection import plan as predicted
from approx.planning.anatomy import anatomy, attends_causally
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from zoo import tiny

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 101,
}


def refused(code, *words):
    """Expect an ApproxError with this exit code whose message contains all these words."""
    return pytest.raises(ApproxError, check=lambda e: e.exit_code == code and all(word in str(e) for word in words))


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("WavLMModel", {"num_hidden_layers": 2}, ["wavlm", "dispatch"]),
        ("MPNetModel", {}, ["mpnet", "dispatch"]),
        ("DebertaV2Model", {}, ["deberta-v2", "dispatch"]),
        ("MistralModel", {"num_key_value_heads": 2, "sliding_window": 8}, ["sliding"]),
        ("AlbertModel", {"embedding_size": 16}, ["one attention module"]),
        ("LayoutLMModel", {"max_position_embeddings": 32}, ["a custom mask"]),
        ("ViTMAEModel", {"image_size": 32, "patch_size": 8}, ["draws random numbers"]),
        (
            "SwinModel",
            {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1], "window_size": 4}
            | {"num_attention_heads": [2], "num_hidden_layers": 1},
            ["shifted windows of a Swin model", "such as those of ViT"],
        ),
        ("CLIPModel", {}, ["several models", "text_config", "vision_config"]),
        ("T5Model", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, ["position_bias"]),
        (
            "JetMoeModel",
            {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
            ["jetmoe", "reads values"],
        ),
        ("BertModel", {"hidden_size": 30}, ["bert", "config.json"]),
    ],
)
def test_families_that_cannot_be_converted_are_refused_with_the_reason(architecture, changes, words):
    kind = getattr(transformers, architecture)
    with refused(Exit.UNSUPPORTED, architecture, *words):
        anatomy(kind.config_class(**{**_SMALL, **changes}), kind)


def test_a_model_made_of_two_is_refused_alike_before_its_weights_are_read(tmp_path):
    part = transformers.BertConfig(**_SMALL)
    whole = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
    whole.architectures = ["EncoderDecoderModel"]
    whole.save_pretrained(tmp_path / "base")
    plan = Plan.of("local", left=4)
    for refuses in (
        lambda: inspect(str(tmp_path / "base")),
        lambda: predicted(str(tmp_path / "base"), plan, [64]),
        lambda: convert.convert(tmp_path / "base", tmp_path / "out", plan),
    ):
        with refused(Exit.UNSUPPORTED, "several models (encoder, decoder)"):
            refuses()


_ROTARY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", _ROTARY)
def test_every_kind_of_rotary_positions_converts(kind):
    model = tiny("LlamaForCausalLM", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **_ROTARY[kind]})
    plain = tiny("LlamaForCausalLM")
    found, expected = (anatomy(one.config, type(one)) for one in (model, plain))
    assert (found.sites, found.flops_per_position) == (expected.sites, expected.flops_per_position)
    assert verify.exact_limit(model, Plan.of("local", left=4)).passed


@pytest.mark.parametrize("mechanism", ["local", "exact"])
@pytest.mark.parametrize("entry", ["generate_batch", "init_continuous_batching"])
def test_continuous_batching_is_refused_with_a_way_that_works(mechanism, entry):
    model = tiny("LlamaForCausalLM")
    settings: dict[str, Any] = {"left": 8} if mechanism == "local" else {}
    surgery.convert(model, Plan.of(mechanism, **settings))
    with refused(Exit.UNSUPPORTED, "generate()", "left-padded"):
        getattr(model, entry)([[5, 6, 7], [8, 9]])
    made = model.generate(
        torch.tensor([[0, 5, 6], [7, 8, 9]]), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), max_new_tokens=3
    )
    assert made.shape[0] == 2


def test_a_family_outside_the_list_that_dispatches_plainly_converts():
    config = transformers.MistralConfig(**_SMALL, num_key_value_heads=2, sliding_window=None)
    model = transformers.MistralModel(config).eval()
    inputs = example_inputs(model, 12)
    with torch.no_grad():
        before = model(**inputs)[0]
        surgery.convert(model, Plan.of("full"))
        torch.testing.assert_close(model(**inputs)[0], before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("converted", Plan.of("local")), ["str and Plan were passed", "from_pretrained"]),
        ((torch.nn.DataParallel(tiny("BertModel")), Plan.of("local")), ["DataParallel", "without a wrapper"]),
        ((tiny("BertModel"), "local"), ["BertModel and str were passed", "approx.Plan.of"]),
    ],
)
def test_names_the_expected_types_of_model_and_plan(arguments, words):
    with refused(Exit.USAGE, *words):
        surgery.convert(*arguments)


def test_a_folder_in_place_of_a_model_is_not_reverted():
    with refused(Exit.REFUSED, "str is not converted"):
        surgery.revert("converted")


def test_a_converted_model_is_not_converted_again_and_a_stock_one_is_not_reverted():
    model = tiny("BertModel")
    with refused(Exit.REFUSED, "not converted"):
        surgery.revert(model)
    surgery.convert(model, Plan.of("local"))
    with refused(Exit.REFUSED, "converted already"):
        surgery.convert(model, Plan.of("local"))


@pytest.mark.parametrize("mechanism", ["ltr", "rtl"])
def test_a_mechanism_without_a_causal_form_is_refused_on_causal_layers(mechanism):
    with refused(Exit.UNSUPPORTED, mechanism, "causal", "linear", "local"):
        surgery.convert(tiny("GPT2Model"), Plan.of(mechanism))
    with refused(Exit.UNSUPPORTED, "layers 2-3", "0-1"):
        surgery.convert(tiny("WhisperForConditionalGeneration"), Plan.of(mechanism))


def test_exact_below_is_refused_where_a_cache_would_mix_both():
    with refused(Exit.UNSUPPORTED, "exact_below", "cache"):
        surgery.convert(tiny("GPT2Model"), Plan.of("local", exact_below=16))


def test_no_other_attention_can_be_switched_on_behind_the_conversion():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local"))
    with refused(Exit.REFUSED, "sdpa", "revert"):
        model.set_attn_implementation("sdpa")
    model.set_attn_implementation("approx_v1")


def test_masks_of_other_forms_are_refused_in_converted_layers_and_kept_in_exact_ones():
    model = tiny("BertModel")
    inputs = example_inputs(model, 8)
    four = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with torch.no_grad():
        before = model(**inputs, attention_mask=four)[0]
        surgery.convert(model, Plan.of("local", layers="2"))
        with refused(Exit.UNSUPPORTED, "4-D"):
            model(**inputs, attention_mask=four)
        surgery.revert(model)
        assert torch.equal(model(**inputs, attention_mask=four)[0], before)
        surgery.convert(model, Plan.of("exact"))
        torch.testing.assert_close(model(**inputs, attention_mask=four)[0], before)


def test_packed_sequences_are_refused():
    model = tiny("LlamaForCausalLM")
    inputs = example_inputs(model, 8)
    surgery.convert(model, Plan.of("local"))
    with refused(Exit.UNSUPPORTED, "packed"), torch.no_grad():
        model(**inputs, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)


def test_families_differ_by_whether_they_attend_causally():
    assert attends_causally("gpt2")
    assert attends_causally("whisper")
    assert not attends_causally("roberta")
    with refused(Exit.USAGE, "Did you mean 'bert'"):
        attends_causally("bertt")
    with refused(Exit.UNSUPPORTED, "wavlm"):
        attends_causally("wavlm")
