"""`--resume` from state that is damaged: one line with exit code 5, and the state stays as it is."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from approx.checkpoints.atomic_folder import CLAIM, claim
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import _finished, _read
from tiny_training import interrupt, model_of, options_of, trained, write_sst2

ABOUT = {"options": {}, "data": "d", "model": "m", "weights": "w", "sites": {}}
STATES = [
    *(
        b"",
        b"null",
        b"[]",
        b"{}",
        b"3",
        b'"x"',
        b"\xff\0\x01",
        b"[" * 100_000,
        b'{"about": ',
        b'{"about": null}',
        b'{"about": []}',
    ),
    *(json.dumps({"about": ABOUT | {name: 3}}).encode() for name in ABOUT),
    *(json.dumps({"about": {key: value for key, value in ABOUT.items() if key != name}}).encode() for name in ABOUT),
    *(
        json.dumps({"about": ABOUT, "exact": None, "before": value}).encode()
        for value in ("x", [], float("nan"), float("inf"))
    ),
    json.dumps({"about": ABOUT, "before": "9" * 5000}).encode(),
]


@pytest.mark.parametrize("text", STATES, ids=lambda text: repr(text[:40]))
def test_rejects_damaged_state(text, tmp_path):
    with pytest.raises(ApproxError, match=r"training\.json is damaged") as caught:
        _read(tmp_path / "training.json", text)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ([], "Input should be a valid dictionary or instance of Begun"),
        ({"scored": "x", "about": ABOUT}, "scored: Input should be a valid boolean"),
        ({"about": ABOUT | {"data": 3}}, "about.data: Input should be a valid string"),
    ],
)
def test_names_the_entry_that_is_damaged(state, reason, tmp_path):
    with pytest.raises(ApproxError) as caught:
        _read(tmp_path / "training.json", json.dumps(state).encode())
    assert f"training.json is damaged: {reason}. The training cannot go on" in str(caught.value)


def test_reads_the_state_of_an_earlier_version(tmp_path):
    state = _read(tmp_path / "training.json", json.dumps({"about": ABOUT, "exact": None, "before": 0.5}).encode())
    assert (state.scored, state.exact, state.before) == (True, None, 0.5)
    assert not _read(tmp_path / "training.json", json.dumps({"about": ABOUT}).encode()).scored


OUTCOME = {
    "mode": "task",
    "steps": 4,
    "best_step": 2,
    "parameters": 8,
    "tokens": 9,
    "seconds": 1.5,
    "measure": "accuracy",
    "curve": [{"step": 2.0, "loss": 0.5}],
    "ended": "steps",
}
OUTCOMES = [
    *(b"", b"null", b"[]", b"{}", b"\xff", b'{"mode": 3}', b"[" * 100_000, json.dumps(OUTCOME).encode()[:-20]),
    *(json.dumps(OUTCOME | {name: [None]}).encode() for name in OUTCOME),
    json.dumps(OUTCOME | {"mode": "\ud800"}).encode(),
    json.dumps(OUTCOME | {"curve": [{"two\nlines": "x"}]}).encode(),
]


@pytest.mark.parametrize("text", OUTCOMES, ids=lambda text: repr(text[:40]))
def test_rejects_a_damaged_outcome_of_a_mode(text, tmp_path):
    claim(tmp_path / "training", "training", "a training")
    place = tmp_path / "training" / "0-task"
    place.mkdir()
    (place / "finished.json").write_bytes(text)
    with pytest.raises(ApproxError, match=r"finished\.json is damaged") as caught:
        _finished(place, None)
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1)
    assert (tmp_path / "training" / CLAIM).is_file()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{}",
        save({"weight": torch.zeros(2, 2)}),
        save({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})[:-4],
        save({"other": torch.zeros(1)}),
    ],
    ids=lambda content: repr(content and content[-10:]),
)
def test_rejects_damaged_weights_of_a_mode(content, tmp_path):
    (tmp_path / "finished.json").write_text(json.dumps(OUTCOME))
    if content is not None:
        (tmp_path / "finished.safetensors").write_bytes(content)
    with pytest.raises(ApproxError, match=r"finished\.safetensors is damaged") as caught:
        _finished(tmp_path, torch.nn.Linear(2, 3))
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[str, Path]:
    """The data and the folder of a training that was stopped after its third step."""
    folder = tmp_path_factory.mktemp("interrupted")
    data = write_sst2(folder)

    interrupt(model_of(), folder / "work", options_of(data, steps=4), 3, by=signal.SIGTERM)
    return data, folder / "work"


CHECKPOINTS = [
    *(("complete.json", text) for text in (b"", b"null", b"{}", b"[", b"\xff", b'{"seconds": "1", "tokens": 3}')),
    ("complete.json", b'{"seconds": 1e999, "tokens": 3}'),
    ("complete.json", b'{"seconds": 1, "tokens": 3, "files": {"\\ud800": 1}}'),
    ("complete.json", b'{"seconds": 1, "tokens": 3, "files": {"trainer_state.json": "other"}}'),
    *(("trainer_state.json", text) for text in (b"", b"{}", b"[]", b'{"global_step": "x"}', b'{"global_step": 1}')),
    *((name, b"") for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors")),
    *(
        (name, None)
        for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors")
    ),
]


@pytest.mark.parametrize(("name", "content"), CHECKPOINTS)
@pytest.mark.sample(8)
def test_rejects_a_damaged_checkpoint(name, content, interrupted, tmp_path):
    data, folder = interrupted
    shutil.copytree(folder, tmp_path / "work")
    file = tmp_path / "work" / "0-task" / "checkpoint-3" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    damaged = file.read_bytes()
    with pytest.raises(ApproxError, match=r"checkpoint-3 is damaged: .*Delete it") as caught:
        trained(model_of(), tmp_path / "work", options_of(data, steps=4), resume=True)
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1)
    assert file.read_bytes() == damaged


@pytest.mark.parametrize(
    "name", ["0-task/checkpoint-3/notes.txt", "0-task/checkpoint-3/optimizer.pt", "0-task/finished.json"]
)
def test_reads_nothing_outside_of_its_folder(name, interrupted, tmp_path):
    data, folder = interrupted
    shutil.copytree(folder, tmp_path / "work")
    (tmp_path / "secret").write_text("secret")
    link = tmp_path / "work" / name
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(ApproxError, match=f"{link.name} is refused: it is a symbolic link that leads to") as caught:
        trained(model_of(), tmp_path / "work", options_of(data, steps=4), resume=True)
    assert caught.value.exit_code == Exit.REFUSED


def test_goes_on_from_the_checkpoint_of_an_earlier_version(interrupted, tmp_path):
    data, folder = interrupted
    shutil.copytree(folder, tmp_path / "work")
    file = tmp_path / "work" / "0-task" / "checkpoint-3" / "complete.json"
    state = json.loads(file.read_text())
    del state["files"]
    file.write_text(json.dumps(state | {"more": 1}))
    assert trained(model_of(), tmp_path / "work", options_of(data, steps=4), resume=True).steps == 4
