"""Transcription: padding has no effect, greedy decoding, unsuitable checkpoints."""

from types import SimpleNamespace

import pytest
import soundfile
import torch

from approx import api
from approx.checkpoints import checkpoint
from approx.cli.figures import quality_tables
from approx.errors import Exit
from approx.evaluation.evaluate import Subject, evaluate, predict, prepare
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.record import Rows, Tokens
from approx.evaluation.timing import sound_inputs
from approx.publishing.summary import longest_input
from approx.tasks import Example, open_task
from approx.tasks.recording import Recording
from tiny_speech import recogniser, refused, some_utterances, sound, speech_processor, write_utterances
from zoo import tiny

TASK = open_task("librispeech/dev-clean")
KINDS = [("layer", "Wav2Vec2"), ("group", "Wav2Vec2"), ("layer", "Hubert"), ("group", "Hubert")]


@pytest.fixture
def data(tmp_path):
    return write_utterances(tmp_path / "dev-clean", some_utterances())


def logits(model, processor, encodings):
    """The outputs of each row without padding."""
    with torch.inference_mode():
        rows = model(**TASK.collate(encodings, processor)).logits
    frames = [model._get_feat_extract_output_lengths(one["samples"]) for one in encodings]
    return [row[:count] for row, count in zip(rows, frames, strict=True)]


@pytest.mark.parametrize(("norm", "family"), KINDS)
def test_recordings_have_equal_outputs_alone_and_in_a_batch(data, tmp_path, norm, family):
    model, processor = recogniser(norm, family), speech_processor(tmp_path, norm)
    subject, split = Subject("exact", model, processor), TASK.load(data)
    alone, together = (prepare([subject], TASK, split, batch_size=size) for size in (1, 4))
    sizes = sorted(len(rows) for rows in together.batches)
    assert sizes == ([3, 4] if norm == "layer" else [1, 1, 1, 1, 1, 2]), "only what is equally long needs no mask"
    assert predict(subject, TASK, alone) == predict(subject, TASK, together)
    for rows in together.batches:
        encodings = [together.encodings[row] for row in rows]
        for one, batched in zip(encodings, logits(model, processor, encodings), strict=True):
            torch.testing.assert_close(batched, logits(model, processor, [one])[0], atol=2e-5, rtol=1e-4)


def test_without_a_mask_padding_changes_outputs(data, tmp_path):
    model, processor = recogniser("group"), speech_processor(tmp_path, "group")
    encodings = [TASK.encode(example, processor)[0] for example in TASK.load(data).examples[:2]]
    (short, _), alone = logits(model, processor, encodings), logits(model, processor, encodings[:1])[0]
    assert encodings[0]["samples"] < encodings[1]["samples"]
    assert (short - alone).abs().max() > 1e-3


def test_positions_are_the_frames_that_attention_sees(data, tmp_path):
    # The first convolution is wider than its stride, as in Wav2Vec2, so the last frame has no output.
    model, processor = recogniser(conv_kernel=(20, 8, 4)), speech_processor(tmp_path)
    encodings = [TASK.encode(example, processor)[0] for example in TASK.load(data).examples]
    with torch.inference_mode():
        seen = [model.base_model(**TASK.collate([one], processor)).last_hidden_state.shape[1] for one in encodings]
    assert [TASK.positions(one, model.config) for one in encodings] == seen
    assert seen != [TASK.tokens(one) for one in encodings]


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_a_mask_alone_does_not_hide_padding(tmp_path, norm):
    processor = speech_processor(tmp_path, norm)
    encoding = {"samples": 8000}
    for other in ("layer", "group"):
        expected = 0 if (norm, other) == ("layer", "layer") else 8000
        assert TASK.company(encoding, processor, recogniser(other).config) == expected
    assert TASK.company(encoding, processor, recogniser("layer", add_adapter=True).config) == 8000


def test_words_are_what_the_processor_decodes(data, tmp_path):
    model, processor = recogniser(), speech_processor(tmp_path)
    split = TASK.load(data)
    subject = Subject("exact", model, processor)
    said = predict(subject, TASK, prepare([subject], TASK, split, batch_size=3))
    for example, text in zip(split.examples, said, strict=True):
        inputs = processor(example.inputs["recording"].decoded(16_000), sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            assert text == processor.batch_decode(model(**inputs).logits.argmax(-1))[0].upper()
    assert len(set(said)) > 1


def test_case_and_repetitions_are_taken_out(tmp_path):
    processor = speech_processor(tmp_path, characters="abcdefghijklmnopqrstuvwxyz'")
    letters = processor.tokenizer.get_vocab()
    frames = [letters[one] for one in ["h", "h", "i", "<pad>", "i", "|", "|", "a"]]
    spoken = Example("1-1-0000", {"recording": Recording("", 9_999, 16_000, "", b"")}, "HII A")
    reader = TASK.encode(spoken, processor)
    model = recogniser()
    outputs = SimpleNamespace(logits=torch.eye(32)[frames][None])
    assert TASK.predict(outputs, reader, model.config) == ["HII A"]
    broken = SimpleNamespace(logits=torch.full((1, 8, 32), float("nan")))
    refused("not finite", Exit.VERIFICATION, lambda: TASK.predict(broken, reader, model.config))


def test_models_are_compared_by_words_over_speakers(data, tmp_path):
    processor = speech_processor(tmp_path)
    subjects = {name: Subject(name, recogniser(seed=seed), processor) for seed, name in enumerate(("exact", "other"))}
    entry = evaluate(subjects, TASK, EvaluateOptions(batch_size=4), data=data)
    assert (entry.metric, entry.lower_is_better, entry.subset) == ("wer", True, True)
    assert entry.variants[0].test == "paired bootstrap over 3 groups"
    assert set(entry.base.scores) == {"wer", "cer"}
    assert [(part.from_, part.to, part.examples) for part in entry.variants[0].slices] == [(0, 5, 7)]
    assert entry.tokens == Tokens(median=35, longest=65, windows=1), "frames of 20 ms"
    # Not the seconds of the slices' bounds.
    assert longest_input(entry) == 66


def test_notes_resampled_and_skipped_recordings_next_to_the_score(data, tmp_path):
    write_utterances(data, {"13-7-0000": ("A", sound(1.0, 8_000))}, ".wav", 8_000)
    soundfile.write(data / "13" / "7" / "13-7-0001.flac", sound(0.5), 16_000)
    entry = evaluate({"exact": Subject("exact", recogniser(), speech_processor(tmp_path))}, TASK, data=data)
    note = "8 examples, a subset; resampled to 16,000 Hz from 8,000: 1; 8 rows read, 1 skipped (recordings without a transcript: 1)"
    assert entry.rows == Rows(read=8, skipped={"recordings without a transcript": 1})
    assert note in str(quality_tables(entry)[0].title)


def test_half_precision_reads_the_same_recordings(data, tmp_path):
    subject = Subject("half", recogniser().to(torch.bfloat16), speech_processor(tmp_path))
    assert evaluate({"half": subject}, TASK, data=data).base.scores["wer"] > 0


def test_a_checkpoint_brings_its_processor(data, tmp_path):
    folder, model = tmp_path / "checkpoint", recogniser()
    model.save_pretrained(folder)
    processor = speech_processor(tmp_path)
    processor.feature_extractor.save_pretrained(folder)
    loaded = checkpoint.load(folder)

    def measured():
        subject = Subject("exact", loaded.model, checkpoint.processor(loaded.source))
        return evaluate({"exact": subject}, TASK, data=data).base.scores

    refused("(tokenizer|instead of a speech processor)", Exit.UNAVAILABLE, measured)
    processor.save_pretrained(folder)
    expected = evaluate({"exact": Subject("exact", model, processor)}, TASK, data=data).base.scores
    assert measured() == expected
    for path in (folder / "processor_config.json", folder / "tokenizer_config.json"):
        path.write_text(path.read_text().replace("Wav2Vec2Processor", "Wav2Vec2ProcessorWithLM"))
    assert measured() == expected, "a language model is not asked, and its packages are not needed"


def test_refuses_models_that_cannot_transcribe(data, tmp_path):
    refused(
        "needs a CTC head, but the model is a Wav2Vec2ForSequenceClassification",
        Exit.UNSUPPORTED,
        lambda: TASK.check(tiny("Wav2Vec2ForSequenceClassification")),
    )
    refused(
        "its blank, pad_token_id in config.json, is 32",
        Exit.UNSUPPORTED,
        lambda: TASK.check(recogniser(pad_token_id=32)),
    )
    processor = speech_processor(tmp_path)
    base = Subject("exact", recogniser(), processor)
    poor = Subject("poor", recogniser(), speech_processor(tmp_path / "poor", characters="ABC"))
    deaf = Subject("deaf", recogniser(), processor.feature_extractor)
    slow = Subject("slow", recogniser(), speech_processor(tmp_path / "slow", sampling_rate=8000))
    for text, code, subjects in (
        ("poor: its 32 outputs with the blank 0 do not match the 8 characters", Exit.UNAVAILABLE, [poor]),
        ("instead of a speech processor", Exit.UNAVAILABLE, [deaf]),
        ("takes 8,000 samples per second; only 16,000", Exit.UNSUPPORTED, [slow]),
        ("The tokenizers of poor and exact differ", Exit.USAGE, [base, poor]),
    ):
        models = {subject.name: subject for subject in subjects}
        refused(text, code, lambda models=models: evaluate(models, TASK, data=data))


def test_bench_takes_recordings_and_refuses_texts_for_them(data, tmp_path):
    recogniser().save_pretrained(tmp_path / "checkpoint")
    speech_processor(tmp_path).save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood film\t1\n")

    def bench(task, path):
        made = api.bench(str(tmp_path / "checkpoint"), [40], rounds=3, seconds=0.0, task=task, data=str(path))
        return [(row.inputs, row.length) for row in made.speed]

    assert bench(TASK.name, data) == [("real", 40)]
    refused(
        "glue/sst2 makes input_ids, but .* takes input_values",
        Exit.UNSUPPORTED,
        lambda: bench("glue/sst2", tmp_path / "dev.tsv"),
    )


def test_a_model_can_be_timed_on_recordings(data, tmp_path):
    from approx.planning.positions import samples

    model, processor = recogniser("group"), speech_processor(tmp_path, "group")
    make = sound_inputs(
        TASK, TASK.examples(data), processor, lambda length: samples(model, length), "cpu", torch.float32
    )
    for batch, length in ((1, 10), (3, 200)):
        inputs = make(batch, length)
        with torch.inference_mode():
            assert model(**inputs).logits.shape[:2] == (batch, length)
    first = TASK.collate(TASK.encode(TASK.examples(data)[0], processor), processor)["input_values"][0]
    assert torch.equal(make(1, 10)["input_values"][0], first[: samples(model, 10)])
