"""The registry, and what all classifications of texts share: label order, padding, predictions."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.finetuning.trainer import _held_out  # pyright: ignore[reportPrivateUsage]  # one rule for all tasks
from approx.searching.cost import _divided  # pyright: ignore[reportPrivateUsage]  # one rule for all tasks
from approx.tasks import TASKS, Example, Split, Task, open_task
from approx.tasks.settings import names_setting
from tiny_classifier import tiny_model, tiny_tokenizer


def test_every_entry_of_the_registry_makes_the_task_of_its_name():
    for name in TASKS:
        task = open_task(name)
        assert isinstance(task, Task)
        assert task.name == name
        assert task.metrics


@pytest.mark.parametrize(("asked", "meant"), [("sst2", "glue/sst2"), ("glue/sst-2", "glue/sst2"), ("needel", "needle")])
def test_an_unknown_task_gets_a_suggestion(asked, meant):
    with pytest.raises(ApproxError, match=f"Unknown task '{asked}'. Did you mean '{meant}'") as caught:
        open_task(asked)
    assert caught.value.exit_code == Exit.USAGE


def test_an_unknown_setting_is_named():
    with pytest.raises(ApproxError, match=r"'glue/sst2' has no setting 'words'\. Its settings are labels, encoding"):
        open_task("glue/sst2", words=3)


@pytest.mark.parametrize("name", TASKS)
def test_names_the_head_that_a_task_needs(name):
    task = open_task(name)
    with pytest.raises(ApproxError, match="but the model is a BertModel") as caught:
        task.check(tiny_model(2).bert)
    assert (
        f"{name} needs a {task.head.name} head".replace("-", " ").lower() in str(caught.value).replace("-", " ").lower()
    )


@pytest.mark.parametrize(("name", "outputs"), [("glue/mnli", 2), ("glue/stsb", 2), ("glue/sst2", 1)])
def test_another_number_of_outputs_is_refused(name, outputs):
    with pytest.raises(ApproxError, match=f"but the model has {outputs} "):
        open_task(name).check(tiny_model(outputs))


def test_other_labels_are_refused_with_both_lists():
    model = tiny_model(2, labels=["toxic", "clean"])
    with pytest.raises(ApproxError, match="has the labels negative, positive, but the model's are toxic, clean"):
        open_task("glue/sst2").check(model)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, [0, 1, 2]),
        (["0", "1", "2"], [0, 1, 2]),
        (["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], [2, 1, 0]),
        (["neutral", "Entailment", "contradiction"], [1, 0, 2]),
    ],
)
def test_outputs_are_read_by_the_models_own_label_names(labels, expected):
    task, model = open_task("glue/mnli"), tiny_model(3, labels=labels)
    task.check(model)
    outputs = SimpleNamespace(logits=torch.eye(3))
    assert task.predict(outputs, [], model.config) == expected


def test_regression_predicts_numbers():
    task, model = open_task("glue/stsb"), tiny_model(1)
    task.check(model)
    assert task.predict(SimpleNamespace(logits=torch.tensor([[1.5], [4.0]])), [], model.config) == [1.5, 4.0]
    assert task.correct([1.5], [1.5]) is None


def test_slices_go_by_the_length_of_the_input_and_empty_ones_are_left_out():
    lengths, labels, said = [3, 70, 15, 16, 64, 63], list("abcdef"), list("ABCDEF")
    slices = list(open_task("glue/sst2").slices(labels, lengths, said))
    assert slices == [
        (0, 16, ["A", "C"], ["a", "c"]),
        (16, 32, ["D"], ["d"]),
        (32, 64, ["F"], ["f"]),
        (64, 128, ["B", "E"], ["b", "e"]),
    ]
    assert list(open_task("glue/sst2").slices(["b"], [64], ["B"])) == [(64, 128, ["B"], ["b"])]


def test_logits_that_are_not_finite_are_no_prediction():
    with pytest.raises(ApproxError, match="not finite") as caught:
        open_task("glue/sst2").predict(
            SimpleNamespace(logits=torch.tensor([[0.0, float("nan")]])), [], tiny_model(2).config
        )
    assert caught.value.exit_code == Exit.VERIFICATION


def test_pairs_are_encoded_as_pairs_and_padded_by_the_tokenizer():
    task, tokenizer = open_task("glue/rte"), tiny_tokenizer()
    pair = task.encode(Example("a", {"text": "the film", "text_pair": "is good"}, 0), tokenizer)[0]
    single = task.encode(Example("b", {"text": "the"}, 0), tokenizer)[0]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    batch = task.collate([pair, single], tokenizer)
    assert batch["attention_mask"].tolist() == [[1] * 7, [1] * 3 + [0] * 4]
    assert (batch["input_ids"][1, 3:] == tokenizer.pad_token_id).all()
    assert (
        len(task.encode(Example("a", {"text": "the film", "text_pair": "is good"}, 0), tokenizer, 5)[0]["input_ids"])
        == 5
    )


def test_padding_is_on_the_right_and_masked_whatever_the_tokenizer_says_of_it():
    task, tokenizer = open_task("glue/sst2"), tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, "left"
    batch = task.collate([{"input_ids": [1] * length} for length in (3, 4)], tokenizer)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["input_ids"][0, :3].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "names", [["Normans", "Fresno,_California"], "Normans,Fresno,_California", " Normans , Fresno,_California"]
)
def test_names_are_a_list_or_a_text_with_commas(names):
    assert names_setting("squad", "articles", names) == ("Normans", "Fresno,_California")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("squad", {"articles": 5}, "'articles' of the task 'squad' is 5; allowed is a list of names"),
        ("squad", {"articles": []}, r"is \[\]; allowed is a list"),
        ("squad_v2", {"no_answer_margin": "high"}, "'no_answer_margin' .* is 'high'; allowed is a finite number"),
        ("squad_v2", {"no_answer_margin": float("nan")}, "finite number"),
        ("documents", {"labels": "good,"}, "'labels' .* allowed is a list of names, e.g. labels=one,two"),
        ("mlm", {"hidden": 1}, "'hidden' .* is 1; allowed is a number above 0 and below 1"),
        ("mlm", {"hidden": "half"}, "number above 0"),
        ("listops", {"brackets": "maybe"}, "'brackets' .* true or false"),
        ("lm", {"window": True}, "'window' .* is True"),
    ],
)
def test_names_an_impossible_setting_with_the_allowed_values(name, settings, words):
    with pytest.raises(ApproxError, match=words) as caught:
        open_task(name, **settings)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize("name", TASKS)
def test_every_task_says_which_examples_are_correlated_or_why_none_are(name):
    groups = open_task(name).groups
    assert groups.by or groups.independent
    # Only articles and documents are always known.
    assert groups.independent or name.startswith("squad")


def test_a_task_must_declare_its_groups():
    with pytest.raises(TypeError, match="Silent does not say which of its examples are correlated"):

        class Silent(Task):  # pyright: ignore[reportUnusedClass]  # making it is the mistake
            name = "silent"


def _article(title: str, count: int) -> dict:
    asked = [
        {"id": f"{title}-{row}", "question": f"what {row}", "answers": [{"text": "word", "answer_start": 2}]}
        for row in range(count)
    ]
    return {
        "title": title,
        "paragraphs": [{"context": "a word here", "qas": asked[:2]}, {"context": "a word", "qas": asked[2:]}],
    }


def _sources(folder: Path) -> dict[str, tuple[Path, dict]]:
    """Name of a task -> data in which ten groups of three or more examples alternate, and settings."""
    import soundfile

    (folder / "dev-v1.1.json").write_text(json.dumps({"data": [_article(f"T{row}", 4) for row in range(10)]}))
    rows = [{"text": f"good {row}", "label": row % 2, "group": f"g{row % 10}"} for row in range(40)]
    (folder / "grouped.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mnli = ["sentence1\tsentence2\tgold_label", *(f"premise {row // 3}\tit {row}\tneutral" for row in range(30))]
    (folder / "dev_matched.tsv").write_text("\n".join(mnli) + "\n")
    tagged = "".join("-DOCSTART- -X- O O\n\n" * (row % 3 == 0) + f"word{row} B-PER\n\n" for row in range(30))
    (folder / "tags.conll").write_text(tagged)
    for label in ("pos", "neg"):
        (folder / "aclImdb" / "test" / label).mkdir(parents=True)
        films = [f"http://films/{row // 4}/reviews" for row in range(20)]
        (folder / "aclImdb" / "test" / f"urls_{label}.txt").write_text("\n".join(films) + "\n")
        for row in range(20):
            (folder / "aclImdb" / "test" / label / f"{row}_7.txt").write_text(f"a film {row}")
    for speaker in range(10):
        chapter = folder / "LibriSpeech" / "dev-clean" / f"{speaker}" / "1"
        chapter.mkdir(parents=True)
        (chapter / f"{speaker}-1.trans.txt").write_text("".join(f"{speaker}-1-{row} A WORD\n" for row in range(3)))
        for row in range(3):
            soundfile.write(chapter / f"{speaker}-1-{row}.flac", np.zeros(1600), 16_000)
    return {
        "squad": (folder / "dev-v1.1.json", {}),
        "text-classification": (folder / "grouped.jsonl", {"labels": "0,1"}),
        "documents": (folder / "aclImdb", {}),
        "glue/mnli": (folder / "dev_matched.tsv", {}),
        "token-classification": (folder / "tags.conll", {"labels": "O,B-PER"}),
        "librispeech/dev-clean": (folder / "LibriSpeech", {}),
    }


def test_a_group_is_never_in_both_halves_of_a_search_or_of_a_training(tmp_path):
    for name, (data, settings) in _sources(tmp_path).items():
        task = open_task(name, **settings)
        examples = task.load(data).examples
        groups = {example.group for example in examples}
        assert None not in groups, name
        assert 5 <= len(groups) <= len(examples) / 3, name
        for seed in range(5):
            for first, second in (
                _divided(examples, 15, seed),
                _held_out(task, Split("dev", examples, False), 9, seed),
            ):
                assert first, name
                assert second, name
                assert not {one.unit for one in first} & {one.unit for one in second}, name
                assert len(first) + len(second) == len(examples), name


def test_a_column_named_group_is_read_without_being_named_and_an_empty_cell_is_a_group_of_its_own(tmp_path):
    rows = "text,label,group,speaker\na,0,x,1\nb,1,,1\nc,0,x,2\n"
    (tmp_path / "test.csv").write_text(rows)
    task = open_task("text-classification", labels="0,1")
    assert {one.inputs["text"]: one.group for one in task.load(tmp_path / "test.csv").examples} == {
        "a": "x",
        "b": None,
        "c": "x",
    }
    named = open_task("text-classification", columns={"group": "speaker"}, labels="0,1")
    assert {one.group for one in named.load(tmp_path / "test.csv").examples} == {"1", "2"}
    with pytest.raises(ApproxError, match="line 3: no column group, or it is empty"):
        open_task("text-classification", columns={"group": "group"}, labels="0,1").load(tmp_path / "test.csv")
