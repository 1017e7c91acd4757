"""Long texts with labels from several kinds of files and IMDb's own folder; errors name the damaged line."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from approx.errors import ApproxError, Exit
from approx.tasks import open_task

ROWS = [("fine film", "positive"), ("dull\nfilm", "negative"), ("very, very long " * 20_000, "1"), ("bad", "0")]


def write(folder, kind):
    path = folder / f"test.{kind}"
    if kind.startswith("jsonl"):
        text = "".join(json.dumps({"text": text, "label": label}) + "\n\n" for text, label in ROWS)
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
        return path
    with path.open("w", newline="") as file:
        writer = csv.writer(file, dialect="excel-tab" if kind == "tsv" else "excel")
        writer.writerows([("text", "label"), *ROWS])
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "tsv"])
def test_files_of_all_kinds_hold_the_same_examples(tmp_path, kind):
    path = write(tmp_path, kind)
    for data in (path, tmp_path):
        split = open_task("documents").load(data)
        assert [(example.inputs["text"], example.label) for example in split.examples] == [
            # The classes take turns.
            (ROWS[1][0], 0),
            (ROWS[0][0], 1),
            (ROWS[3][0], 0),
            (ROWS[2][0], 1),
        ]
        assert split.name == "test"
        assert split.subset
        assert len({example.id for example in split.examples}) == 4


def test_a_limit_keeps_every_class_and_the_same_ids(tmp_path):
    path = write(tmp_path, "csv")
    task = open_task("documents")
    whole, part = task.load(path), task.load(path, limit=2)
    assert part.examples == whole.examples[:2]
    assert {example.label for example in part.examples} == {0, 1}


@pytest.mark.slow
def test_imdb_is_whole_from_25000_texts_on(tmp_path):
    rows = [json.dumps({"text": "fine", "label": row % 2}) + "\n" for row in range(25_000)]
    for split, count in (("test", 24_999), ("test", 25_000), ("train", 25_000)):
        path = tmp_path / f"{split}.jsonl"
        path.write_text("".join(rows[:count]))
        assert open_task("documents").load(path).subset == (count < 25_000)
    assert open_task("documents").load(path.rename(tmp_path / "mine.jsonl")).subset


def test_a_file_of_other_classes_is_whole_without_a_limit(tmp_path):
    path, task = write(tmp_path, "csv"), open_task("documents", labels="bad,good")
    path.write_text("text,label\na,bad\nb,good\n")
    assert [task.load(path, limit=limit).subset for limit in (None, 3, 2)] == [False, False, True]


def test_imdbs_own_folder_is_read(tmp_path):
    for name in ("neg", "pos"):
        folder = tmp_path / "aclImdb" / "test" / name
        folder.mkdir(parents=True)
        for number in (10, 2):
            (folder / f"{number}_7.txt").write_text(f"{name} {number}")
    split = open_task("documents").load(tmp_path)
    assert [(e.id, e.label) for e in split.examples][:2] == [("test/neg/10_7", 0), ("test/pos/10_7", 1)]
    assert len(split.examples) == 4


def test_other_columns_and_classes_are_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"body": "a", "genre": "news"}\n{"body": "b", "genre": "fiction"}\n')
    task = open_task("documents", labels=["fiction", "news"], columns={"text": "body", "label": "genre"})
    assert [(e.inputs["text"], e.label) for e in task.load(path).examples] == [("b", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "a", "label": "positive"}\n{"text"', "line 2 is not JSON"),
        (
            '{"text": "a", "label": "good"}\n',
            "line 1: unknown label 'good'. documents has negative or 0, positive or 1",
        ),
        ('{"text": "a"}\n', "line 1: no column label, or it is empty; the columns are text"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("\n", "0 rows in"),
    ],
    ids=["json", "label", "column", "object", "empty"],
)
def test_damaged_lines_are_named(tmp_path, text, words):
    (tmp_path / "test.jsonl").write_text(text)
    with pytest.raises(ApproxError, match=words) as caught:
        open_task("documents").load(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_damaged_archive_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ApproxError, match=r"looked for test{\.csv,\.tsv,\.jsonl.*found no \.csv"):
        open_task("documents").load(tmp_path)
    (tmp_path / "test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ApproxError, match="is damaged"):
        open_task("documents").load(tmp_path)
    with pytest.raises(ApproxError, match=r"is not a \.csv"):
        open_task("documents").load(Path(__file__))


@pytest.mark.parametrize("labels", [["one"], ["same", "same"]])
def test_rejects_labels_that_name_no_classes(labels):
    with pytest.raises(ApproxError, match="must name at least two different classes"):
        open_task("documents", labels=labels)


def test_imdb_is_read_whole(shared_data):
    split = open_task("documents").load(shared_data / "imdb", limit=20)
    assert sum(example.label for example in split.examples) == 10
    assert split.subset
