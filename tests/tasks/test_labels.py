"""What a classifier predicts and how its outputs are labelled: the order of labels, several labels at once, numbers."""

import csv
import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

import approx
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import finetune
from approx.finetuning.trainer import divergence_of_labels
from approx.publishing.tables import quality_table
from approx.tasks import Example, open_task
from approx.tasks.metrics import METRICS
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_training import options_of

NAMES = ["toxic", "insult", "threat"]
WORDS = ["good", "bad", "very", "film"]
Kind = Literal["regression", "single_label_classification", "multi_label_classification"]


def checkpoint(kind: Kind | None, labels: list[str] | None = None, outputs: int = 3) -> Any:
    torch.manual_seed(0)
    model = tiny_model(outputs, labels)
    model.config.problem_type = kind
    return model


def seeing(words: list[str], labels: list[str] | None, swapped: bool):
    """A classifier of two classes that knows one word of each."""
    model, tokenizer = checkpoint(None, labels, 2), tiny_tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        vectors = model.bert.embeddings.word_embeddings.weight
        for sign, word in zip((1.0, -1.0), words, strict=True):
            vectors[tokenizer.convert_tokens_to_ids(word), 0] = 50 * sign
        for layer in model.bert.encoder.layer:
            for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm):
                norm.weight.fill_(1.0)
        model.bert.embeddings.LayerNorm.weight.fill_(1.0)
        first = model.bert.encoder.layer[0].attention
        first.self.value.weight.copy_(torch.eye(len(first.self.value.weight)))
        first.output.dense.weight.copy_(100 * torch.eye(len(first.output.dense.weight)))
        model.bert.pooler.dense.weight[0, 0] = 1.0
        model.classifier.weight[:, 0] = torch.tensor([-1.0, 1.0] if swapped else [1.0, -1.0])
    return model.eval(), tokenizer


@pytest.fixture
def reviews(tmp_path):
    """Forty reviews in the layout of SST-2: good ones are 1."""
    rows = [f"the film is {'good' if number % 2 else 'bad'}\t{number % 2}" for number in range(40)]
    path = tmp_path / "dev.tsv"
    path.write_text("\n".join(["sentence\tlabel", *rows]))
    return str(path)


def scored(model, reader, data, task="glue/sst2", **settings):
    made = approx.evaluate(model, task, processor=reader, data=data, settings=settings)
    return made.quality[0]


def test_generic_labels_in_another_order_are_noticed_and_can_be_set(reviews):
    # Its outputs are good, bad; those of the task are negative, positive.
    model, reader = seeing(["good", "bad"], None, swapped=False)
    wrong = scored(model, reader, reviews)
    assert wrong.base.scores["accuracy"] == 0
    assert "LABEL_0, LABEL_1 are taken as negative, positive" in wrong.notes[0]
    assert "100.0% instead of 0.0%" in wrong.notes[1]
    assert "--labels 1,0" in wrong.notes[1]
    assert quality_table(wrong)["base"]["verdict"] == "worse than chance"
    for labels in ("1,0", "positive,negative", [1, 0]):
        right = scored(model, reader, reviews, labels=labels)
        assert (right.base.scores["accuracy"], right.notes) == (1, [])


def test_a_right_order_and_a_guess_give_no_advice(reviews):
    model, reader = seeing(["good", "bad"], None, swapped=True)
    assert len(scored(model, reader, reviews).notes) == 1
    for seed in range(3):
        torch.manual_seed(seed)
        assert not any("instead of" in note for note in scored(tiny_model(2), reader, reviews).notes)


def test_the_hint_uses_the_names_that_the_user_gave(reviews, tmp_path):
    model, reader = seeing(["good", "bad"], ["pos", "neg"], swapped=False)
    (tmp_path / "own.csv").write_text("text,label\n" + "the film is good,pos\nthe film is bad,neg\n" * 20)
    file = str(tmp_path / "own.csv")
    assert scored(model, reader, file, "text-classification").notes == []
    wrong = scored(model, reader, file, "text-classification", labels="neg,pos")
    assert wrong.notes[0].startswith("labels were set as neg, pos, though the checkpoint names its outputs pos, neg")
    assert "--labels pos,neg" in wrong.notes[1]
    # Numbers are those of the checkpoint's classes.
    assert scored(model, reader, file, "text-classification", labels="1,0").base.scores["accuracy"] == 0


def test_training_says_that_the_labels_are_in_another_order_and_resumes_with_it(tmp_path):
    folder = tmp_path / "training"
    # A tenth of them is held out, and measured before the first step.
    data = tmp_path / "train.tsv"
    data.write_text("sentence\tlabel\n" + "the film is good\t1\nthe film is bad\t0\n" * 200)
    options = options_of(str(data), steps=40, evaluate_every=40)
    noted = []
    for resume in (False, True):
        wrong, reader = seeing(["good", "bad"], None, swapped=False)
        noted.append(finetune(wrong, reader, options, folder=folder, resume=resume).notes)
    assert noted[0] == noted[1]
    assert any("100.0% instead of 0.0%" in note and "--labels 1,0" in note for note in noted[0])
    right, reader = seeing(["good", "bad"], None, swapped=True)
    assert not any("instead of" in note for note in finetune(right, reader, options, folder=tmp_path / "other").notes)


@pytest.mark.parametrize(("task", "labels"), [("glue/sst2", "1,1"), ("glue/sst2", "good,bad"), ("glue/mnli", "1,0")])
def test_an_order_names_every_class_once(task, labels):
    with pytest.raises(ApproxError, match="each class once, in the order of the model's outputs") as caught:
        open_task(task, labels=labels)
    assert caught.value.exit_code == Exit.USAGE


def test_order_is_used_in_training():
    model = checkpoint(None, None, 3)
    task = open_task("glue/mnli", labels="2,0,1")
    task.check(model)
    examples = [Example(str(label), {"text": "a"}, label) for label in range(3)]
    assert task.targets(examples, [], None, model.config)["labels"].tolist() == [1, 2, 0]


SETS = [["toxic"], [], ["insult", "threat"], ["toxic", "threat"]]


def flags(names: list[str]) -> list[int]:
    return [int(name in names) for name in NAMES]


@pytest.mark.parametrize("way", ["lists", "flags", "names", "columns", "semicolons"])
def test_several_labels_are_read_in_every_usual_way(tmp_path, way):
    task = open_task("text-classification")
    task.check(checkpoint("multi_label_classification", NAMES))
    path = tmp_path / ("test.jsonl" if way in ("lists", "flags") else "test.csv")
    if way in ("lists", "flags"):
        cells = [names if way == "lists" else flags(names) for names in SETS]
        path.write_text("\n".join(json.dumps({"text": "a", "label": cell}) for cell in cells))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", *(NAMES if way == "columns" else ["label"])])
            mark = "; " if way == "semicolons" else ","
            writer.writerows(["a", *(flags(names) if way == "columns" else [mark.join(names)])] for names in SETS)
    assert [one.label for one in task.load(path).examples] == [flags(names) for names in SETS]


def test_several_labels_are_measured_and_trained(tmp_path):
    path = tmp_path / "toxic.csv"
    path.write_text("text,label\n" + "".join(f"the film is {word},{','.join(NAMES[:1])}\n" for word in WORDS * 5))
    model, reader = checkpoint("multi_label_classification", NAMES), tiny_tokenizer()
    entry = scored(model, reader, str(path), "text-classification")
    assert (entry.metric, set(entry.base.scores)) == ("micro_f1", {"micro_f1", "macro_f1", "subset_accuracy"})
    converted = checkpoint("multi_label_classification", NAMES)
    approx.convert(converted, approx.Plan.of("local", left=1, right=1))
    arguments: dict[str, Any] = {
        "task": "text-classification",
        "data": str(path),
        "batch_size": 10,
        "learning_rate": 0.01,
    }
    done = approx.finetune(
        converted, tmp_path / "work", processor=reader, recover=["task"], validation=2, steps=20, **arguments
    )
    assert done.phases[0].steps == 20
    after = scored(converted, reader, str(path), "text-classification")
    assert after.base.scores["subset_accuracy"] == 1
    distilled = approx.finetune(
        converted, tmp_path / "more", processor=reader, recover=["distill"], validation=2, steps=2, **arguments
    )
    assert distilled.phases[0].steps == 2


def test_a_number_is_measured_by_correlation(tmp_path):
    path = tmp_path / "test.csv"
    path.write_text("text,label\n" + "".join(f"the film is {word},{n / 3}\n" for n, word in enumerate(WORDS * 3)))
    for kind in (None, "regression"):
        entry = scored(checkpoint(kind, None, 1), tiny_tokenizer(), str(path), "text-classification")
        assert (entry.metric, set(entry.base.scores)) == ("pearson", {"pearson", "spearman"})


@pytest.mark.parametrize(
    ("task", "kind", "outputs", "words"),
    [
        (
            "glue/sst2",
            "multi_label_classification",
            2,
            "has one of several labels, but the checkpoint predicts several labels",
        ),
        ("glue/sst2", "regression", 2, "predicts a number"),
        (
            "glue/stsb",
            "multi_label_classification",
            1,
            "has a number, but the checkpoint predicts several labels at once",
        ),
        ("documents", "multi_label_classification", 2, "has one of several labels"),
        ("text-classification", "regression", 3, "predicts 3 numbers"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(task, kind, outputs, words):
    with pytest.raises(ApproxError, match=words) as caught:
        open_task(task).check(checkpoint(kind, None, outputs))
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_scores_of_several_labels_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    said, true = (random.random((50, 4)) < 0.4).astype(int), (random.random((50, 4)) < 0.3).astype(int)
    for key, expected in {
        "micro_f1": f1_score(true, said, average="micro"),
        "macro_f1": f1_score(true, said, average="macro"),
        "subset_accuracy": accuracy_score(true, said),
    }.items():
        assert METRICS[key].value(said.tolist(), true.tolist()) == pytest.approx(expected)
        constant = METRICS[key].chance(true.tolist())
        assert constant is not None
        assert constant >= METRICS[key].value([[1, 1, 1, 1]] * 50, true.tolist()) - 1e-9


def test_the_distance_of_several_labels_is_zero_only_for_equal_outputs():
    due = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert divergence_of_labels(due, due).abs().max() == pytest.approx(0, abs=1e-6)
    # A softmax would not see that all labels became likelier.
    assert (divergence_of_labels(due + 3, due) > 0.1).all()


def test_transcripts_without_words_have_no_error_rate(tmp_path):
    import soundfile

    soundfile.write(tmp_path / "a.wav", np.zeros(16_000, np.float32), 16_000)
    (tmp_path / "test.csv").write_text("audio,text\na.wav,\na.wav, \n")
    task = open_task("librispeech/test-clean", columns={"audio": "audio", "text": "text"})
    with pytest.raises(ApproxError, match="none of the 2 transcripts has words") as caught:
        task.load(tmp_path / "test.csv")
    assert caught.value.exit_code == Exit.UNAVAILABLE
    (tmp_path / "test.csv").write_text("audio,text\na.wav,\na.wav,hello\n")
    assert task.load(tmp_path / "test.csv").notes == ("without words: 1",)
    assert METRICS["wer"].value(["", "x"], ["", ""]) == 1
