"""generate and predict: exact beside converted on one input, and where they part."""

import math

import pytest
import soundfile
import torch
import transformers
from PIL import Image

from approx import api
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BASE
from approx.measuring.prediction import Parting
from approx.planning.plan import Plan
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from tiny_decoder import tiny_gpt2, words
from tiny_speech import recogniser, sound, speech_processor
from tiny_study import LABELS
from zoo import tiny


def generated(model, *prompts, **more):
    return api.generate(model, list(prompts), processor=words(), **more).prompts


def test_texts_equal_generate_and_name_the_first_difference():
    model = tiny_gpt2(mechanism="linear")
    (one,) = generated(model, "the film is", max_new_tokens=8)
    exact, other = one.continuations.values()
    assert list(one.continuations) == [BASE, type(model).__name__]
    assert one.tokens == 3
    ids = torch.tensor([words()("the film is")["input_ids"]])
    assert other.tokens == model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    base = tiny_gpt2().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert exact.tokens == base != other.tokens
    place = one.differences[type(model).__name__]
    first = next(number for number, pair in enumerate(zip(base, other.tokens, strict=True)) if pair[0] != pair[1])
    assert place == Parting(first + 1, WORDS[base[first]], WORDS[other.tokens[first]])
    assert other.text == " ".join(WORDS[token] for token in other.tokens)
    # The last token was never read.
    assert exact.cache_mb == 3 * 2 * (3 + 7) * 32 * 4 / 1e6
    assert all(min(entry.first_token_ms, entry.tokens_per_second or 0) > 0 for entry in (exact, other))


def test_at_the_exact_limit_no_token_differs():
    model = tiny_gpt2(mechanism="local", left=63)
    assert generated(model, "the film", max_new_tokens=6)[0].differences == {type(model).__name__: None}
    # One token has no rate.
    (one,) = generated(model, "the film", max_new_tokens=1)
    assert [entry.tokens_per_second for entry in one.continuations.values()] == [None, None]


def test_a_stock_model_has_no_comparison_and_samples_repeat_with_their_seed():
    model, how = tiny_gpt2(), {"sample": True, "temperature": 2.0, "max_new_tokens": 12}
    drawn = [generated(model, "the film", seed=seed, **how)[0] for seed in (1, 1, 2)]
    assert [list(one.continuations) for one in drawn] == [[BASE]] * 3
    assert drawn[0].differences == {}
    first, again, other = (one.continuations[BASE].tokens for one in drawn)
    assert first == again != other


@pytest.mark.parametrize(
    ("prompt", "asked", "message"),
    [
        ("", {}, "The prompt is empty"),
        ("good " * 60, {"max_new_tokens": 10}, "60 tokens and 10 more .* at most 4 new tokens .*--max-length 70"),
        ("good " * 70, {"max_new_tokens": 10}, "a shorter prompt"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt, asked, message):
    with pytest.raises(ApproxError, match=message):
        generated(tiny_gpt2(), prompt, **asked)


def test_only_decoders_generate_and_only_heads_predict():
    for call, model in ((api.generate, tiny_model(2)), (api.predict, tiny_gpt2())):
        with pytest.raises(ApproxError, match=r"approx (predict|generate)") as caught:
            call(model, ["the film"], processor=tiny_tokenizer())
        assert caught.value.exit_code == Exit.UNSUPPORTED


def predicted(model, given, processor=None, **more):
    (one,) = api.predict(model, [given], processor=processor or tiny_tokenizer(), **more).inputs
    return one.kind, one.predictions


def converted(model, mechanism="local", **settings):
    surgery.convert(model, Plan.of(mechanism, **(settings or {"left": 0, "right": 0})))
    return model


def test_labels_have_the_probabilities_of_the_logits():
    model = converted(tiny_model(2, LABELS))
    kind, said = predicted(model, "the film is good")
    with torch.no_grad():
        logits = model(**tiny_tokenizer()("the film is good", return_tensors="pt")).logits[0]
    expected = said[type(model).__name__]
    assert kind == "labels"
    assert expected == pytest.approx(dict(zip(LABELS, logits.softmax(-1).tolist(), strict=True)))
    assert said[BASE].keys() == expected.keys()
    assert said[BASE] != expected
    # A regression has a value, which no sigmoid may touch.
    model = tiny_model(1)
    _, said = predicted(model, "the film is good")
    with torch.no_grad():
        value = float(model(**tiny_tokenizer()("the film is good", return_tensors="pt")).logits)
    assert said[BASE] == {"LABEL_0": pytest.approx(value)}


def test_reads_a_text_file_and_refuses_unsuitable_inputs(tmp_path):
    (tmp_path / "text.txt").write_text("the film is good", encoding="utf-8")
    model = tiny_model(2, LABELS)
    assert predicted(model, str(tmp_path / "text.txt")) == predicted(model, "the film is good")
    for text, message in (
        ("good " * 40, "42 tokens, the limit is 32 .*--max-length 42"),
        (" ", "its text is empty"),
        (str(tmp_path / "none.txt"), "none.txt cannot be read: No such file"),
    ):
        with pytest.raises(ApproxError, match=message):
            predicted(model, text)
    with pytest.raises(ApproxError, match="takes no --question"):
        predicted(model, "good", question="what?")


def test_every_token_has_a_label_and_every_mask_its_candidates():
    sizes = {"vocab_size": len(WORDS)}
    kind, said = predicted(converted(tiny("BertForTokenClassification", **sizes)), "the film")
    assert (kind, [one["word"] for one in said[BASE]]) == ("tokens", ["the", "film"])
    assert all(0.5 <= one["probability"] <= 1 for tokens in said.values() for one in tokens)
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "[UNK]"
    kind, said = predicted(tiny("BertForMaskedLM", **sizes), "the [UNK] is [UNK]", tokenizer, top=3)
    assert kind == "masks"
    assert [len(mask) for mask in said[BASE]] == [3, 3]


def test_an_answer_is_a_part_of_the_text():
    model = converted(tiny("BertForQuestionAnswering", vocab_size=len(WORDS)))
    text = "the film is not very good"
    kind, said = predicted(model, text, question="film bad ?")
    assert kind == "text"
    assert all(answer and answer in text for answer in said.values())
    with pytest.raises(ApproxError, match="--question"):
        predicted(model, text)


def test_a_recording_is_transcribed(tmp_path):
    soundfile.write(tmp_path / "a.flac", sound(0.6), 16_000)
    reader, model = speech_processor(tmp_path / "vocabulary"), converted(recogniser())
    kind, said = predicted(model, str(tmp_path / "a.flac"), reader)
    assert kind == "text"
    assert list(said) == [BASE, type(model).__name__]
    with pytest.raises(ApproxError, match=r"missing\.flac"):
        predicted(model, str(tmp_path / "missing.flac"), reader)


def test_an_image_is_classified(tmp_path):
    model = converted(tiny("ViTForImageClassification"))
    size = model.config.image_size
    reader = transformers.ViTImageProcessor(size={"height": size, "width": size})
    Image.new("RGB", (40, 30), (200, 30, 60)).save(tmp_path / "red.png")
    kind, said = predicted(model, str(tmp_path / "red.png"), reader)
    assert kind == "labels"
    assert all(math.isclose(sum(scores.values()), 1, rel_tol=1e-5) for scores in said.values())
    (tmp_path / "broken.png").write_bytes(b"nothing")
    for name, why in (("broken.png", "is not a readable image"), ("none.png", "No such file")):
        with pytest.raises(ApproxError, match=why):
            predicted(model, str(tmp_path / name), reader)
