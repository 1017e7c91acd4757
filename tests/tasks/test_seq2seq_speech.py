"""Whisper writes texts that are scored like those of a CTC head; converted, trained, and refused where it would not hear all."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

import approx
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate, predict, prepare
from approx.evaluation.options import EvaluateOptions
from approx.evaluation.timing import written_inputs
from approx.finetuning.finetune import finetune, prepare_training
from approx.finetuning.options import FinetuneStage
from approx.planning.positions import example_inputs
from approx.tasks import open_task, seq2seq_speech
from approx.tasks.seq2seq_speech import texts
from tiny_speech import some_utterances, sound, write_utterances
from zoo import tiny

SPECIAL = ["<pad>", "<s>", "</s>", "<start>"]
WORDS = [
    *SPECIAL,
    "a",
    "b",
    "good",
    "hello",
    "world",
    "it's",
    "film",
    "yes",
    "no",
    "more",
    "than",
    "that",
    "why",
    "Yes,",
]


@dataclass(frozen=True)
class Reader:
    """A feature extractor and a tokenizer, as those of a processor."""

    feature_extractor: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def reader():
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<pad>",
        extra_special_tokens=["<start>"],
    )
    return Reader(WhisperFeatureExtractor(feature_size=8, chunk_length=2), tokenizer)


def model(**changes):
    return tiny("WhisperForConditionalGeneration", max_source_positions=100, max_target_positions=16, **changes)


@pytest.fixture
def data(tmp_path):
    return write_utterances(tmp_path / "dev-clean", some_utterances(5))


def test_base_and_converted_are_compared_and_batches_change_nothing(data, reader):
    base = model()
    converted = copy.deepcopy(base)
    approx.convert(converted, approx.Plan.of("local", left=4, right=4))
    task = open_task("librispeech/dev-clean")
    subjects = {"exact": Subject("exact", base, reader), "local": Subject("local", converted, reader)}
    entry = evaluate(subjects, task, EvaluateOptions(batch_size=3), data=data)
    assert (entry.metric, entry.variants[0].name, entry.examples) == ("wer", "local", 5)
    for subject in subjects.values():
        together, alone = (
            predict(subject, task, prepare([subject], task, task.load(data), batch_size=size)) for size in (3, 1)
        )
        assert together == alone
        assert all(text == text.upper() for text in together)
    # The encoder always hears two seconds.
    encoding = task.encode(task.load(data).examples[0], reader)[0]
    assert task.positions(encoding, base.config) == 100


def test_is_timed_on_recordings_that_are_padded_to_one_length(data, reader):
    base, task = model(), open_task("librispeech/dev-clean")
    make = written_inputs(
        task, task.load(data).examples, reader, base, lambda batch, length: example_inputs(base, length, batch=batch)
    )
    made = make(2, 5)
    alone = seq2seq_speech.features(
        reader.feature_extractor, [task.load(data).examples[1].inputs["recording"].decoded(16_000)]
    )
    assert made["input_features"].shape == (2, 8, 200)
    assert torch.equal(made["input_features"][1], alone["input_features"][0])
    assert made["decoder_input_ids"].shape == (2, 5)
    assert base(**made).logits.shape[:2] == (2, 5)


def test_beams_are_searched(data, reader):
    subject = Subject("exact", model(), reader)
    greedy, searched = (
        predict(subject, task, prepare([subject], task, task.load(data), batch_size=5))
        for task in (open_task("librispeech/dev-clean"), open_task("librispeech/dev-clean", beams=4))
    )
    assert len(greedy) == len(searched) == 5
    assert greedy != searched


def test_training_lowers_the_word_error_rate(reader, tmp_path):
    taught, data = model(), write_utterances(tmp_path / "train-clean-100", some_utterances(5))
    options = FinetuneStage(
        recover=["task"],
        task="librispeech/train-clean-100",
        data=str(data),
        steps=30,
        batch_size=4,
        learning_rate=1e-2,
        validation=1,
        evaluate_every=30,
    )
    done = finetune(taught, reader, options, folder=tmp_path / "work")
    losses = [point["loss"] for point in done.phases[0].curve if "loss" in point]
    assert losses[-1] < 0.7 * losses[0]
    assert done.measure == "wer"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mode", "plan"),
    [("transfer", approx.Plan.of("linear", window=4)), ("distill", approx.Plan.of("local", left=0, right=0))],
)
def test_learns_from_what_the_exact_model_writes_without_transcripts(reader, tmp_path, mode, plan):
    student = model()
    with torch.no_grad():
        # Attention of a fresh model is nearly the same to all frames.
        for layer in student.model.encoder.layers:
            layer.self_attn.out_proj.weight *= 20
    approx.convert(student, plan)
    data = write_utterances(tmp_path / "train-clean-100", some_utterances(5))
    for transcripts in data.rglob("*.trans.txt"):
        transcripts.unlink()
    options = FinetuneStage(
        recover=[mode],
        task="librispeech/train-clean-100",
        data=str(data),
        settings={"untranscribed": True},
        steps=20,
        batch_size=4,
        learning_rate=1e-3,
        validation=1,
        evaluate_every=20,
    )
    prepared = prepare_training(copy.deepcopy(student), reader, options)
    batch = prepared.data.batch([0, 1, 0], 0)
    written = batch["decoder_input_ids"]
    assert torch.equal(written[0], written[2])
    assert set(written[:, 0].tolist()) == {student.config.decoder_start_token_id}
    assert batch["decoder_attention_mask"].shape == written.shape
    done = finetune(student, reader, options, folder=tmp_path / "work")
    losses = [point["loss"] for point in done.phases[0].curve if "loss" in point]
    assert losses[-1] < 0.9 * losses[0]
    # Without transcripts there is no error rate.
    assert done.measure == "loss"


def test_recordings_without_transcripts_are_not_scored(data, reader):
    next(data.rglob("*.trans.txt")).unlink()
    subject = Subject("exact", model(), reader)
    with pytest.raises(ApproxError, match=r"examples have no label. Scores and the mode 'task' need them") as caught:
        evaluate({"exact": subject}, open_task("librispeech/dev-clean", untranscribed=True), data=data)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_the_prompt_is_not_a_target_twice(data, reader):
    task, config = open_task("librispeech/dev-clean"), model().config
    examples = task.load(data).examples[:2]
    rows = task.targets(examples, [], reader, config)["labels"].tolist()
    assert [[WORDS[token] for token in row if token >= 0] for row in rows] == [
        example.label.lower().split() for example in examples
    ]


def test_punctuation_and_case_do_not_count(reader):
    ids = torch.tensor([[3, WORDS.index("Yes,"), WORDS.index("it's"), 2, 0]])
    assert texts(ids, reader.tokenizer) == ["YES IT'S"]


def test_refuses_recordings_longer_than_its_window(reader, tmp_path):
    data = write_utterances(tmp_path / "dev-clean", {"1-2-3": ("WHY", sound(2.5))})
    task = open_task("librispeech/dev-clean")
    with pytest.raises(ApproxError, match=r"has 2\.5 seconds, but the checkpoint hears 2 at a time") as caught:
        task.encode(task.load(data).examples[0], reader)
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_recordings_of_a_table_are_read(data, reader, tmp_path):
    file = next(data.rglob("*.flac"))
    (tmp_path / "list.csv").write_text(f"file,words\n{file.relative_to(tmp_path)},good film\n")
    task = open_task("librispeech/test-clean", columns={"audio": "file", "text": "words"})
    example = task.load(tmp_path / "list.csv").examples[0]
    assert (example.label, example.inputs["recording"].rate) == ("GOOD FILM", 16_000)


def test_an_ngram_model_needs_a_ctc_head(tmp_path):
    (tmp_path / "lm.arpa").write_text("\\data\\\nngram 1=1\n\n\\1-grams:\n-1.0\tA\n\n\\end\\\n")
    task = open_task("librispeech/dev-clean", beams=2, ngram=str(tmp_path / "lm.arpa"))
    with pytest.raises(ApproxError, match="An n-gram model fits a CTC head"):
        task.check(model())
