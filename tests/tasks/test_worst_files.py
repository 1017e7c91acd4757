"""The worst legal file of every format is read as it was written, in every encoding, and no row is lost."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image

from approx.errors import ApproxError, Exit
from approx.tasks import TASKS, open_task, settings_of
from tiny_speech import sound

TEXTS = [
    '"a quote that nobody closes',
    'he said "yes"',
    'one that ends with a quote"',
    "no\u00a0break\u202fspaces\u3000here",
    "line\u2028and\u2029paragraph\u0085separators",
    "form\x0cfeed and\x1cfile separator",
    "a zero\x00byte",
    "\u00e9t\u00e9 \u0416\u4e2d\U0001f600",
    "x" * 200_000,
    "the last one",
]
WORDS = [text.replace(" ", "_") for text in TEXTS]


@dataclass(frozen=True)
class Format:
    """A kind of file of a task: how texts are written into it, and what is read back."""

    task: str
    name: str
    written: Callable[[list[str]], str]
    read: Callable[[Any], list[str]] = lambda examples: [one.inputs["text"] for one in examples]
    texts: list[str] = field(default_factory=lambda: TEXTS)
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task} {self.name}"


def tsv(header: str, row: str) -> Callable[[list[str]], str]:
    return lambda texts: "\n".join([*([header] if header else []), *(row.format(text) for text in texts)]) + "\n"


def comma(texts: list[str]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([["text", "label"], *([text, "a"] for text in texts)])
    return file.getvalue()


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "label": "a"}, ensure_ascii=False) + "\n" for text in texts)


def squad(texts: list[str]) -> str:
    asked = [
        {
            "context": text,
            "qas": [{"id": str(number), "question": "?", "answers": [{"text": text[:3], "answer_start": 0}]}],
        }
        for number, text in enumerate(texts)
    ]
    return json.dumps({"data": [{"title": "t", "paragraphs": asked}]}, ensure_ascii=False)


FLAT = {"question": "?", "answers": {"text": ["a"], "answer_start": [0]}}
NAMED = {"labels": "a,b"}
FORMATS = [
    Format("glue/sst2", "dev.tsv", tsv("sentence\tlabel", "{}\t1")),
    Format("glue/cola", "dev.tsv", tsv("", "x\t1\t\t{}")),
    Format("text-classification", "test.tsv", tsv("text\tlabel", "{}\ta"), settings=NAMED),
    Format("text-classification", "test.csv", comma, settings=NAMED),
    Format("text-classification", "test.jsonl", jsonl, settings=NAMED),
    Format("documents", "test.tsv", tsv("label\ttext", "a\t{}"), settings=NAMED),
    Format(
        "token-classification",
        "test.conll",
        lambda words: "".join(f"{word} x B-A\n" for word in words) + "\n",
        lambda examples: examples[0].inputs["words"],
        WORDS,
        {"labels": "O,B-A"},
    ),
    Format(
        "token-classification",
        "test.iob2",
        lambda words: "".join(f"{word}\tB-A\n" for word in words),
        lambda examples: examples[0].inputs["words"],
        WORDS,
        {"labels": "O,B-A"},
    ),
    Format("lm", "test.tsv", tsv("text\tn", "{}\t1"), settings={"stretch": 10**6}),
    Format("mlm", "test.jsonl", jsonl, settings={"stretch": 10**6}),
    Format(
        "lm",
        "test.txt",
        lambda texts: "\n".join(texts),
        lambda examples: examples[0].inputs["text"].split("\n"),
        settings={"stretch": 10**6},
    ),
    Format("squad", "dev.json", squad, lambda examples: [one.inputs["context"] for one in examples]),
    Format(
        "squad",
        "dev.jsonl",
        lambda texts: "".join(json.dumps(FLAT | {"context": text}, ensure_ascii=False) + "\n" for text in texts),
        lambda examples: [one.inputs["context"] for one in examples],
    ),
    Format(
        "squad_v2",
        "dev.tsv",
        tsv("context\tquestion\tanswers", "{}\t?\t"),
        lambda examples: [one.inputs["context"] for one in examples],
    ),
    Format(
        "listops",
        "basic_test.tsv",
        tsv("Source\tTarget", "[MAX {} 3 ]\t3"),
        lambda examples: [one.inputs["text"][5] for one in examples],
        ["1", "2"],
    ),
    Format(
        "librispeech/test-clean",
        "1-1.trans.txt",
        lambda texts: "".join(f"1-1-{n} {text}\n" for n, text in enumerate(texts)),
        lambda examples: [one.label for one in examples],
        [text.upper() for text in TEXTS if " " not in text[-2:]],
    ),
    Format(
        "image-classification",
        "test.tsv",
        tsv("image\tlabel", "one.png\t{}"),
        lambda examples: [f"c{one.label}\u00a0\u2028" for one in examples],
        ["c0\u00a0\u2028", "c1\u00a0\u2028"],
        {"labels": ["c0\u00a0\u2028", "c1\u00a0\u2028"]},
    ),
]


def written(folder: Path, kind: Format, content: bytes) -> Path:
    """Write a file, and what its rows name; the path to give as data."""
    path = folder / kind.name
    path.write_bytes(content)
    if kind.task.startswith("librispeech"):
        for number in range(len(kind.texts)):
            soundfile.write(folder / f"1-1-{number}.flac", sound(0.2), 16_000)
        return folder
    Image.new("RGB", (4, 4)).save(folder / "one.png")
    return path


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_the_worst_legal_file_of_a_format_is_read_as_it_was_written(kind, tmp_path):
    plain = kind.written(kind.texts)
    for number, (text, encoding, settings) in enumerate(
        [
            (plain, "utf-8", {}),
            (plain.rstrip("\n"), "utf-8", {}),
            (plain.replace("\n", "\r\n"), "utf-8-sig", {}),
            (plain, "utf-16", {}),
            (plain, "utf-32", {}),
            (plain, "utf-16-le", {"encoding": "utf-16-le"}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        split = open_task(kind.task, **kind.settings | settings).load(written(folder, kind, text.encode(encoding)))
        assert sorted(kind.read(split.examples)) == sorted(kind.texts), encoding
        assert split.tally is None or (split.tally.read, +split.tally.skipped) == (len(split.examples), {}), encoding


def test_every_task_that_reads_files_is_tried():
    tried = {kind.task.partition("/")[0] for kind in FORMATS}
    reading = {name.partition("/")[0] for name in TASKS if "encoding" in settings_of(name)}
    assert reading == tried


# The words of ListOps are known, and pictures have none.
WITH_TEXT = [kind for kind in FORMATS if kind.task not in ("listops", "image-classification")]


@pytest.mark.parametrize("kind", WITH_TEXT, ids=str)
def test_another_encoding_is_named_with_its_remedy(kind, tmp_path):
    texts = [f"caf\u00e9_{number}" for number in range(3)]
    (tmp_path / "a").mkdir()
    latin = written(tmp_path / "a", kind, kind.written(texts).encode("cp1252"))
    with pytest.raises(
        ApproxError, match=r"byte 0xe9 is not UTF-8; in cp1252 .*caf\u00e9.*--set encoding=cp1252"
    ) as caught:
        open_task(kind.task, **kind.settings).load(latin)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert "ownload" not in str(caught.value)
    split = open_task(kind.task, **kind.settings, encoding="cp1252").load(latin)
    assert [one.casefold() for one in kind.read(split.examples)] == texts


@pytest.mark.parametrize("wide", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_named(tmp_path, wide):
    (tmp_path / "dev.tsv").write_bytes("sentence\tlabel\nso good\t1\n".encode(wide))
    with pytest.raises(ApproxError, match=f"seems to be UTF-16 without a byte order mark.*encoding={wide}"):
        open_task("glue/sst2").load(tmp_path / "dev.tsv")
    assert len(open_task("glue/sst2", encoding=wide).load(tmp_path / "dev.tsv").examples) == 1


def test_an_unknown_encoding_is_refused():
    for wrong in ("klingon", "base64", 8):
        with pytest.raises(
            ApproxError, match=r"'encoding' of the task 'glue/sst2' .*; allowed is the name of an encoding"
        ):
            open_task("glue/sst2", encoding=wrong)


CELLS = [["text", "label"], ["a\ttab", "a"], ['two "quoted"\nlines', "b"], ["plain", "a"]]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_tsv_that_a_program_quoted_is_read_as_csv(tmp_path, quoting):
    with (tmp_path / "test.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows(CELLS)
    split = open_task("text-classification", **NAMED).load(tmp_path / "test.tsv")
    assert sorted(one.inputs["text"] for one in split.examples) == sorted(text for text, _ in CELLS[1:])
    assert split.tally is not None
    assert split.tally.read == 3


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('text\tlabel\n"all\ta\n"but\tb\n', ['"all', '"but']),
        # The quote of the second row closes that of the first by chance.
        ('text\tlabel\n"one\ta\ntwo"\tb\n', ['"one', 'two"']),
        ('text\tlabel\n"Great!"\ta\nbad\tb\n', ['"Great!"', "bad"]),
        ('text\tlabel\n"say ""no"""\ta\nbad\tb\n', ['say "no"', "bad"]),
        ('text\tlabel\n""\ta\nbad\tb\n', ['""', "bad"]),
    ],
)
def test_quotes_in_a_tsv_are_part_of_the_text_unless_all_are_of_csv(tmp_path, content, texts):
    (tmp_path / "test.tsv").write_text(content)
    split = open_task("text-classification", **NAMED).load(tmp_path / "test.tsv")
    assert [one.inputs["text"] for one in split.examples] == texts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("test.csv", 'text,label\nfine,a\n"open,b\nlost,a\n', r"test\.csv, line 3 is not CSV"),
        ("test.csv", 'text,label\n"he said" no,b\n', "line 2 is not CSV"),
        ("test.csv", "text,label\nso, so,b\n", "line 2: 3 cells where the first line has 2"),
        ("test.csv", "text,text,label\na,b,c\n", "two columns 'text'"),
        ("test.tsv", "text\tlabel\nso\tso\tb\n", "line 2: 3 cells where the first line has 2"),
        ("test.tsv", 'text\n"one or\ntwo rows"\n', "line 2: a cell begins with a quote that is closed on a later line"),
        ("test.jsonl", '{"text": ["a"], "label": "a"}', r"line 1: a text is needed, found \['a'\]"),
    ],
)
def test_never_drops_rows_silently(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    task = open_task("lm") if content.startswith("text\n") else open_task("text-classification", **NAMED)
    with pytest.raises(ApproxError, match=words) as caught:
        task.load(tmp_path / name)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_rows_are_counted(tmp_path):
    (tmp_path / "test.tsv").write_text("text\tlabel\n\nfine\ta\n\n\nbad\tb\n")
    tally = open_task("text-classification", **NAMED).load(tmp_path / "test.tsv").tally
    assert tally is not None
    assert (tally.read, +tally.skipped) == (2, {"empty lines": 3})
