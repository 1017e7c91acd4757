"""`--resume` from state that is damaged: one line with exit code 5, and the state stays as it is."""

import json

import pytest

from approx.checkpoints.atomic_folder import CLAIM, claim
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import _finished, _read

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


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{}", b"\xff", b'{"mode": 3}'], ids=repr)
def test_rejects_a_damaged_outcome_of_a_mode(text, tmp_path):
    claim(tmp_path / "training", "training", "a training")
    place = tmp_path / "training" / "0-task"
    place.mkdir()
    (place / "finished.json").write_bytes(text)
    with pytest.raises(ApproxError, match=r"finished\.json is damaged") as caught:
        _finished(place, None)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert (tmp_path / "training" / CLAIM).is_file()
