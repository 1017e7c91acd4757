"""Calibration inputs: the start of the user's text or recording, as the model takes it."""

import io

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperTokenizer

from approx.checkpoints import checkpoint
from approx.conversion import surgery
from approx.conversion.calibration import TEXT, CalibrationFile, calibration_batch, calibration_length
from approx.errors import ApproxError
from approx.planning.plan import Plan
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_speech import recogniser, sound, speech_processor
from zoo import tiny


@pytest.fixture
def heard(tmp_path):
    """The source of a speech checkpoint, and its model."""
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


def test_reads_a_recording_from_its_start_up_to_the_length(heard, tmp_path):
    source, model = heard
    short, long = sound(0.9), np.concatenate([sound(0.9), sound(40.0, tone=220.0)])
    batch, description = calibration_batch(source, model, 512, recording(tmp_path / "short.flac", short, kind="FLAC"))
    assert description == "short.flac"
    normal = (short - short.mean()) / short.std()
    assert torch.allclose(batch["input_values"][0], torch.from_numpy(normal), atol=1e-3)
    frames = model.base_model(**calibration_batch(source, model, 512, recording(tmp_path / "long.wav", long)).inputs)
    assert frames.last_hidden_state.shape[1] == 512


def test_a_recording_of_another_rate_is_resampled(heard, tmp_path):
    source, model = heard
    slow, _ = calibration_batch(source, model, 512, recording(tmp_path / "slow.wav", sound(1.0, rate=8_000), 8_000))
    right, _ = calibration_batch(source, model, 512, recording(tmp_path / "right.wav", sound(1.0)))
    assert slow["input_values"].shape == right["input_values"].shape
    assert torch.corrcoef(torch.cat([slow["input_values"], right["input_values"]]))[0, 1] > 0.9


def test_whisper_hears_a_recording_padded_to_its_length(tmp_path):
    folder = tmp_path / "whisper"
    model = tiny("WhisperForConditionalGeneration", max_source_positions=100, max_target_positions=16)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    for part in (model, extractor, WhisperTokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])):
        part.save_pretrained(folder)
    soundfile.write(tmp_path / "a.wav", sound(0.9), 16_000)
    file = CalibrationFile.read(tmp_path / "a.wav", "input_features")
    batch, description = calibration_batch(checkpoint.locate(folder), model, 512, file)
    heard, _ = soundfile.read(tmp_path / "a.wav", dtype="float32")
    alone = extractor(heard, sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert (description, torch.equal(batch["input_features"], alone)) == ("a.wav", True)
    assert model(**batch).logits.shape[0] == 1


def test_refuses_unreadable_recordings(heard, tmp_path):
    source, model = heard
    (tmp_path / "words.txt").write_text("no sound at all", encoding="utf-8")
    with pytest.raises(
        ApproxError,
        match=r"words\.txt is not a readable recording \(Format not recognised\)\. Give a single-channel WAV or FLAC file",
    ):
        CalibrationFile.read(tmp_path / "words.txt", "input_values")
    with pytest.raises(ApproxError, match="2 channels"):
        recording(tmp_path / "two.wav", np.stack([sound(0.5)] * 2, axis=1))
    with pytest.raises(ApproxError, match="is empty"):
        recording(tmp_path / "none.wav", sound(0.0))
    for number in (np.nan, np.inf, 30_000.0):
        soundfile.write(tmp_path / "loud.wav", np.full(8_000, number, np.float32), 16_000, subtype="FLOAT")
        with pytest.raises(ApproxError, match=r"loud\.wav holds samples that are not between -1 and 1"):
            CalibrationFile.read(tmp_path / "loud.wav", "input_values")
    with pytest.raises(ApproxError, match="fewer than the"):
        calibration_batch(source, model, 512, recording(tmp_path / "click.wav", sound(0.01)))
    with pytest.raises(ApproxError, match="pixel_values cannot be calibrated"):
        CalibrationFile.read(tmp_path / "words.txt", "pixel_values")
    with pytest.raises(ApproxError, match=r"cannot be read: .* Leave out --calibrate\."):
        CalibrationFile.read(tmp_path / "nowhere", "pixel_values")


@pytest.mark.parametrize(
    ("name", "positions", "plan", "length"),
    [
        ("BertModel", 64, Plan.of("local"), 64),
        ("BertModel", 1500, Plan.of("local", left=4, right=4), 1024),
        ("BertModel", 4096, Plan.of("local", left=700, right=700), 1404),
        ("BertModel", 4096, Plan.of("local", left=3000, right=3000), 2048),
        ("BertModel", 4096, Plan.of("local", exact_below=900), 1800),
        ("BertModel", 4096, Plan.of("exact"), 1024),
        ("LlamaModel", 4096, Plan.of("sinks", sinks=1, window=4), 1024),
        ("LlamaModel", 4096, Plan.of("linear"), 2048),
        ("BertModel", 4096, Plan.of("linear"), 1024),
        ("Wav2Vec2Model", None, Plan.of("local", left=4, right=4), 512),
        ("Wav2Vec2Model", None, Plan.of("local", left=300, right=300), 604),
    ],
)
def test_rows_are_so_long_that_layers_approximate_if_the_positions_allow(name, positions, plan, length):
    model = tiny(name, **({} if positions is None else {"max_position_embeddings": positions}))
    surgery.exchange(model, plan)
    assert calibration_length(model) == length


def test_positions_that_are_extended_count():
    model = tiny("BertModel")
    surgery.exchange(model, Plan.of("local"), max_length=200)
    assert calibration_length(model) == 200


def test_text_fills_its_rows_and_is_described(tmp_path):
    folder = tmp_path / "words"
    model = tiny_model(2, positions=2048)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    source = checkpoint.locate(folder)
    (tmp_path / "own.txt").write_text("the film is not very good but fine " * 900, encoding="utf-8")
    file = CalibrationFile.read(tmp_path / "own.txt", "input_ids")
    for length, rows in ((256, 8), (512, 4), (2048, 1)):
        inputs, description = calibration_batch(source, model, length, file)
        assert inputs["input_ids"].shape == (rows, length)
        assert description == "own.txt"
    # Its vocabulary has only 14 words, so the built-in text is unusable.
    inputs, description = calibration_batch(source, model, 512)
    assert (tuple(inputs["input_ids"].shape), description) == ((1, 512), "random tokens")


def test_repeats_built_in_text_where_it_is_too_short(shared_checkpoints, monkeypatch):
    folder = shared_checkpoints / "minilm-sst2"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    source = checkpoint.locate(folder)
    model = checkpoint.load(folder).model
    for length, description in ((2048, "built-in English text"), (1024, "built-in English text, repeated")):
        if "repeated" in description:
            monkeypatch.setattr("approx.conversion.calibration.TEXT", TEXT[:3000])
        batch = calibration_batch(source, model, length)
        assert (tuple(batch.inputs["input_ids"].shape), batch.description) == ((1, length), description)
