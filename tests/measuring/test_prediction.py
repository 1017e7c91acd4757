"""Predictions are those of the model's own logits, for every head; inputs and heads that do not fit are refused."""

from typing import Any

import pytest
import soundfile
import torch
import transformers

from approx import api
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BASE
from approx.measuring.measure import in_memory
from approx.measuring.prediction import compare
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from tiny_speech import sound
from zoo import tiny

SIZES = {"vocab_size": len(WORDS)}


def predicted(model: Any, text: str, reader: Any, **more: Any) -> Any:
    (one,) = api.predict(model, [text], processor=reader, **more).inputs
    assert one.input == text
    return one.predictions[BASE]


def logits(model: Any, text: str, reader: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**reader(text, return_tensors="pt")).logits[0].double()


def test_a_mask_has_its_likeliest_words_with_their_probabilities():
    model, tokenizer = tiny("BertForMaskedLM", **SIZES), tiny_tokenizer()
    tokenizer.mask_token = "[UNK]"
    shares = logits(model, "the [UNK] is", tokenizer)[2].softmax(-1)
    for top in (1, 4):
        (mask,) = predicted(model, "the [UNK] is", tokenizer, top=top)
        due = shares.topk(top)
        assert mask == pytest.approx(
            {WORDS[token]: float(share) for token, share in zip(due.indices, due.values, strict=True)}, rel=1e-4
        )
    assert len(predicted(model, "the [UNK] is", tokenizer)[0]) == 5
    first, second = predicted(model, "the [UNK] is [UNK]", tokenizer, top=2)
    assert first.keys() != second.keys() or first != second


def test_every_token_has_its_likeliest_label_with_its_probability():
    model, tokenizer = tiny("BertForTokenClassification", **SIZES, num_labels=3), tiny_tokenizer()
    model.config.id2label = {0: "none", 1: "name", 2: "place"}
    shares = logits(model, "the film", tokenizer)[1:-1].softmax(-1)
    assert predicted(model, "the film", tokenizer) == [
        {
            "word": word,
            "label": model.config.id2label[int(row.argmax())],
            "probability": pytest.approx(float(row.max())),
        }
        for word, row in zip(("the", "film"), shares, strict=True)
    ]


@pytest.mark.parametrize("extractor", ["alone", "in a processor"])
def test_a_recording_is_classified_with_the_probability_of_every_label(extractor, tmp_path):
    model = tiny("Wav2Vec2ForSequenceClassification", num_labels=3)
    reader: Any = transformers.Wav2Vec2FeatureExtractor()
    heard = sound(0.5)
    soundfile.write(tmp_path / "a.wav", heard, 16_000, subtype="FLOAT")
    with torch.no_grad():
        shares = model(**reader(heard, sampling_rate=16_000, return_tensors="pt")).logits[0].softmax(-1)
    if extractor != "alone":
        from tiny_speech import speech_processor

        reader = speech_processor(tmp_path / "vocabulary")
    said = predicted(model, str(tmp_path / "a.wav"), reader)
    assert said == pytest.approx({f"LABEL_{n}": float(share) for n, share in enumerate(shares)}, rel=1e-3)


def test_the_answer_is_the_best_span_of_the_text():
    model, tokenizer = tiny("BertForQuestionAnswering", **SIZES), tiny_tokenizer()
    text, question = "the film is not very good", "bad film"
    with torch.no_grad():
        said = model(**tokenizer(question, text, return_tensors="pt"))
    begin, end = said.start_logits[0], said.end_logits[0]
    # Two words and three special tokens precede and separate; the text's words are tokens 4 to 9.
    spans = {(a, b): float(begin[a] + end[b]) for a in range(4, 10) for b in range(a, 10)}
    first, last = max(spans, key=lambda span: spans[span])
    words = text.split()[first - 4 : last - 3]
    assert predicted(model, text, tokenizer, question=question) == " ".join(words)
    # Longer than the positions, it is read in windows.
    long = " ".join(["the film is not very good"] * 20)
    assert predicted(model, long, tokenizer, question=question) in long


def test_heads_of_several_kinds_are_not_compared():
    models = {BASE: tiny_model(2), "other": tiny("BertForMaskedLM", **SIZES)}
    opened = {label: in_memory(model, tiny_tokenizer()) for label, model in models.items()}
    with pytest.raises(
        ApproxError, match="exact is a BertForSequenceClassification, other is a BertForMaskedLM"
    ) as caught:
        compare(opened, "the film")
    assert caught.value.exit_code == Exit.UNSUPPORTED


@pytest.mark.parametrize(
    ("architecture", "remedy"),
    [("BertModel", "use a checkpoint with a task head"), ("GPT2LMHeadModel", "`approx generate`")],
)
def test_a_model_without_a_head_is_refused_with_what_would_do(architecture, remedy):
    with pytest.raises(
        ApproxError, match=f"{architecture} predicts nothing to compare.*ForMaskedLM.*{remedy}"
    ) as caught:
        compare({BASE: in_memory(tiny(architecture), tiny_tokenizer())}, "the film")
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_a_text_may_fill_the_positions_and_the_vocabulary_to_the_last():
    model, tokenizer = tiny_model(2), tiny_tokenizer()
    assert sum(predicted(model, "long " * 30, tokenizer).values()) == pytest.approx(1)
    with pytest.raises(ApproxError, match="33 tokens, the limit is 32"):
        predicted(model, "long " * 31, tokenizer)
    tokenizer.add_tokens(["another"])
    with pytest.raises(ApproxError, match=r"token 14, but the vocabulary of .* is 0-13") as caught:
        predicted(model, "another film", tokenizer)
    assert caught.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.parametrize(("text", "words"), [("", "its text is empty"), ("qwxz zzqk", "knows no word of the input")])
def test_an_input_without_known_words_is_refused_with_the_reason(text, words):
    with pytest.raises(ApproxError, match=words):
        api.predict(tiny_model(2), [text], processor=tiny_tokenizer())
