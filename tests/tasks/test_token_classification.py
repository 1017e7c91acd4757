"""Tags of words from files of columns and tables, scored over whole entities."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

import approx
from approx.errors import ApproxError
from approx.tasks import open_task
from approx.tasks.entities import entities
from approx.tasks.metrics import METRICS
from tiny_classifier import tiny_tokenizer
from zoo import tiny

TAGS = ("O", "B-FILM", "I-FILM")
CONLL = "-DOCSTART- X O\n\nthe DT B-FILM\nfilm NN I-FILM\nis VB O\n\nvery RB O\ngood JJ O\n"


def model(tags=TAGS):
    return tiny("BertForTokenClassification", num_labels=3, id2label=dict(enumerate(tags)))


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", set()),
        ("B-A I-A O", {("A", 0, 2)}),
        ("B-A B-A I-A", {("A", 0, 1), ("A", 1, 3)}),
        ("I-A I-B B-B", {("A", 0, 1), ("B", 1, 2), ("B", 2, 3)}),
        ("NOUN NOUN O", {("NOUN", 0, 1), ("NOUN", 1, 2)}),
        ("S-A B-A E-A", {("A", 0, 1), ("A", 1, 3)}),
    ],
)
def test_entities_are_read_from_tags(tags, found):
    assert entities(tags.split()) == found


def test_the_score_counts_whole_entities():
    labels = [["B-A", "I-A", "O", "B-B"], ["B-A", "O"]]
    said = [["B-A", "O", "O", "B-B"], ["B-A", "B-B"]]
    # Two of four entities said, and two of three present.
    assert METRICS["entity_f1"].value(said, labels) == pytest.approx(4 / 7)
    assert METRICS["token_accuracy"].value(said, labels) == pytest.approx(4 / 6)
    assert METRICS["entity_f1"].value([["O"]], [["O"]]) == 0
    assert METRICS["entity_f1"]().compute(predictions=said, references=labels) == {"entity_f1": pytest.approx(4 / 7)}


def test_columns_and_tables_hold_the_same_texts(tmp_path):
    (tmp_path / "a.conll").write_text(CONLL)
    rows = [
        {"words": "the film is", "ner": ["B-FILM", "2", 0]},
        {"words": ["very", "good"], "ner": "O O"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = open_task("token-classification", labels=TAGS).load(tmp_path / "a.conll")
    second = open_task("token-classification", labels=TAGS, columns={"tokens": "words", "tags": "ner"}).load(
        tmp_path / "b.jsonl"
    )
    examples = [(one.inputs, one.label) for one in first.examples]
    assert examples == [(one.inputs, one.label) for one in second.examples]
    assert examples[0] == ({"words": ["the", "film", "is"]}, ["B-FILM", "I-FILM", "O"])


def test_base_and_converted_are_compared_and_trained(tmp_path):
    (tmp_path / "train.conll").write_text(CONLL * 4)
    base, tokenizer = model(), tiny_tokenizer()
    converted = copy.deepcopy(base)
    approx.convert(converted, approx.Plan.of("local", left=1, right=1))
    arguments = {"data": str(tmp_path / "train.conll"), "processor": tokenizer}
    made = approx.evaluate(converted, "token-classification", against=base, batch_size=3, **arguments).quality[0]
    alone = approx.evaluate(converted, "token-classification", against=base, batch_size=1, **arguments).quality[0]
    assert (made.metric, made.examples) == ("entity_f1", 8)
    assert made.variants[0].scores == alone.variants[0].scores
    done = approx.finetune(
        converted,
        tmp_path / "work",
        recover=["task"],
        task="token-classification",
        steps=2,
        batch_size=2,
        validation=1,
        **arguments,
    )
    assert done.measure == "entity_f1"


def test_targets_are_at_the_first_tokens_in_the_order_of_the_model(tmp_path):
    (tmp_path / "a.conll").write_text(CONLL)
    turned = model(("I-FILM", "O", "B-FILM"))
    task, tokenizer = open_task("token-classification", labels=TAGS), tiny_tokenizer()
    examples = task.examples(tmp_path / "a.conll")
    encodings = [task.encode(example, tokenizer)[0] for example in examples]
    targets = task.targets(examples, encodings, tokenizer, turned.config)["labels"]
    assert targets.tolist() == [[-100, 2, 0, 1, -100], [-100, 1, 1, -100, -100]]
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 3).float()
    assert task.predict(SimpleNamespace(logits=logits), encodings, turned.config) == [one.label for one in examples]
    # Words behind the limit have no tag.
    cut = task.encode(examples[0], tokenizer, 3)
    assert task.predict(SimpleNamespace(logits=logits[:1, :3]), cut, turned.config) == [["B-FILM", "O", "O"]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.conll", "the\n", "line 1: a word without a tag"),
        ("a.conll", "the B-CAST\n", "line 1: unknown label 'B-CAST'"),
        ("a.conll", "\n", "0 texts in"),
        ("a.jsonl", '{"tokens": "a b", "tags": "O"}', "line 1: 2 words and 1 tags"),
    ],
)
def test_damaged_texts_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ApproxError, match=words):
        open_task("token-classification", labels=TAGS).load(tmp_path / name)
