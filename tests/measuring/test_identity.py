"""The keys of stored outputs: they change with everything that outputs depend on."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from approx import api
from approx.checkpoints import checkpoint
from approx.conversion import surgery
from approx.measuring.measure import code, companions_sha256, computed_by, examples_read, identity, what_computes
from approx.planning.plan import Plan
from approx.tasks import open_task
from approx_kernels.cpu.compile import load
from c_sources import needs_compiler
from tiny_classifier import tiny_model
from tiny_study import tiny_checkpoint, tiny_data
from zoo import tiny


@pytest.fixture
def again():
    """Clear the cached compiler check before and after the test."""
    load.cache_clear()
    yield load.cache_clear
    load.cache_clear()


@needs_compiler
def test_outputs_of_compiled_code_are_not_taken_for_those_of_pytorch(tmp_path, monkeypatch, again, own_cache):
    base, data = str(tiny_checkpoint(tmp_path / "base")), str(tiny_data(tmp_path))

    def ledgers() -> int:
        api.evaluate(base, "glue/sst2", data=data, device="cpu")
        return len(list((own_cache / "outputs").rglob("*.jsonl")))

    assert (ledgers(), ledgers()) == (1, 1)
    monkeypatch.setenv("APPROX_COMPILE_C", "0")
    again()
    assert (ledgers(), ledgers()) == (2, 2)


def opened(model: Any, sha256: str = "a") -> checkpoint.Checkpoint:
    """A checkpoint with only a model and the hash of its weights."""
    nowhere = checkpoint.Source("a", Path(), None, {}, model.config, type(model), converted=False)
    return checkpoint.Checkpoint(nowhere, model, sha256)


def test_identity_follows_outputs_and_not_the_folders_name():
    model = tiny_model(2)
    known = identity(opened(model))
    other = copy.deepcopy(model)
    other.config._name_or_path = "elsewhere"
    assert identity(opened(other)) == known
    other.config.layer_norm_eps *= 2
    renamed = copy.deepcopy(model)
    renamed.__class__ = type("Other", (type(model),), {})
    models = [other, renamed, copy.deepcopy(model).bfloat16()]
    assert len({known, identity(opened(model, "b")), *(identity(opened(one)) for one in models)}) == 5


def test_how_a_model_writes_and_what_its_layers_run_are_part_of_its_identity():
    model = tiny("GPT2LMHeadModel")
    known = {identity(opened(model))}
    model.generation_config.num_beams = 4
    known.add(identity(opened(model)))
    for left in (2, 3):
        other = copy.deepcopy(model)
        surgery.convert(other, Plan.of("local", left=left))
        known.add(identity(opened(other)))
    assert len(known) == 4


def test_outputs_are_stored_by_the_code_that_computes_them(monkeypatch):
    cpu = torch.device("cpu")
    said = set()
    for obstacle in (None, "no compiler"):
        monkeypatch.setattr("approx.measuring.measure.compiler_obstacle", lambda obstacle=obstacle: obstacle)
        for findings in ({}, {"softmax": {"way": "a"}}, {"softmax": {"way": "b"}}, {"topk": {"way": "a"}}):
            monkeypatch.setattr("approx.measuring.measure.found", lambda kind, findings=findings: findings)
            said.add(computed_by(cpu))
            # How long it took is none of it.
            timed = {name: {**one, "seconds": 3} for name, one in findings.items()}
            monkeypatch.setattr("approx.measuring.measure.found", lambda kind, timed=timed: timed)
            assert computed_by(cpu) in said
    assert len(said) == 8
    assert all(("PyTorch alone" in one) != (one.partition(", ")[2].startswith("C")) for one in said)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device.index}")
    monkeypatch.setattr("approx.measuring.measure.found", lambda kind: {} if kind == "cuda" else None)
    assert computed_by(torch.device("cuda:1"), fast_products=True) == "the GPU 1, fast products"


def test_hash_depends_on_examples_and_settings_and_not_on_the_path(tmp_path):
    def read(folder: str, label: int = 1, name: str = "dev", task: str = "glue/sst2") -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / f"{name}.tsv"
        file.write_text(f"sentence\tlabel\nfine\t{label}\n", encoding="utf-8")
        opened = open_task(task)
        return examples_read(opened, opened.load(file))

    assert read("here") == read("there")
    assert len({read("here"), read("here", 0), read("here", name="train")}) == 3
    lengths = [open_task("needle", length=length, examples=2) for length in (64, 65)]
    assert len({examples_read(task, lengths[0].load()) for task in lengths}) == 2


def test_hashes_other_files_of_the_folder_with_their_names(tmp_path):
    hashes = set()
    for name, text in (("config.json", "{}"), ("config.json", "[]"), ("vocab.txt", "[]"), ("vocab.model", "[]")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        hashes.add(companions_sha256(tmp_path))
        (tmp_path / name).unlink()
    assert len(hashes) == 4
    empty = companions_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights are hashed elsewhere")
    assert companions_sha256(tmp_path) == empty


SOURCE = '''"""A module."""
LIMITS = {"b", "a"}


class Scale:
    """A scale."""

    def widen(self, x, by=2):
        """Widen."""
        return [y * by for y in x if y in LIMITS]
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("A module.", "Another text.\n\nOn more lines.", True),
        ('    """A scale."""\n\n', "", True),
        ('"""Widen."""', "# Why.\n", True),
        ("[y * by for", "[\n            y * by for", True),
        ("by=2", "by=3", False),
        ("y * by", "y + by", False),
        ("y * by", "by * y", False),
        ('"a"}', '"c"}', False),
        ("def widen", "def broaden", False),
    ],
)
def test_hash_of_a_source_ignores_comments_and_docstrings(old, new, same):
    assert old in SOURCE
    known = what_computes(SOURCE.encode())
    assert (what_computes(SOURCE.replace(old, new).encode()) == known) is same


def test_the_code_that_computes_counts_and_commands_pages_and_docstrings_do_not(tmp_path, monkeypatch):
    homes = {name: tmp_path / name for name in ("approx", "approx_kernels")}
    files = ("cli/run.py", "publishing/page.py", "tasks/glue.py", "finetuning/trainer.py")
    for file in (*(f"approx/{file}" for file in files), "approx_kernels/ops/op.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(SOURCE, encoding="utf-8")
    (tmp_path / "approx_kernels" / "ops" / "op.c").write_text("int x;", encoding="utf-8")
    monkeypatch.setattr(
        "approx.measuring.measure.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[homes[name]])
    )

    def changed(file: str, text: str, *rooms: tuple[str, ...]) -> bool:
        known, path = code.__wrapped__(*rooms), tmp_path / file
        path.write_text(text, encoding="utf-8")
        return code.__wrapped__(*rooms) != known

    other = SOURCE.replace("by=2", "by=3")
    assert not changed("approx/cli/run.py", other)
    assert not changed("approx/publishing/report.py", other)
    assert not changed("approx/tasks/glue.py", SOURCE.replace("Widen", "Make wider"))
    assert changed("approx/tasks/glue.py", other)
    assert changed("approx_kernels/ops/op.py", other)
    assert changed("approx_kernels/ops/op.c", "int y;")
    assert not changed("approx/finetuning/trainer.py", other)
    assert changed("approx/finetuning/trainer.py", SOURCE, ("finetuning",))
