"""The folder that is damaged: a small example of every file that a user can hand to approx."""

import contextlib
import gzip
import json
import shutil
import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow
import pyarrow.parquet
import soundfile
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import Claim, Kind, atomic_folder, claim, keep_failed
from approx.conversion.convert import convert
from approx.evaluation.evaluate import Ledger
from approx.finetuning.finetune import finetune
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Interrupted
from approx.pipeline.run import search
from approx.pipeline.store import Stage, Store
from approx.planning.plan import Plan, Rule
from approx.progress import silent
from approx.searching.options import SearchStage
from approx.searching.search import FITTED, Search
from fuzz import calls
from fuzz.mutations import CANARY, OUTSIDE, SECRET, canary
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
# What the formats allow: cells that begin with quotes or are empty, and spaces and line ends that are part of words.
CSV = '\ufeff"text","label","id","group"\r\n"a ""good"" film,\r\nsaid he",l0,é,1\r\n\u00a0,l1,文,1\r\na\u2028b c\u00a0d \u0085,l0,r2,2'
TSV = 'text\tlabel\tid\tgroup\n"good" film\tl0\t"a\t1\n""\tl1\té\t1\nit\'s "so\tl0\tx"\t1\n\n\u3000a\u2028b c\u00a0d\tl1\t文\t2'
CONLL = (
    "-DOCSTART- -X- -X- O\n\nJim NNP I-NP B-X\na\u00a0b NN I-NP I-X\r\n. . O O\n\n\t\n\u2028x NN I-NP O\n\" '' O B-X"
)
TRAINING = FinetuneStage(task="glue/sst2", data="SST-2", recover=["task"], steps=2, batch_size=2, evaluate_every=1)
SEARCH = SearchStage(
    task="glue/sst2",
    data="SST-2",
    length=8,
    budget="loss<=90",
    heal="transfer",
    front=0,
    examples=12,
    proof=12,
    calibration=2,
    candidates=[Rule("linear", "all", {"feature_map": "hedgehog"})],
)
# Folder in `claimed` -> the purpose of its claim.
CLAIMED: dict[str, Kind] = {
    "out": "output",
    "out.failed": "failed",
    "out.tmp-1": "temporary",
    "out.training": "training",
    "plan-search": "search",
    "run": "run",
    "sweep": "sweep",
}
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
        shutil.copy(ROOT / "reports" / name / "report.json", place / f"{name}.json")
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
    _outside(place / "bert", place / OUTSIDE)
    _adapted(place / "bert", place / "adapted")
    _sentences(place / "bert", place / "sentences")
    _claimed(place / "claimed")
    # States of trainings and searches name their data.
    with contextlib.chdir(place):
        _begun()
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


def _outside(base: Path, folder: Path) -> None:
    """What nobody may read, though it could be: a whole checkpoint, code and a secret."""
    shutil.copytree(base, folder)
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16}), encoding="utf-8")
    (folder / "secret.json").write_bytes(SECRET)
    (folder / f"{CANARY}.py").write_bytes(canary())


def _adapted(base: Path, folder: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    made = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", modules_to_save=["classifier"])
    shutil.copytree(base, folder)
    peft.get_peft_model(model, made).save_pretrained(str(folder))
    (folder / "README.md").unlink()


def _sentences(base: Path, folder: Path) -> None:
    transformers.BertModel.from_pretrained(base).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    settings = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {
            "in_features": 16,
            "out_features": 4,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    }
    for name, data in settings.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(data), encoding="utf-8")


def _claimed(folder: Path) -> None:
    folder.mkdir()
    for name, kind in CLAIMED.items():
        place = folder / name
        if kind == "output":
            with atomic_folder(place, sealed=False) as made:
                (made / "mine.txt").write_text("mine", encoding="utf-8")
            continue
        if kind == "temporary":
            made = Claim(
                approx=True,
                kind="temporary",
                folder=name,
                boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            )
            place.mkdir()
            (place / ".approx-claim.json").write_text(made.model_dump_json(), encoding="utf-8")
        elif kind == "failed":
            (folder / "new").mkdir()
            keep_failed(folder / "new", folder / "out")
        else:
            claim(place, kind, kind)
        (place / "mine.txt").write_text("mine", encoding="utf-8")


def _begun() -> None:
    """States to continue from: of trainings that were stopped and that are done, and of a search."""
    for name, stopped in (("stopped", True), ("done", False)):
        model = transformers.AutoModelForSequenceClassification.from_pretrained("bert")

        def stop(what: str, done: int, total: int, stopped: bool = stopped) -> None:
            if stopped and " | " in what and done == 1:
                signal.raise_signal(signal.SIGINT)

        try:
            finetune(model, tiny_tokenizer(), TRAINING, folder=Path(name), progress=stop)
        except Interrupted:
            assert stopped
    base, folder = checkpoint.load("bert", offline=True), Path("searched")
    claim(folder, "search", "a search")
    # Fitting takes long, and a search goes on with what was fitted.
    begun = Search(base, SEARCH, folder, resume=False, seed=0, progress=silent)
    (one,) = begun.candidates
    model = begun.composer.make(begun.composer.everywhere(one)).model
    fitted = {
        f"{one.name}/{site.layer}/{key}": value
        for site in begun.facts.sites
        for key, value in model.base_model.get_submodule(site.path).mechanism.state_dict().items()
    }
    save_file(fitted, folder / FITTED, {"about": begun.about})
    search(base, SEARCH, None, folder=folder, resume=True)
    for more in ("search.json", "record.json"):
        Path("searched", more).unlink()
    shutil.rmtree("searched/report")


def _trained_on(folder: Path) -> None:
    lines = [f"the film is not {word}\t{row % 2}" for row, word in enumerate(("good", "bad", "dull", "fine", "long"))]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")


def _tables(folder: Path) -> None:
    folder.mkdir()
    lines = [",".join(TABLE[0]), *(",".join(map(str, row.values())) for row in TABLE)]
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "table.tsv").write_text("\n".join(lines).replace(",", "\t") + "\n", encoding="utf-8")
    for name, text in (("worst.csv", CSV), ("worst.tsv", TSV), ("worst.conll", CONLL)):
        (folder / name).write_bytes(text.encode())
    (folder / "wide.tsv").write_bytes(TSV.replace("\n", "\r\n").encode("utf-16"))
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
    flat = [{**one, "context": context, "answers": {"text": ["the film"], "answer_start": [0]}} for one in asked]
    (file.parent / "flat.json").write_text(json.dumps({"data": flat}), encoding="utf-8")


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

    Image.fromarray(np.full((24, 24), 40_000, np.uint16)).save(folder / "test" / "LABEL_0" / "deep.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (16, 24)).save(folder / "test" / "LABEL_1" / "turned.jpg", exif=turned)


def reader() -> Any:
    """The tokenizer for texts of the folder."""
    return tiny_tokenizer()
