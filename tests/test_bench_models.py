"""The scripts that train models for reports: their output can be opened, and held-out data was not trained on."""

import gzip
import json
import sys
from collections import Counter

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from approx.checkpoints import checkpoint
from approx.evaluation.evaluate import Subject, evaluate
from approx.planning import positions
from approx.tasks import open_task
from bench import long_documents_model, speech_model
from tiny_speech import some_utterances, write_utterances
from tiny_study import tiny_checkpoint

PHASES = (long_documents_model.Phase(8, 2, 2), long_documents_model.Phase(40, 1, 2))


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """Run the script for long documents on a few texts and a tiny BERT; return the start and its folder."""
    words = ["the", "film", "is", "not", "very", "good", "bad", "dull", "fine", "long"]
    start = tiny_checkpoint(tmp_path / "start", positions=32)

    def write(name: str, rows: int, length: int) -> None:
        texts = [" ".join(words[(row + place) % len(words)] for place in range(length)) for row in range(rows)]
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(
                json.dumps({"id": f"{name[:3]}/{row}", "text": text, "label": row % 2, "rating": 3}) + "\n"
                for row, text in enumerate(texts)
            )

    write("reviews.jsonl.gz", 40, 50)
    write("train.jsonl.gz", 3, 701)
    write("test_part.jsonl.gz", 2, 701)
    write("test_short.jsonl.gz", 2, 700)
    monkeypatch.setitem(long_documents_model.PHASES, "reviews", PHASES)
    given = ["--start", str(start), "--reviews", str(tmp_path / "reviews.jsonl.gz"), "--imdb", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["long_documents_model.py", "reviews", "-o", str(tmp_path / "out"), *given])
    long_documents_model.main()
    return start, tmp_path / "out"


def test_long_documents_are_learnt_by_the_upper_layers_on_longer_positions(documents):
    start, out = documents
    old, new = (AutoModelForSequenceClassification.from_pretrained(folder) for folder in (start, out / "model"))
    assert positions.limit(new.config) == 2048
    table = old.bert.embeddings.position_embeddings.weight
    assert torch.equal(new.bert.embeddings.position_embeddings.weight, table.repeat(64, 1))
    kept = [
        torch.equal(*pair)
        for pair in zip(old.parameters(), new.parameters(), strict=True)
        if pair[0].shape == pair[1].shape
    ]
    lower = len(list(old.bert.embeddings.parameters())) - 1 + len(list(old.bert.encoder.layer[0].parameters()))
    assert all(kept[:lower])
    assert not any(kept[lower:])


def test_long_documents_to_measure_are_those_not_trained_on(documents):
    _, out = documents
    ids = [json.loads(line)["id"] for line in (out / "movie-reviews.jsonl").read_text().splitlines()]
    assert 0 < len(ids) < 20
    assert all(long_documents_model.held_out(name, "reviews") for name in ids)
    split = open_task("documents").load(out / "imdb.jsonl")
    assert [example.id for example in split.examples] == ["tes/0", "tes/1"]


def test_genres_are_learnt_from_one_half_of_the_documents_and_measured_on_the_other(tmp_path, monkeypatch):
    start = tiny_checkpoint(tmp_path / "start", positions=32)
    genres = ["news", "humor", "lore"]
    with gzip.open(tmp_path / "brown.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({"id": f"c{row}", "text": f"film {row} " * 300, "genre": genres[row % 3]}) + "\n"
            for row in range(24)
        )
    monkeypatch.setitem(long_documents_model.PHASES, "genres", PHASES)
    given = ["--start", str(start), "--brown", str(tmp_path / "brown.jsonl.gz")]
    monkeypatch.setattr(sys, "argv", ["long_documents_model.py", "genres", "-o", str(tmp_path / "out"), *given])
    learnt = []
    train = long_documents_model.train
    monkeypatch.setattr(long_documents_model, "train", lambda *given: (learnt.extend(given[2]), train(*given)))
    long_documents_model.main()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert model.config.id2label == {0: "press", 1: "general", 2: "learned", 3: "fiction"}
    split = open_task("documents", labels=["press", "general", "learned", "fiction"]).load(
        tmp_path / "out" / "brown.jsonl"
    )
    assert all(example.label == (0, 3, 1)[int(example.id[1:]) % 3] for example in split.examples)
    held = {example.id for example in split.examples}
    # The other documents are read from words 0 and 250 on (of 600, at least 250 at the end).
    words = Counter(row["id"] for row in learnt)
    assert set(words) | held == {f"c{row}" for row in range(24)}
    assert not set(words) & held
    assert set(words.values()) == {2}
    assert {len(row["text"].split()) for row in learnt} == {600, 350}


def test_the_speech_model_transcribes(tmp_path, monkeypatch):
    write_utterances(tmp_path / "test-other", some_utterances())
    monkeypatch.setattr(speech_model, "STEPS", 3)
    given = ["speech_model.py", "-o", str(tmp_path / "out"), "--utterances", str(tmp_path / "test-other")]
    monkeypatch.setattr(sys, "argv", given)
    speech_model.main()
    opened = checkpoint.load(tmp_path / "out")
    subject = Subject("exact", opened.model, checkpoint.processor(opened.source))
    entry = evaluate({"exact": subject}, open_task("librispeech/test-other"), data=tmp_path)
    assert entry["base"]["scores"]["wer"] > 0
