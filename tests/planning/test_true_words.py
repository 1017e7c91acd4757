"""What is said of models that read images and sound: which layers are causal, and how long their inputs are."""

from pathlib import Path

import pytest

from approx.inspection import inspect, plan
from approx.planning.plan import Plan
from zoo import tiny

PLAN = Plan.of("local", left=2, right=2)


@pytest.fixture
def saved(tmp_path):
    def save(architecture: str) -> str:
        folder: Path = tmp_path / architecture
        tiny(architecture).save_pretrained(folder)
        return str(folder)

    return save


def test_the_decoder_of_whisper_is_causal_and_its_encoder_has_one_length(saved):
    whisper = saved("WhisperForConditionalGeneration")
    told = inspect(whisper)
    assert [layer.causal for layer in told.layers] == [False, False, True, True]
    assert [layer.fixed_positions for layer in told.layers] == [24, 24, None, None]
    assert (told.positions, told.fixed_positions) == (48, None)
    (warning,) = plan(whisper, PLAN, [2048]).warnings
    assert warning == "The model takes 48 positions, and cannot be extended: 2048 tokens are out of its reach."


def test_every_image_has_the_same_number_of_positions(saved):
    vit = saved("ViTForImageClassification")
    assert inspect(vit).fixed_positions == 37
    told = plan(vit, PLAN, [128, 512])
    assert [cost.length for cost in told.costs] == [37]
    assert "Every input has 37 positions, so other lengths are not counted." in told.warnings


def test_positions_of_sound_have_seconds_and_tokens_have_none(saved):
    speech = saved("Wav2Vec2ForCTC")
    assert inspect(speech).seconds_per_position == 8 / 16_000
    assert [cost.seconds for cost in plan(speech, PLAN, [100]).costs] == [0.05]
    text = saved("BertModel")
    assert inspect(text).seconds_per_position is None
    assert [cost.seconds for cost in plan(text, PLAN, [32]).costs] == [None]
