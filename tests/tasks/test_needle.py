"""The generated documents: reproducible, balanced, of exact length, and unsolvable without finding the needle."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from approx.errors import ApproxError
from approx.tasks.needle import NEEDLES, QUESTION, VALUES, WORDS, Needle

QUICKSTART = Path(__file__).parents[2] / "approx" / "quickstart"


@pytest.mark.parametrize(("length", "needles"), [(8, 2), (64, 8), (2048, 8), (2048, 32)])
def test_texts_hold_their_words_and_their_answer(length, needles):
    for example in Needle(length=length, examples=8, needles=needles).examples():
        words = example.inputs["text"].split(" ")
        assert len(words) == length - 2
        assert set(words) <= set(WORDS)
        question, key, *document = words
        assert question == QUESTION
        pairs = dict(word.split(":") for word in document if word in NEEDLES)
        assert len(pairs) == sum(word in NEEDLES for word in document) == needles
        assert pairs[key] == VALUES[example.label]


def test_labels_take_turns_and_needles_lie_anywhere():
    task = Needle(length=2048, examples=400)
    examples = task.examples()
    assert set(Counter(example.label for example in examples).values()) == {50}
    documents = [example.inputs["text"].split(" ") for example in examples]
    places = [
        words.index(f"{words[1]}:{VALUES[example.label]}") for words, example in zip(documents, examples, strict=True)
    ]
    # Uniform over the document: a quarter of the answers in each quarter, within four standard deviations.
    assert all(66 <= count <= 134 for count in Counter(place * 4 // 2048 for place in places).values())
    # The most frequent value of a document is little better than a guess.
    popular = [Counter(word.split(":")[1] for word in words if ":" in word).most_common(1)[0][0] for words in documents]
    assert sum(VALUES.index(value) == e.label for value, e in zip(popular, examples, strict=True)) < 160


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"length": 11}, "'length'.*11.*from 12"),
        ({"length": 1_000_000}, "'length'.*1000000.*to 131072"),
        ({"length": "2048"}, "'length'.*'2048'.*whole number"),
    ],
)
def test_rejects_impossible_settings(settings, words):
    with pytest.raises(ApproxError, match=words):
        Needle(**settings)


def test_rejects_unknown_splits_and_data(tmp_path):
    task = Needle(length=64)
    with pytest.raises(ApproxError, match="cannot read"):
        task.load(tmp_path)
    with pytest.raises(ApproxError, match=r"'test'.*train, dev"):
        task.load(split="test")
    with pytest.raises(ApproxError, match="'limit'"):
        task.load(limit=0)


def test_the_embedded_model_is_small():
    assert sum(file.stat().st_size for file in QUICKSTART.iterdir()) <= 4 * 2**20


def test_the_embedded_model_finds_the_needle():
    model = AutoModelForSequenceClassification.from_pretrained(QUICKSTART).eval()
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    # Not the seed of training and of the record.
    task = Needle(length=2048, examples=24, seed=1)
    task.check(model)
    predictions = []
    for example in task.examples():
        batch = task.collate(encodings := task.encode(example, tokenizer), tokenizer)
        assert batch["input_ids"].shape == (1, 2048)
        assert tokenizer.unk_token_id not in batch["input_ids"]
        with torch.inference_mode():
            predictions += task.predict(model(**batch), encodings, model.config)
    assert task.score(predictions, [example.label for example in task.examples()])["accuracy"] >= 0.95
