"""Example inputs: the requested size, valid tokens, and padding like a tokenizer's."""

from typing import Any

import pytest
import torch
import transformers

from approx.errors import ApproxError, Exit
from approx.planning.anatomy import anatomy
from approx.planning.positions import example_inputs, main_input, samples
from zoo import tiny


@pytest.mark.parametrize(
    ("architecture", "changes", "shape"),
    [
        ("ASTModel", {"max_length": 40, "num_mel_bins": 16}, (2, 40, 16)),
        ("VideoMAEModel", {"image_size": 16, "patch_size": 8, "num_frames": 4}, (2, 4, 3, 16, 16)),
        ("ViTModel", {"image_size": [16, 24], "patch_size": 8}, (2, 3, 16, 24)),
    ],
)
def test_spectrograms_videos_and_oblong_images_have_the_size_that_the_config_names(architecture, changes, shape):
    kind = getattr(transformers, architecture)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = kind(kind.config_class(**sizes, **changes)).eval()
    inputs = example_inputs(model, 8, batch=2)
    assert inputs[model.main_input_name].shape == shape
    assert model(**inputs)[0].isfinite().all()


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("architecture", "changes", "shape"),
    [
        ("Wav2Vec2BertModel", {**SMALL, "feature_projection_input_dim": 20, "output_hidden_size": 16}, (2, 12, 20)),
        (
            "Speech2TextModel",
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "input_feat_per_channel": 20},
            (2, 45, 20),
        ),
        ("GlmAsrEncoder", {**SMALL, "num_key_value_heads": 2, "num_mel_bins": 20}, (2, 20, 24)),
        ("Idefics3VisionTransformer", {**SMALL, "image_size": 16, "patch_size": 8}, (2, 3, 16, 16)),
    ],
)
def test_spectrograms_have_the_layout_and_the_frames_that_the_model_takes(architecture, changes, shape):
    kind = getattr(transformers, architecture, None)
    if kind is None:
        pytest.skip(f"this version of transformers has no {architecture}")
    model = kind(kind.config_class(**changes)).eval()
    inputs = example_inputs(model, 12, batch=2)
    assert inputs[main_input(model)].shape == shape
    assert model(**inputs)[0].isfinite().all()


def test_moonshine_makes_as_many_positions_of_its_sound_as_asked():
    kind: Any = transformers.MoonshineModel
    model = kind(kind.config_class(hidden_size=32, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1)).eval()
    inputs = example_inputs(model, 9)
    assert model(**inputs).encoder_last_hidden_state.shape[1] == 9
    assert model._get_feat_extract_output_lengths(samples(model, 9) - 1) == 8


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("ResNetModel", "no self-attention"),
        ("Qwen2_5_VisionTransformerPretrainedModel", "packed into one row"),
        ("Blip2QFormerModel", "query_embeds"),
    ],
)
def test_models_without_attention_or_with_other_inputs_are_refused_by_name(architecture, why):
    kind = getattr(transformers, architecture, None) or getattr(
        transformers.models.qwen2_5_vl.modeling_qwen2_5_vl, architecture
    )
    with pytest.raises(ApproxError, match=why) as caught:
        anatomy(kind.config_class(), kind)
    assert caught.value.exit_code == Exit.UNSUPPORTED


@pytest.mark.parametrize(("size", "low"), [(1, 0), (2, 1), (6, 5), (8, 5)])
def test_tokens_are_ordinary_ones_of_the_vocabulary(size, low):
    ids = example_inputs(tiny("BertModel", vocab_size=size, pad_token_id=0), 60, batch=2)["input_ids"]
    assert set(ids.flatten().tolist()) == set(range(low, size))


def test_inputs_depend_on_the_seed_only():
    model = tiny("ViTForImageClassification")
    first, again, other = (example_inputs(model, 1, batch=2, seed=seed)["pixel_values"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_the_last_row_is_padded_at_its_end_as_a_tokenizer_pads():
    inputs = example_inputs(tiny("RobertaForQuestionAnswering"), 12, batch=2, padded=5)
    assert inputs["attention_mask"].tolist() == [[1] * 12, [1] * 7 + [0] * 5]
    padding = inputs["input_ids"] == 1
    assert torch.equal(padding, inputs["attention_mask"] == 0)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_speech_has_the_requested_number_of_frames(length):
    model = tiny("Wav2Vec2Model")
    enough = samples(model, length)
    assert model._get_feat_extract_output_lengths(torch.tensor(enough)) == length
    assert model._get_feat_extract_output_lengths(torch.tensor(enough - 1)) == length - 1
    inputs = example_inputs(model, length + 3, batch=2, padded=3)
    frames = model._get_feature_vector_attention_mask(length + 3, inputs["attention_mask"])
    assert frames.sum(1).tolist() == [length + 3, length]
    assert not inputs["input_values"][1][inputs["attention_mask"][1] == 0].any()
    assert inputs["input_values"][0].all()


def test_a_decoder_gets_no_more_tokens_than_it_has_positions():
    model = tiny("WhisperForConditionalGeneration", max_target_positions=10)
    inputs = example_inputs(model, 24)
    assert inputs["decoder_input_ids"].shape[1] == 10
    model(**inputs)


@pytest.mark.parametrize("architecture", ["WhisperModel", "Wav2Vec2Model", "ViTModel"])
def test_sound_and_pictures_have_the_dtype_of_the_model(architecture):
    model = tiny(architecture).half()
    assert model(**example_inputs(model, 8))[0].dtype == torch.float16
