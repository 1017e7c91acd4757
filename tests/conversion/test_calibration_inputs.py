"""What mechanisms are fitted to: the start of somebody's own text or recording, as the model reads or hears it."""

import io

import numpy as np
import pytest
import soundfile
import torch

from approx.conversion import checkpoint
from approx.conversion.calibration_inputs import CalibrationFile, calibration_batch
from approx.errors import ApproxError
from tiny_speech import recogniser, sound, speech_processor


@pytest.fixture
def heard(tmp_path):
    """A speech checkpoint as it is located, and its model."""
    folder = tmp_path / "speech"
    model = recogniser()
    model.save_pretrained(folder)
    speech_processor(tmp_path / "words").save_pretrained(folder)
    return checkpoint.locate(folder), model


def recording(path, samples, rate=16_000, kind="WAV"):
    stored = io.BytesIO()
    soundfile.write(stored, samples, rate, format=kind)
    path.write_bytes(stored.getvalue())
    return CalibrationFile.read(path, "input_values")


def test_a_recording_is_heard_from_its_start_and_no_further_than_512_frames(heard, tmp_path):
    source, model = heard
    short, long = sound(0.9), np.concatenate([sound(0.9), sound(40.0, tone=220.0)])
    batch = calibration_batch(source, model, recording(tmp_path / "short.flac", short, kind="FLAC"))
    normal = (short - short.mean()) / short.std()
    assert torch.allclose(batch["input_values"][0], torch.from_numpy(normal), atol=1e-3)
    frames = model.base_model(**calibration_batch(source, model, recording(tmp_path / "long.wav", long)))
    assert frames.last_hidden_state.shape[1] == 512


def test_a_recording_of_another_rate_is_resampled(heard, tmp_path):
    source, model = heard
    slow = calibration_batch(source, model, recording(tmp_path / "slow.wav", sound(1.0, rate=8_000), 8_000))
    right = calibration_batch(source, model, recording(tmp_path / "right.wav", sound(1.0)))
    assert slow["input_values"].shape == right["input_values"].shape
    assert torch.corrcoef(torch.cat([slow["input_values"], right["input_values"]]))[0, 1] > 0.9


def test_what_a_model_cannot_hear_is_refused(heard, tmp_path):
    source, model = heard
    (tmp_path / "words.txt").write_text("no sound at all", encoding="utf-8")
    with pytest.raises(ApproxError, match=r"words\.txt is no recording .* Give a WAV or FLAC file of one channel"):
        CalibrationFile.read(tmp_path / "words.txt", "input_values")
    with pytest.raises(ApproxError, match="2 channels"):
        recording(tmp_path / "two.wav", np.stack([sound(0.5)] * 2, axis=1))
    with pytest.raises(ApproxError, match="is empty"):
        recording(tmp_path / "none.wav", sound(0.0))
    with pytest.raises(ApproxError, match="fewer than the"):
        calibration_batch(source, model, recording(tmp_path / "click.wav", sound(0.01)))
    with pytest.raises(ApproxError, match="pixel_values cannot be calibrated"):
        CalibrationFile.read(tmp_path / "words.txt", "pixel_values")
