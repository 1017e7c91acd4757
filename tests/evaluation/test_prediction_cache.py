"""Outputs are stored batch by batch: none is computed twice, none is stale, and a kill costs one batch."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from approx.evaluation.evaluate import Ledger, Subject, default_folder, evaluate, fingerprint, predict, prepare
from approx.evaluation.options import EvaluateOptions
from approx.tasks import open_task
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
# Run by `python` and `torchrun`: evaluates two models, and may kill itself after some batches.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = [str(Path(sys.argv[1]).parent), sys.argv[1]]
from test_prediction_cache import evaluated
_, _, data, ledgers, out, limit = sys.argv
seen = []
def progress(done, total):
    seen.append(done)
    if len(seen) == int(limit):
        os.kill(os.getpid(), signal.SIGKILL)
rank = os.environ.get("RANK", "")
for way, place in (("plain", None), ("ledgers", Path(ledgers))) if rank else (("ledgers", Path(ledgers)),):
    Path(out + way + rank).write_text(json.dumps(evaluated(Path(data), place, progress).to_data()))
"""


@pytest.fixture
def data(tmp_path) -> Path:
    rows = [f"{' '.join(WORDS[4 + (row + word) % 10] for word in range(1 + row % 13))}\t{row % 2}" for row in range(37)]
    (tmp_path / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return tmp_path


def models():
    torch.manual_seed(0)
    return [tiny_model(2), tiny_model(2)]


def evaluated(data, ledgers, progress=None, *, batch_size=4, identities=("a", "b"), counted=None, changed=None):
    subjects = {}
    for name, model, identity in zip(("exact", "other"), changed or models(), identities, strict=True):
        if counted is not None:
            model.register_forward_hook(lambda *_: counted.append(1))
        subjects[name] = Subject(name, model, tiny_tokenizer(), identity)
    task = open_task("glue/sst2")
    return evaluate(
        subjects, task, EvaluateOptions(batch_size=batch_size), data=data, ledgers=ledgers, progress=progress
    )


def test_nothing_is_computed_twice(data, tmp_path):
    plain, first, second = [], [], []
    alone = evaluated(data, None, counted=plain)
    ledgers = tmp_path / "ledgers"
    assert evaluated(data, ledgers, counted=first) == alone
    assert evaluated(data, ledgers, counted=second) == alone
    assert (len(plain), len(first), len(second)) == (20, 20, 0)


def test_changed_inputs_use_another_ledger(data, tmp_path):
    ledgers, counted = tmp_path / "ledgers", []
    evaluated(data, ledgers)
    evaluated(data, ledgers, counted=counted, identities=("a", "changed weights"))
    assert len(counted) == 10
    evaluated(data, ledgers, counted=counted, batch_size=5)
    assert len(counted) == 26
    text = (data / "dev.tsv").read_text()
    (data / "dev.tsv").write_text(text.replace("very", "not", 1))
    evaluated(data, ledgers, counted=counted)
    assert len(counted) == 46
    # A label is not an input: the score changes, the outputs do not.
    (data / "dev.tsv").write_text(text.replace("\t1", "\t0", 1))
    evaluated(data, ledgers, counted=counted)
    assert len(counted) == 46


def test_another_device_uses_another_ledger(data, tmp_path):
    """Tensors on the device `meta` have no values, so this fake model predicts the same for every input."""
    task, calls = open_task("glue/sst2"), []

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.dtype = tiny_model(2).config, torch.float32

        def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
            calls.append(input_ids.device.type)
            return SimpleNamespace(logits=torch.tensor([[0.0, 1.0]]).expand(len(input_ids), 2))

    subject = Subject("constant", Constant(), tiny_tokenizer(), "a")
    prepared = prepare([Subject("a", tiny_model(2), tiny_tokenizer())], task, task.load(data), batch_size=37)
    for device in ("cpu", "cpu:0", "meta", "meta"):
        assert predict(subject, task, prepared, device=device, ledgers=tmp_path / "ledgers") == [1] * 37
    assert calls == ["cpu", "meta"]


def test_stores_no_outputs_of_models_without_identity(data, tmp_path):
    counted = []
    for _ in range(2):
        evaluated(data, tmp_path / "ledgers", counted=counted, identities=(None, None))
    assert len(counted) == 40
    assert not (tmp_path / "ledgers").exists()


def test_recomputes_batch_of_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path, "abc")
    ledger.write(0, [1.5])
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text() + "[1, [2.")
    assert ledger.read() == {0: [1.5]}
    assert ledger.write(1, [2.25]) == [2.25]
    assert ledger.write(2, []) == []
    assert ledger.read() == {0: [1.5], 1: [2.25], 2: []}
    assert [line.rpartition(",")[0] for line in path.read_text().splitlines()] == [
        "[0, [1.5]",
        "[1",
        "[1, [2.25]",
        "[2, []]"[:-1],
    ]


DAMAGES = {
    "another figure": ("0.5", "0.7"),
    "another type": ("0.5", '"x"'),
    "half of a surrogate pair": ("0.5", '"\\ud800"'),
    "one more": ("[0.5", "[0.5, 0.5"),
    "another batch": ("[3,", "[4,"),
    "no list": ("[0.5]", "0.5"),
    "a foreign field": ("]\n", ", 1]\n"),
    "not a number": ("0.5", "NaN"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_recomputes_batch_of_a_damaged_line(damage, tmp_path):
    ledger = Ledger(tmp_path, "abc")
    ledger.write(3, [0.5])
    (path,) = tmp_path.rglob("*.jsonl")
    text = path.read_text().replace(*DAMAGES[damage])
    assert text != path.read_text()
    path.write_text(text)
    assert ledger.read() == {}
    ledger.write(3, [0.5])
    assert ledger.read() == {3: [0.5]}


def test_recomputes_batch_of_an_earlier_versions_line(tmp_path):
    ledger = Ledger(tmp_path, "abc")
    ledger.write(3, [0.5])
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text("[3, [0.5]]\n")
    assert ledger.read() == {}


def test_numbers_come_back_as_they_were(tmp_path):
    predictions = [{"loss": 0.1 + 0.2, "spans": [[1 / 3, 4, 5]]}]
    assert Ledger(tmp_path, "abc").write(0, predictions) == predictions == Ledger(tmp_path, "abc").read()[0]


def test_continues_with_one_warning_where_outputs_cannot_be_stored(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "file", "abc")
    assert [ledger.write(batch, [0.5]) for batch in range(3)] == [[0.5]] * 3
    (message,) = caplog.messages
    assert "Not a directory" in message
    assert "set $APPROX_CACHE to a writable folder" in message
    assert ledger.read() == {}


def test_fingerprints_differ_by_array_and_order():
    first, second = torch.arange(3).numpy(), torch.arange(1, 4).numpy()
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert len({fingerprint(first), fingerprint(second), fingerprint("a", "b"), fingerprint("b", "a")}) == 4
    assert fingerprint(torch.float32) != fingerprint(torch.bfloat16)
    # NumPy prints only the ends of long arrays.
    long = [np.zeros(5000), np.zeros(5000)]
    long[1][2500] = 1e-9
    assert fingerprint(long[0]) != fingerprint(long[1])


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("APPROX_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "outputs"
    monkeypatch.delenv("APPROX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "approx" / "outputs"


def run(command, data, ledgers, out, limit=0):
    arguments = [str(HERE), str(data), str(ledgers), str(out), str(limit)]
    script = data / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_and_ends_the_same(data, tmp_path):
    ledgers, out, counted = tmp_path / "ledgers", tmp_path / "out.json", []
    killed = run([sys.executable], data, ledgers, out, limit=13)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list(tmp_path.glob("out.json*"))
    resumed = evaluated(data, ledgers, counted=counted)
    # Twelve or thirteen of twenty batches are stored: at most one is lost.
    assert len(counted) in (7, 8)
    assert resumed == evaluated(data, None)


@pytest.mark.slow
def test_two_processes_give_the_same_result_as_one(data, tmp_path):
    out, ledgers = tmp_path / "out-", tmp_path / "ledgers"
    done = run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], data, ledgers, out
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Ten batches per model are five for each process; with one stored, nine are divided unevenly.
    alone = json.dumps(evaluated(data, None).to_data())
    for suffix in ("plain0", "plain1", "ledgers0", "ledgers1"):
        assert Path(f"{out}{suffix}").read_text() == alone
    for path in ledgers.rglob("*.1.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    counted = []
    evaluated(data, ledgers, counted=counted)
    assert len(counted) == 2
