"""Tables of every format and hub datasets hold the same examples for any task; columns are named once."""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import approx
from approx.errors import ApproxError, Exit
from approx.tasks import open_task, table
from tiny_classifier import tiny_model, tiny_tokenizer

ROWS = [
    {"review": "the film is good", "stars": "fine", "who": "ann"},
    {"review": "a film, so\nbad", "stars": "dull", "who": "bob"},
    {"review": "not very good", "stars": "1", "who": "ann"},
]
COLUMNS = {"text": "review", "label": "stars"}


def write(folder: Path, kind: str) -> Path:
    path = folder / f"mine.{kind}"
    if kind.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return path
    if kind.startswith("jsonl"):
        text = "\n".join(map(json.dumps, ROWS))
    elif kind.startswith("json"):
        text = json.dumps({"data": ROWS} if kind.endswith("gz") else ROWS)
    else:
        comma = "\t" if kind == "tsv" else ","
        text = "\n".join(comma.join(f'"{cell}"' for cell in row) for row in [ROWS[0], *(row.values() for row in ROWS)])
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    return path


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "jsonl", "json", "json.gz", "parquet"])
def test_every_format_holds_the_same_examples(tmp_path, kind):
    task = open_task("text-classification", labels="dull,fine", columns={**COLUMNS, "group": "who"})
    split = task.load(write(tmp_path, kind))
    # The classes take turns.
    assert [(one.id, one.inputs["text"], one.label, one.group) for one in split.examples] == [
        ("mine-1", ROWS[1]["review"], 0, "bob"),
        ("mine-0", ROWS[0]["review"], 1, "ann"),
        ("mine-2", ROWS[2]["review"], 1, "ann"),
    ]
    assert (split.name, split.subset) == ("mine", False)
    assert task.load(write(tmp_path, kind), limit=2).subset


def test_any_text_task_reads_a_table(tmp_path):
    path = write(tmp_path, "csv")
    joined = open_task("lm", columns={"text": "review"}, join=True).load(path).examples[0].inputs["text"]
    assert joined == "".join(row["review"] + "\n" for row in ROWS)
    pairs = open_task("glue/stsb", columns={"text": "review", "text_pair": "who", "label": "score"})
    path.write_text("review,who,score\na,b,2.5\n")
    assert [(one.inputs, one.label) for one in pairs.load(path).examples] == [({"text": "a", "text_pair": "b"}, 2.5)]
    path.write_text("review,who,score\na,b,nan\n")
    with pytest.raises(ApproxError, match="line 2: the score 'nan' is not a finite number"):
        pairs.load(path)


def test_classes_come_from_the_checkpoint_unless_they_are_named(tmp_path):
    path = tmp_path / "test.csv"
    path.write_text("text,label\nthe film is good,GOOD\nthe film is bad,BAD\nfine,1\n")
    model, tokenizer = tiny_model(2, ["BAD", "GOOD"]), tiny_tokenizer()
    entry = approx.evaluate(model, "text-classification", processor=tokenizer, data=str(path)).quality[0]
    assert (entry.examples, entry.task) == (3, "text-classification")
    path.write_text("text,label\nthe film is good,yes\nfine,no\n")
    with pytest.raises(ApproxError, match=r"unknown label 'yes'.*BAD or 0, GOOD or 1\. Name the classes of the data"):
        approx.evaluate(model, "text-classification", processor=tokenizer, data=str(path))
    settings = {"labels": "no,yes"}
    made = approx.evaluate(model, "text-classification", processor=tokenizer, data=str(path), settings=settings)
    assert made.quality[0].examples == 2
    with pytest.raises(ApproxError, match="classification has 3 outputs"):
        approx.evaluate(
            model, "text-classification", processor=tokenizer, data=str(path), settings={"labels": "no,yes,x"}
        )


def test_a_hub_dataset_is_read_with_the_names_of_its_classes(monkeypatch, tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    stored = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}, features=features)
    asked = []

    def load(*words, **options):
        asked.append((*words, options))
        return stored.to_iterable_dataset() if options["streaming"] else stored

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("approx.tasks.hub.reachable", lambda endpoint: False)
    task = open_task("text-classification", labels="neg,pos")
    for streaming in (False, True):
        split = task.load(Path("hub:me/reviews:plain"), "validation", streaming=streaming)
        assert [(one.inputs["text"], one.label) for one in split.examples] == [("b", 0), ("a", 1), ("c", 1)]
    assert asked[0] == ("me/reviews", "plain", {"split": "validation", "streaming": False})
    assert [one.inputs["text"] for one in open_task("lm").load(Path("hub:me/reviews")).examples] == ["a", "b", "c"]
    assert asked[-1][:2] == ("me/reviews", None)
    stored = stored.map(lambda row: {**row, "label": -1})
    with pytest.raises(ApproxError, match="me/reviews, test, row 0: no column label, or it is empty"):
        task.load(Path("hub:me/reviews"))


@pytest.mark.parametrize(
    ("task", "columns", "words"),
    [
        ("needle", {"text": "a"}, "'needle' reads no tables"),
        ("text-classification", {"txt": "a"}, "reads no column 'txt'. Did you mean 'text'"),
        ("text-classification", ["text"], "must be names"),
    ],
)
def test_wrong_columns_are_refused(task, columns, words):
    with pytest.raises(ApproxError, match=words) as caught:
        open_task(task, columns=columns)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[", "is not JSON"),
        ("a.json", b'{"a": 1}', "is not a list of rows"),
        ("a.json", b"[1]", "line 1 is not a JSON object"),
        ("a.parquet", b"PAR1", "is damaged"),
        ("a.csv", b"\xff\xfe", "0 rows in"),
        ("a.csv", b"text,label\n", "0 rows in"),
        ("a.csv", b"text,label\na\n", "line 2: no column label, or it is empty"),
    ],
)
def test_damaged_tables_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ApproxError, match=words) as caught:
        open_task("text-classification", labels="a,b").load(tmp_path / name)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_data_are_needed(tmp_path):
    with pytest.raises(ApproxError, match="has no data set"):
        open_task("text-classification").load()
    with pytest.raises(ApproxError, match="but no table"):
        open_task("glue/sst2", columns={"text": "a"}).load()
    assert not table.is_hub(tmp_path)
