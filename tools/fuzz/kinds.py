"""The kinds of damaged files: which files they are, how they are damaged, and who reads them.

A reader may raise `ApproxError` and nothing else, and changes no file of the folder. What comes from others leads it to
no file outside of its folder, and none of their code is run.
"""

import contextlib
import copy
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import ViTImageProcessor

from approx import api, grid, recipe
from approx.checkpoints import checkpoint
from approx.checkpoints.atomic_folder import CLAIM, atomic_folder, claim, keep_failed, remove
from approx.checkpoints.foreign import code_files, references
from approx.checkpoints.manifest import seal
from approx.conversion import convert
from approx.conversion.calibration import CalibrationFile
from approx.conversion.verify import verify
from approx.errors import ApproxError
from approx.evaluation import record
from approx.evaluation.evaluate import Ledger
from approx.finetuning.finetune import finetune
from approx.inspection import inspect, plan
from approx.pipeline import run, sweep
from approx.pipeline.store import Stage, Store
from approx.planning.plan import Plan
from approx.progress import silent
from approx.publishing.report import write_report
from approx.pushing.push import push
from approx.searching.search import Search
from approx.tasks import open_task
from fuzz import calls, mutations
from fuzz.mutations import CANARY, OUTSIDE, SECRET, Mutation
from fuzz.place import CLAIMED, SEARCH, TRAINING, reader


@dataclass(frozen=True)
class Kind:
    """A kind of damaged file.

    Attributes:
        targets: The files that are damaged, one at a time; patterns of the folder.
        mutate: Damages the content of one.
        read: Hands it to approx; the path is relative to the current folder, which is the place.
        share: Its part of the time.
        prepare: Makes the damage harder to see before it is read.
        added: Names of files that the folder of a target has not, and may be given.
        roams: Whether the paths in it are the user's own, and may lead anywhere.
    """

    targets: tuple[str, ...]
    mutate: Mutation
    read: Callable[[Path], object]
    share: float = 1.0
    prepare: Callable[[Path], object] = lambda target: None
    added: tuple[str, ...] = ()
    roams: bool = False


def _folder(target: Path) -> Path:
    """The checkpoint of a file, which may be in a folder below it."""
    return Path(target.parts[0])


@contextlib.contextmanager
def _scratch(name: str = "out") -> Iterator[Path]:
    """A folder that need not be there afterwards."""
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _config(target: Path) -> None:
    api.load(_folder(target), offline=True)


def _inspected(target: Path) -> None:
    inspect(str(_folder(target)), offline=True)
    plan(str(_folder(target)), Plan.of("local", left=2, right=2), [16], offline=True)


def _weights(target: Path) -> None:
    checkpoint.load(_folder(target), offline=True, allow_pickle=True)


def _tokenizer(target: Path) -> None:
    read = checkpoint.processor(checkpoint.locate(_folder(target), offline=True))
    if _folder(target).name != "wav2vec2":
        example = open_task("glue/sst2").examples(Path("SST-2"), limit=1)[0]
        open_task("glue/sst2").encode(example, read, 16)


def _plan(target: Path) -> None:
    chosen = Plan.read(target)
    Plan.parse(json.loads(chosen.to_json()))
    for model in ("bert", "gpt2"):
        plan(model, chosen, [16, 64], offline=True)


def _recipe(target: Path) -> None:
    run.check(recipe.read(target), offline=True)


def _grid(target: Path) -> None:
    sweep.cells(grid.read(target), Path("out"), offline=True)


def _record(target: Path) -> None:
    made = record.load(target)
    with _scratch() as out:
        write_report([made], out)


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
    checkpoint.load(_folder(target), offline=True)


def _verified(target: Path) -> None:
    verify(_folder(target), offline=True)


def _pushed(target: Path) -> None:
    with _scratch() as out:
        push(_folder(target), "me/model", dry_run=out, offline=True)
        _nothing_foreign(out, code=False)


def _planted(target: Path) -> None:
    """Put foreign code beside the damage, for names to lead to it."""
    for place in (_folder(target), _folder(target) / "sub"):
        place.mkdir(exist_ok=True)
        shutil.copy(Path(OUTSIDE, f"{CANARY}.py"), place)


def _planted_and_sealed(target: Path) -> None:
    _planted(target)
    _sealed(target)


def _certified(target: Path) -> None:
    folder = _folder(target)
    _tokenizer(target)
    checkpoint.load(folder, offline=True)
    made = verify(folder, offline=True)
    assert any(one.passed is False for one in made.checks), "verify certifies a folder with foreign code"
    with contextlib.suppress(ApproxError), _scratch() as out:
        push(folder, "me/model", dry_run=out, offline=True)
        raise AssertionError("a folder with foreign code is pushed")


def _companions(target: Path) -> None:
    """Copy what a conversion takes along, without foreign code and with it."""
    source = checkpoint.locate(_folder(target), offline=True)
    checkpoint.processor(source)
    for carried in ({}, convert.code_to_carry(source, None)):
        with _scratch() as out:
            out.mkdir()
            convert.copy_companions(source, out, carried)
            _nothing_foreign(out, code=not carried)


def _nothing_foreign(out: Path, *, code: bool) -> None:
    """Check that a folder that was written holds nothing from outside, and unless it was asked for no foreign code."""
    copied = [path for path in out.rglob("*") if path.is_symlink() or (path.is_file() and SECRET in path.read_bytes())]
    assert not copied, copied
    if code:
        assert not code_files(out)
        assert not references(out)


def _adapter(target: Path) -> None:
    checkpoint.load(_folder(target), offline=True, merge_adapter=True)


@functools.cache
def _base() -> Any:
    return checkpoint.load("bert", offline=True)


def _resumed(target: Path) -> None:
    base = _base()
    with _scratch("work") as work:
        shutil.copytree(_folder(target), work, symlinks=True)
        try:
            finetune(copy.deepcopy(base.model), checkpoint.processor(base.source), TRAINING, folder=work, resume=True)
        except ApproxError:
            # It was not changed, to be continued once the damage is repaired.
            assert _contents(work) == _contents(_folder(target))
            raise


def _searched_on(target: Path) -> None:
    with _scratch("work") as work:
        shutil.copytree(_folder(target), work, symlinks=True)
        Search(_base(), SEARCH, work, resume=True, seed=0, progress=silent).damages()


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _claims(target: Path) -> None:
    """Do in a copy what commands do to folders of theirs: what has no whole claim stays, with all that is in it."""
    with _scratch("work") as work:
        shutil.copytree("claimed", work, symlinks=True)
        damaged = work.joinpath(*target.parts[1:-1])
        ours = _is_claim(damaged)
        out, refused = work / "out", None
        for name, kind in CLAIMED.items():
            if kind in ("training", "search"):
                remove(work / name, kind)
                (work / name).mkdir(exist_ok=True)
            with contextlib.suppress(ApproxError):
                claim(work / name, kind, kind)
        try:
            with atomic_folder(out, force=True, sealed=False) as made:
                (made / "new.txt").write_text("new", encoding="utf-8")
        except ApproxError as error:
            refused = error
        (work / "new").mkdir()
        keep_failed(work / "new", out)
        assert ours or (damaged / "mine.txt").read_text("utf-8") == "mine", f"{damaged} was not ours"
    if refused is not None:
        raise refused


def _is_claim(folder: Path) -> bool:
    """Whether a folder of the place holds a claim for its purpose, read without approx."""
    try:
        said = json.loads((folder / CLAIM).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(said, dict) or said.get("kind") != CLAIMED[folder.name]:
        return False
    # What is left of these kinds is known by its name too, and an output has only what was written.
    named = said["kind"] not in ("temporary", "failed") or said.get("folder") == folder.name
    files = said.get("files", [])
    return named and (said["kind"] != "output" or (isinstance(files, list) and "mine.txt" in files))


def _ledger(target: Path) -> None:
    Ledger(Path("cache"), "abcd").read()


def _outcome(target: Path) -> None:
    Store(Path("cache")).state(Stage("a", "abcd", lambda: None))


def _sealed(target: Path) -> None:
    seal(_folder(target))


_CONFIGS = tuple(f"{name}/config.json" for name in ("bert", "gpt2", "wav2vec2", "vit", "whisper"))
_CONVERTED = ("converted/*",)
_ADDED = (
    *(f"{CANARY}.py", f"sub/{CANARY}.py", f"sub/{CANARY}.PY", f"{CANARY}.so", "x.pth", "sub/__init__.py", "conftest.py", "torch.py"),
    *("sitecustomize.py", "custom_generate/generate.py", "additional_chat_templates/x.jinja", "chat_template.jinja", "handler.py"),
    *("modules.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json"),
    *("1_Pooling/config.json", "adapter_config.json", "config_sentence_transformers.json", "tokenizer_module.json"),
)  # fmt: skip  # a table, read by rows
KINDS: dict[str, Kind] = {
    "config": Kind(_CONFIGS, mutations.of_json, _config, 3, added=_ADDED),
    "config, inspected": Kind(_CONFIGS, mutations.of_json, _inspected, 2),
    "safetensors": Kind(("bert/*.safetensors", "gpt2/*.safetensors"), mutations.of_safetensors, _weights, 2),
    "shards": Kind(("sharded/model*",), mutations.of_bytes, _weights),
    "index": Kind(("sharded/*.index.json",), mutations.of_json, _weights),
    "pickle": Kind(("pickled/pytorch_model.bin",), mutations.of_bytes, _weights),
    "tokenizer": Kind(("bert/token*.json", "gpt2/token*.json"), mutations.of_json, _tokenizer, 2),
    "speech processor": Kind(
        ("wav2vec2/*processor*.json", "wav2vec2/*token*.json", "wav2vec2/vocab.json"), mutations.of_json, _tokenizer
    ),
    "plan": Kind(("plan.yaml",), mutations.of_yaml, _plan, 2, roams=True),
    "recipe": Kind(("recipe.yaml",), mutations.of_yaml, _recipe, 2, roams=True),
    "grid": Kind(("grid.yaml",), mutations.of_yaml, _grid, 3, roams=True),
    "record": Kind(("quickstart.json", "heal-positions.json"), mutations.of_json, _record, 2),
    "csv": Kind(("tables/*.csv", "tables/*.tsv"), mutations.of_lines, _classification, roams=True),
    "tsv of GLUE": Kind(("SST-2/dev.tsv",), mutations.of_lines, _glue, roams=True),
    "json": Kind(("tables/table.json",), mutations.of_json, _classification, roams=True),
    "jsonl": Kind(("tables/table.jsonl",), mutations.of_jsonl, _classification, roams=True),
    "gzip": Kind(("tables/table.jsonl.gz",), mutations.of_bytes, _classification, roams=True),
    "parquet": Kind(("tables/table.parquet",), mutations.of_parquet, _classification, 2, roams=True),
    "conll": Kind(("tables/worst.conll",), mutations.of_lines, _tagged, roams=True),
    "tags": Kind(("tables/tagged.jsonl",), mutations.of_jsonl, _tagged, roams=True),
    "documents": Kind(("tables/table.jsonl",), mutations.of_jsonl, _documents, roams=True),
    "SQuAD": Kind(("squad/*.json",), mutations.of_json, _squad, 2, roams=True),
    "text": Kind(("text.txt",), mutations.of_bytes, _text, roams=True),
    "recording": Kind(("test-clean/*/*/*.flac",), mutations.of_bytes, _speech, 2, roams=True),
    "transcripts": Kind(("test-clean/*/*/*.txt",), mutations.of_lines, _speech, roams=True),
    "language model": Kind(("words.arpa",), mutations.of_lines, _language_model, roams=True),
    "picture": Kind(("pictures/test/*/*",), mutations.of_bytes, _pictures, roams=True),
    "calibration file": Kind(("sound.wav", "text.txt"), mutations.of_bytes, _calibration, 0.5, roams=True),
    "manifest": Kind(("converted/approx_manifest.json",), mutations.of_json, _manifest),
    "converted": Kind(_CONVERTED, mutations.of_any, _verified, added=_ADDED),
    "converted, sealed again": Kind(_CONVERTED, mutations.of_any, _verified, 2, _sealed, _ADDED),
    "converted, with foreign code": Kind(
        ("converted/*.json",), mutations.of_json, _certified, 2, _planted_and_sealed, _ADDED
    ),
    "base with foreign code": Kind(
        ("bert/*.json", "sentences/*.json", "sentences/*/*.json"), mutations.of_json, _companions, 2, _planted, _ADDED
    ),
    "modules": Kind(("sentences/modules.json",), mutations.of_json, _companions, added=_ADDED),
    "adapter": Kind(("adapted/adapter_*",), mutations.of_adapter, _adapter, added=_ADDED),
    "config of converted, sealed again": Kind(("converted/config.json",), mutations.of_json, _verified, 3, _sealed),
    "to be pushed, sealed again": Kind(
        ("converted/*.json", "converted/README.md"), mutations.of_any, _pushed, 3, _sealed, _ADDED
    ),
    "manifest to be pushed": Kind(("converted/approx_manifest.json",), mutations.of_json, _pushed),
    "arguments of ops": Kind(("calls/*.json",), mutations.of_call, calls.called, 2, roams=True),
    "stored outputs": Kind(("cache/ab/abcd.0.jsonl",), mutations.of_jsonl, _ledger, 0.5, roams=True),
    "claim": Kind(tuple(f"claimed/{name}/{CLAIM}" for name in CLAIMED), mutations.of_json, _claims),
    "finished training": Kind(
        ("done/training.json", f"done/{CLAIM}", "done/0-task/finished.json", "done/0-task/finished.safetensors"),
        mutations.of_any,
        _resumed,
    ),
    "stopped training": Kind(
        ("stopped/training.json", f"stopped/{CLAIM}", "stopped/*/checkpoint-1/*"), mutations.of_any, _resumed, 3
    ),
    "search": Kind(("searched/*.json", "searched/fitted.safetensors"), mutations.of_any, _searched_on, 2),
    "stored stage": Kind(("cache/stages/abcd.json",), mutations.of_json, _outcome, 0.5, roams=True),
}
"""Name -> kind."""
