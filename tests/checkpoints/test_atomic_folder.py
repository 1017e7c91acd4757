"""Folders are complete or absent, whatever fails and whenever."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.errors import ApproxError, Exit
from approx.seam.manifest import MANIFEST, check_seal
from zoo import error_of

ROOT = Path(__file__).resolve().parents[2]


def write(out, text="new", force=False):
    with atomic_folder(out, force=force) as folder:
        (folder / "config.json").write_text(text)
        (folder / "weights").write_bytes(b"0" * 1000)


def contents(place):
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_a_folder_is_written_sealed_and_alone(tmp_path):
    write(tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"out"}
    assert set(json.loads((tmp_path / "deep" / "out" / MANIFEST).read_text())["files"]) == {"config.json", "weights"}
    check_seal(tmp_path / "deep" / "out")


def test_an_existing_folder_is_refused_and_replaced_by_force_only(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(ApproxError, match="--force") as caught:
        write(tmp_path / "out")
    assert caught.value.exit_code == Exit.REFUSED
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_who_was_faster_is_not_overwritten(tmp_path):
    def slower():
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "config.json").write_text("slower")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "config.json").write_text("faster")

    with pytest.raises(ApproxError, match="exists already") as caught:
        slower()
    assert caught.value.exit_code == Exit.REFUSED
    assert contents(tmp_path) == {"out/config.json": b"faster"}


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    check_seal(tmp_path / "out")


def test_force_replaces_checkpoints_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "home", Path("home"), Path("home/../home")):
        with pytest.raises(ApproxError, match="not the folder of a checkpoint") as caught:
            write(out, force=True)
        assert caught.value.exit_code == Exit.REFUSED
    with pytest.raises(ApproxError, match="is a file"):
        refuse_existing(tmp_path / "home" / "letters.txt", force=True)
    with pytest.raises(ApproxError, match="cannot be written"):
        write(tmp_path / "home" / "letters.txt" / "out")
    with pytest.raises(ApproxError, match="cannot be written"):
        write(tmp_path / ("n" * 300))
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_the_current_folder_is_not_pulled_from_under_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (Path("."), tmp_path, tmp_path.parent):
        with pytest.raises(ApproxError, match="current folder") as caught:
            write(out, force=True)
        assert caught.value.exit_code == Exit.REFUSED
    write(Path("out"))
    check_seal(tmp_path / "out")


class Failing:
    """Replaces a system function by one that fails at its k-th call, as with a full or broken disk."""

    def __init__(self, function, at):
        self.function, self.left, self.calls = function, at, 0

    def __call__(self, *arguments):
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")
        return self.function(*arguments)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_whichever_call_fails_nothing_is_half_written(name, force, tmp_path, monkeypatch):
    out, function, call = tmp_path / "out", getattr(os, name), 0
    if force:
        write(out, "old")
    before = contents(tmp_path)
    while True:
        call += 1
        failing = Failing(function, call)
        monkeypatch.setattr(os, name, failing)
        error = error_of(lambda: write(out, "new", force=force))
        monkeypatch.setattr(os, name, function)
        if error is None:
            break
        assert error.exit_code == Exit.UNAVAILABLE
        assert "No space left" in str(error)
        assert contents(tmp_path) == before
        assert not list(tmp_path.glob("out.*"))
    assert call > (1 if name == "replace" else 3)
    assert (out / "config.json").read_text() == "new"


def test_an_interruption_leaves_the_old_folder(tmp_path):
    write(tmp_path / "out", "old")
    before = contents(tmp_path)

    def interrupted() -> None:
        with atomic_folder(tmp_path / "out", force=True) as folder:
            (folder / "config.json").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("by", ["python", "safetensors"])
def test_a_full_disk_is_told_in_one_line(by, tmp_path):
    write(tmp_path / "out", "old")
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with atomic_folder(tmp_path / "out", force=True) as folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            if by == "python":
                (folder / "model.safetensors").write_bytes(b"0" * 100_000)
            else:
                save_file({"weight": torch.zeros(100_000)}, folder / "model.safetensors")

    try:
        error = error_of(fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error is not None
    assert f"Writing {tmp_path / 'out'} failed: " in str(error)
    assert error.exit_code == Exit.UNAVAILABLE
    assert contents(tmp_path) == before


_KILLED = """
import os, signal, sys
from pathlib import Path
from approx.checkpoints import atomic_folder as folder
{before}
with folder.atomic_folder(Path(sys.argv[1]), force=True) as place:
    (place / "config.json").write_text("new")
    {inside}
"""


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("", "os.kill(os.getpid(), signal.SIGKILL)"),
        # Between moving the old folder aside and renaming the new one.
        (
            "replace = os.replace\ndef once(*a):\n    replace(*a)\n    os.kill(os.getpid(), signal.SIGKILL)",
            "os.replace = once",
        ),
    ],
    ids=["while writing", "while replacing"],
)
def test_what_a_killed_run_left_is_tidied_up_and_the_original_is_there(before, inside, tmp_path):
    write(tmp_path / "out", "old")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    child = subprocess.run(
        [sys.executable, "-c", _KILLED.format(before=before, inside=inside), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("out.*"))
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out", force=True):
        raise RuntimeError
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_what_a_living_run_writes_is_left_alone(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        theirs = tmp_path / f"out.tmp-{other.pid}"
        theirs.mkdir()
        (tmp_path / "out.tmp-notes").mkdir()
        (tmp_path / f"out[1].tmp-{other.pid}").mkdir()
        write(tmp_path / "out")
        assert theirs.is_dir()
        assert (tmp_path / "out.tmp-notes").is_dir()
    finally:
        other.kill()
        other.wait()
    write(tmp_path / "out[1]")
    assert not list(tmp_path.glob("out[[]1].tmp*"))


@pytest.mark.parametrize("damage", ["changed byte", "missing file", "no manifest", "broken manifest"])
def test_a_folder_that_is_not_whole_is_refused(damage, tmp_path):
    write(tmp_path)
    weights, manifest = tmp_path / "weights", tmp_path / MANIFEST
    if damage == "changed byte":
        weights.write_bytes(b"0" * 999 + b"1")
    elif damage == "missing file":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text('{"files": 3}')
    with pytest.raises(ApproxError, match=r"[Cc]onvert the base checkpoint again") as caught:
        check_seal(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
