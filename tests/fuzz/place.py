"""The folder that is damaged: a small example of every file that a user can hand to approx."""

import gzip
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import soundfile
import torch
from safetensors.torch import load_file

from approx.conversion.convert import convert
from approx.evaluation.prediction_cache import Ledger
from approx.pipeline.store import Stage, Store
from approx.planning.plan import Plan
from fuzz import calls
from tiny_classifier import tiny_tokenizer
from tiny_decoder import save, tiny_gpt2
from tiny_speech import recogniser, some_utterances, sound, speech_processor, write_utterances
from tiny_study import SENTENCES, small_recipe, tiny_checkpoint, tiny_data
from zoo import tiny

ROOT = Path(__file__).resolve().parents[2]
PLAN = """rules:
  - {mechanism: improved-clustered, layers: all, settings: {clusters: 4, topk: 8}}
  - {mechanism: local, layers: "1", heads: "0", settings: {left: 2, right: 2}}
  - {mechanism: sdpa, layers: -1}
"""
GRID = """title: A grid
checkpoint: bert
variants:
  local: {mechanism: local, grid: {left: [1, 2], right: [2]}}
  drawn: [{mechanism: performer, layers: 0, grid: {features: [8, 16]}}, {mechanism: linear, layers: 1}]
seeds: [0, 1]
evaluate: {task: glue/sst2, data: SST-2, margin: 0.1, limit: 4}
bench: {lengths: [8, 16], rounds: 3, seconds: 0}
heal: {task: glue/sst2, data: SST-2, recover: task, steps: 2}
device: cpu
"""
TABLE = [{"text": text, "label": f"l{row % 2}", "id": f"r{row}", "group": row} for row, text in enumerate(SENTENCES)]
TAGGED = [{"tokens": text.split(), "tags": ["B-X", *["O"] * text.count(" ")]} for text in SENTENCES]
ARPA = """\\data\\
ngram 1=4
ngram 2=1

\\1-grams:
-1.0\t<unk>
-1.0\t<s>\t-0.3
-1.0\t</s>
-0.5\tHELLO\t-0.2

\\2-grams:
-0.2\t<s> HELLO

\\end\\
"""


def made(place: Path) -> Path:
    """Make the folder."""
    tiny_checkpoint(place / "bert")
    save(tiny_gpt2(), place / "gpt2")
    _speech(place / "wav2vec2")
    tiny("ViTForImageClassification").save_pretrained(place / "vit")
    tiny("WhisperForConditionalGeneration").save_pretrained(place / "whisper")
    tiny("BertForSequenceClassification").save_pretrained(place / "sharded", max_shard_size="40KB")
    _pickled(place / "bert", place / "pickled")
    convert(place / "bert", place / "converted", Plan.of("local", layers="0", left=2, right=2), offline=True)
    _trained_on(tiny_data(place))
    small_recipe(place / "recipe.yaml", Path("bert"), Path("SST-2"))
    (place / "plan.yaml").write_text(PLAN, encoding="utf-8")
    (place / "grid.yaml").write_text(GRID, encoding="utf-8")
    for name in ("quickstart", "heal-positions"):
        shutil.copy(ROOT / "reports" / "records" / f"{name}.json", place / f"{name}.json")
    _tables(place / "tables")
    _squad(place / "squad" / "dev-v1.1.json")
    (place / "text.txt").write_text("\n".join(SENTENCES * 4), encoding="utf-8")
    (place / "words.arpa").write_text(ARPA, encoding="utf-8")
    write_utterances(place / "test-clean", some_utterances(2))
    calls.write(place / "calls")
    soundfile.write(place / "sound.wav", sound(0.4), 16_000)
    _pictures(place / "pictures")
    (place / "cache" / "stages").mkdir(parents=True)
    Ledger(place / "cache", "abcd").write(0, [1, 0])
    Store(place / "cache").keep(Stage("a", "abcd", lambda: None), result={"a": [1, 2]})
    (place / "kept").mkdir()
    (place / "kept" / "mine.txt").write_text("mine", encoding="utf-8")
    return place


def _speech(folder: Path) -> None:
    recogniser().save_pretrained(folder)
    speech_processor(folder).save_pretrained(folder)


def _pickled(base: Path, folder: Path) -> None:
    shutil.copytree(base, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _trained_on(folder: Path) -> None:
    lines = [f"the film is not {word}\t{row % 2}" for row, word in enumerate(("good", "bad", "dull", "fine", "long"))]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")


def _tables(folder: Path) -> None:
    folder.mkdir()
    lines = [",".join(TABLE[0]), *(",".join(map(str, row.values())) for row in TABLE)]
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "table.tsv").write_text("\n".join(lines).replace(",", "\t") + "\n", encoding="utf-8")
    (folder / "table.json").write_text(json.dumps({"data": TABLE}), encoding="utf-8")
    for name, rows in (("table", TABLE), ("tagged", TAGGED)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "table.jsonl.gz").write_bytes(gzip.compress((folder / "table.jsonl").read_bytes(), mtime=0))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), folder / "table.parquet")


def _squad(file: Path) -> None:
    context = "the film is good"
    asked: list[dict[str, Any]] = [
        {"id": f"q{n}", "question": "what is good", "answers": [{"text": "the film", "answer_start": 0}]} for n in "12"
    ]
    file.parent.mkdir()
    article = {"title": "Films", "paragraphs": [{"context": context, "qas": asked}]}
    file.write_text(json.dumps({"version": "1.1", "data": [article]}), encoding="utf-8")


def _pictures(folder: Path) -> None:
    """Two PNG files, written by hand: their chunks are not compressed by a library whose version matters."""
    for label, shade in (("LABEL_0", 30), ("LABEL_1", 200)):
        rows = b"".join(b"\0" + bytes([shade]) * 24 for _ in range(24))
        parts = (
            (b"IHDR", struct.pack(">IIBBBBB", 24, 24, 8, 0, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
        chunks = [struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts]
        (folder / "test" / label).mkdir(parents=True)
        (folder / "test" / label / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def reader() -> Any:
    """The tokenizer for texts of the folder."""
    return tiny_tokenizer()
