"""The kinds of damaged files: which files they are, how they are damaged, and who reads them.

A reader may raise `ApproxError` and nothing else, and changes no file of the folder.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import ViTImageProcessor

from approx import api, grid, recipe
from approx.checkpoints import checkpoint
from approx.checkpoints.receipt import read_receipt
from approx.conversion.calibration_inputs import CalibrationFile
from approx.conversion.verify import verify
from approx.evaluation import record
from approx.evaluation.prediction_cache import Ledger
from approx.inspection import inspect, plan
from approx.pipeline import preflight, sweep
from approx.pipeline.store import Stage, Store
from approx.planning.plan import Plan
from approx.publishing.report import write_report
from approx.pushing import folder as pushing
from approx.seam.manifest import seal
from approx.tasks import open_task
from fuzz import calls, mutations
from fuzz.mutations import Mutation
from fuzz.place import reader


@dataclass(frozen=True)
class Kind:
    """A kind of damaged file.

    Attributes:
        targets: The files that are damaged, one at a time; patterns of the folder.
        mutate: Damages the content of one.
        read: Hands it to approx; the path is relative to the current folder, which is the place.
        share: Its part of the time.
        prepare: Makes the damage harder to see before it is read.
    """

    targets: tuple[str, ...]
    mutate: Mutation
    read: Callable[[Path], object]
    share: float = 1.0
    prepare: Callable[[Path], object] = lambda target: None


def _config(target: Path) -> None:
    api.load(target.parent, offline=True)


def _inspected(target: Path) -> None:
    inspect(str(target.parent), offline=True)
    plan(str(target.parent), Plan.of("local", left=2, right=2), [16], offline=True)


def _weights(target: Path) -> None:
    checkpoint.load(target.parent, offline=True, allow_pickle=True)


def _tokenizer(target: Path) -> None:
    read = checkpoint.processor(checkpoint.locate(target.parent, offline=True))
    if target.parent.name != "wav2vec2":
        example = open_task("glue/sst2").examples(Path("SST-2"), limit=1)[0]
        open_task("glue/sst2").encode(example, read, 16)


def _plan(target: Path) -> None:
    chosen = Plan.read(target)
    Plan.parse(json.loads(chosen.to_json()))
    for model in ("bert", "gpt2"):
        plan(model, chosen, [16, 64], offline=True)


def _recipe(target: Path) -> None:
    preflight.check(recipe.read(target), offline=True)


def _grid(target: Path) -> None:
    sweep.cells(grid.read(target), Path("out"), offline=True)


def _record(target: Path) -> None:
    made = record.load(target)
    try:
        write_report([made], Path("out"))
    finally:
        shutil.rmtree("out", ignore_errors=True)


def _classification(target: Path) -> None:
    task = open_task("text-classification", labels="l0,l1", columns={"id": "id", "group": "group"})
    for example in task.examples(target):
        task.encode(example, reader(), 16)


def _glue(target: Path) -> None:
    task = open_task("glue/sst2")
    encodings = [one for each in task.examples(target) for one in task.encode(each, reader(), 16)]
    task.collate(encodings, reader())


def _tagged(target: Path) -> None:
    task = open_task("token-classification", labels="O,B-X,I-X")
    for example in task.examples(target):
        task.encode(example, reader(), 16)


def _documents(target: Path) -> None:
    task = open_task("documents", labels="l0,l1")
    for example in task.examples(target):
        task.encode(example, reader(), 16)


def _squad(target: Path) -> None:
    task = open_task("squad", window=24, stride=4)
    for example in task.examples(target):
        task.encode(example, reader(), 24)


def _text(target: Path) -> None:
    task = open_task("lm")
    for example in task.examples(target):
        task.encode(example, reader(), 16)


def _speech(target: Path) -> None:
    task = open_task("librispeech/test-clean")
    for example in task.examples(Path("test-clean")):
        example.inputs["recording"].decoded(16_000)


def _language_model(target: Path) -> None:
    open_task("librispeech/test-clean", beams=2, ngram=str(target))


def _pictures(target: Path) -> None:
    task, read = (
        open_task("image-classification", labels="LABEL_0,LABEL_1"),
        ViTImageProcessor(size={"height": 24, "width": 24}),
    )
    task.collate([one for each in task.examples(Path("pictures")) for one in task.encode(each, read)], read)


def _calibration(target: Path) -> None:
    CalibrationFile.read(target, "input_values" if target.suffix in (".wav", ".flac") else "input_ids")


def _manifest(target: Path) -> None:
    checkpoint.load(target.parent, offline=True)


def _verified(target: Path) -> None:
    verify(target.parent, offline=True)


def _pushed(target: Path) -> None:
    read_receipt(target.parent)
    pushing.check(target.parent)


def _ledger(target: Path) -> None:
    Ledger(Path("cache"), "abcd").read()


def _outcome(target: Path) -> None:
    Store(Path("cache")).state(Stage("a", "abcd", lambda: None))


def _sealed(target: Path) -> None:
    seal(target.parent)


_CONFIGS = tuple(f"{name}/config.json" for name in ("bert", "gpt2", "wav2vec2", "vit", "whisper"))
_CONVERTED = ("converted/*",)
KINDS: dict[str, Kind] = {
    "config": Kind(_CONFIGS, mutations.of_json, _config, 3),
    "config, inspected": Kind(_CONFIGS, mutations.of_json, _inspected, 2),
    "safetensors": Kind(("bert/*.safetensors", "gpt2/*.safetensors"), mutations.of_safetensors, _weights, 2),
    "shards": Kind(("sharded/model*",), mutations.of_bytes, _weights),
    "index": Kind(("sharded/*.index.json",), mutations.of_json, _weights),
    "pickle": Kind(("pickled/pytorch_model.bin",), mutations.of_bytes, _weights),
    "tokenizer": Kind(("bert/token*.json", "gpt2/token*.json"), mutations.of_json, _tokenizer, 2),
    "speech processor": Kind(
        ("wav2vec2/*processor*.json", "wav2vec2/*token*.json", "wav2vec2/vocab.json"), mutations.of_json, _tokenizer
    ),
    "plan": Kind(("plan.yaml",), mutations.of_yaml, _plan, 2),
    "recipe": Kind(("recipe.yaml",), mutations.of_yaml, _recipe, 2),
    "grid": Kind(("grid.yaml",), mutations.of_yaml, _grid, 3),
    "record": Kind(("quickstart.json", "heal-positions.json"), mutations.of_json, _record, 2),
    "csv": Kind(("tables/*.csv", "tables/*.tsv"), mutations.of_lines, _classification),
    "tsv of GLUE": Kind(("SST-2/dev.tsv",), mutations.of_lines, _glue),
    "json": Kind(("tables/table.json",), mutations.of_json, _classification),
    "jsonl": Kind(("tables/table.jsonl",), mutations.of_jsonl, _classification),
    "gzip": Kind(("tables/table.jsonl.gz",), mutations.of_bytes, _classification),
    "parquet": Kind(("tables/table.parquet",), mutations.of_parquet, _classification, 2),
    "tags": Kind(("tables/tagged.jsonl",), mutations.of_jsonl, _tagged),
    "documents": Kind(("tables/table.jsonl",), mutations.of_jsonl, _documents),
    "SQuAD": Kind(("squad/dev-v1.1.json",), mutations.of_json, _squad, 2),
    "text": Kind(("text.txt",), mutations.of_bytes, _text),
    "recording": Kind(("test-clean/*/*/*.flac",), mutations.of_bytes, _speech, 2),
    "transcripts": Kind(("test-clean/*/*/*.txt",), mutations.of_lines, _speech),
    "language model": Kind(("words.arpa",), mutations.of_lines, _language_model),
    "picture": Kind(("pictures/test/*/*.png",), mutations.of_bytes, _pictures),
    "calibration file": Kind(("sound.wav", "text.txt"), mutations.of_bytes, _calibration, 0.5),
    "manifest": Kind(("converted/approx_manifest.json",), mutations.of_json, _manifest),
    "converted": Kind(_CONVERTED, mutations.of_any, _verified),
    "converted, sealed again": Kind(_CONVERTED, mutations.of_any, _verified, 2, _sealed),
    "config of converted, sealed again": Kind(("converted/config.json",), mutations.of_json, _verified, 3, _sealed),
    "to be pushed, sealed again": Kind(
        ("converted/*.json", "converted/README.md"), mutations.of_any, _pushed, 3, _sealed
    ),
    "arguments of ops": Kind(("calls/*.json",), mutations.of_call, calls.called, 2),
    "stored outputs": Kind(("cache/ab/abcd.0.jsonl",), mutations.of_jsonl, _ledger, 0.5),
    "stored stage": Kind(("cache/stages/abcd.json",), mutations.of_json, _outcome, 0.5),
}
"""Name -> kind."""
