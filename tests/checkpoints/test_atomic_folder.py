"""Folders are complete or absent, whatever fails and whenever."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from approx.checkpoints import atomic_folder as place_of_writing
from approx.checkpoints.atomic_folder import (
    CLAIM,
    atomic_folder,
    claim,
    claimed,
    keep_failed,
    refuse_existing,
    remove,
)
from approx.checkpoints.manifest import MANIFEST, check_seal
from approx.errors import ApproxError, Exit
from zoo import error_of

ROOT = Path(__file__).resolve().parents[2]


def write(out, text="new", force=False):
    with atomic_folder(out, force=force) as folder:
        (folder / "config.json").write_text(text)
        (folder / "weights").write_bytes(b"0" * 1000)


def contents(place):
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_writes_a_sealed_folder_and_nothing_else(tmp_path):
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


def test_does_not_overwrite_a_concurrent_output(tmp_path):
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
        with pytest.raises(ApproxError, match=r"was not written by approx: it holds letters\.txt") as caught:
            write(out, force=True)
        assert caught.value.exit_code == Exit.REFUSED
    with pytest.raises(ApproxError, match="is a file"):
        refuse_existing(tmp_path / "home" / "letters.txt", force=True)
    with pytest.raises(ApproxError, match="cannot be written"):
        write(tmp_path / "home" / "letters.txt" / "out")
    with pytest.raises(ApproxError, match="cannot be written"):
        write(tmp_path / ("n" * 300))
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_refuses_to_replace_the_current_folder(tmp_path, monkeypatch):
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
def test_any_failing_call_leaves_a_whole_folder(name, force, tmp_path, monkeypatch):
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
def test_full_disk_ends_in_one_line(by, tmp_path):
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
@pytest.mark.sample(1)
def test_removes_leftovers_of_a_killed_run_and_restores_the_original(before, inside, tmp_path):
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


_LIVING = """
import sys
from pathlib import Path
from approx.checkpoints.atomic_folder import atomic_folder
with atomic_folder(Path(sys.argv[1])) as place:
    print(place.parent, flush=True)
    input()
"""


@pytest.mark.parametrize("host", ["this one", "another container", "another machine"])
@pytest.mark.sample(1)
def test_keeps_the_temporary_folder_of_a_living_process(host, tmp_path, monkeypatch):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    other = subprocess.Popen(
        [sys.executable, "-c", _LIVING, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        if host != "this one":
            monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        if host == "another machine":
            monkeypatch.setattr(place_of_writing, "_boot", lambda: "other")
        write(tmp_path / "out")
        assert theirs.is_dir()
    finally:
        other.kill()
        other.wait()
    write(tmp_path / "out", force=True)
    # Whether a process of another machine lives cannot be known here.
    assert theirs.is_dir() == (host == "another machine")


NEIGHBOURS = [
    *("out.tmp-1", f"out.tmp-{os.getpid()}", "out.tmp-20241127", "out.tmp-0a1b2c3d", "out.old-1", "out.old-20241127"),
    *(
        "out.old-20241127120000",
        "out.old-²",
        "out.old-",
        "out.failed",
        "out.failed-2",
        "out.training",
        ".out.lock",
        "out-search",
    ),
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "empty file", "link"])
def test_keeps_neighbours_whatever_their_names(kind, existing, force, tmp_path):
    if existing:
        write(tmp_path / "out")
    for name in NEIGHBOURS:
        if kind == "folder":
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(name)
        elif kind == "link":
            if name != ".out.lock":
                (tmp_path / "elsewhere").mkdir(exist_ok=True)
                (tmp_path / name).symlink_to("elsewhere")
        else:
            (tmp_path / name).write_text(name if kind == "file" else "")

    def neighbours():
        return {path: found for path, found in contents(tmp_path).items() if path.split("/")[0] != "out"}, {
            path.name for path in tmp_path.iterdir()
        } - {"out"}

    before = neighbours()
    if existing and not force:
        with pytest.raises(ApproxError, match="exists already"):
            write(tmp_path / "out")
    else:
        write(tmp_path / "out", "new", force=force)
        assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert neighbours() == before
    if kind != "link":
        with atomic_folder(tmp_path / "out", force=True) as folder:
            (folder / "config.json").write_text("failed")
            assert keep_failed(folder, tmp_path / "out") == tmp_path / "out.failed-3"
            (folder).mkdir()
        shutil.rmtree(tmp_path / "out.failed-3")
        assert neighbours() == before


def test_keeps_a_folder_whose_claim_is_about_another(tmp_path):
    """A user who saves what a killed run had written copies the claim too."""
    write(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "out.tmp-saved")
    (tmp_path / "out.tmp-saved" / CLAIM).write_text('{"approx": true, "kind": "temporary", "folder": "out.tmp-1234"}')
    write(tmp_path / "out", force=True)
    assert (tmp_path / "out.tmp-saved" / "config.json").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "{}",
        "3",
        "[" * 10_000,
        '{"approx": 1}',
        '{"approx": true, "kind": "x"}',
        '{"kind": "training", "folder": "out.training"}',
        "\0\xff",
    ],
)
def test_ignores_damaged_claim(text, tmp_path):
    place = tmp_path / "out.training"
    place.mkdir()
    (place / CLAIM).write_text(text)
    assert claimed(place) is None
    remove(place, "training")
    with pytest.raises(ApproxError, match="is not a training of approx") as caught:
        claim(place, "training", "a training")
    assert caught.value.exit_code == Exit.REFUSED
    assert (place / CLAIM).read_text() == text


def test_claims_a_folder_again_after_a_kill_in_the_middle_of_its_claim(tmp_path):
    (tmp_path / CLAIM).touch()
    claim(tmp_path, "training", "a training")
    assert claimed(tmp_path) is not None
    # With anything else next to the empty claim, the folder is the user's.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / CLAIM).touch()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ApproxError, match=r"holds \.approx-claim\.json, notes\.txt"):
        claim(tmp_path / "mine", "training", "a training")


@pytest.mark.parametrize("content", ["", '{"approx": true, "kind": "training", "folder": "out.training"}'])
def test_ignores_linked_claim_and_writes_nothing_through_it(content, tmp_path):
    place, outside = tmp_path / "out.training", tmp_path / "mine"
    place.mkdir()
    outside.write_text(content)
    (place / CLAIM).symlink_to(outside)
    assert claimed(place) is None
    remove(place, "training")
    with pytest.raises(ApproxError, match="is a link, which is no claim of approx") as caught:
        claim(place, "training", "a training", lambda folder: True)
    assert caught.value.exit_code == Exit.REFUSED
    assert (outside.read_text(), (place / CLAIM).is_symlink()) == (content, True)


def test_removes_only_what_is_claimed_for_the_purpose(tmp_path):
    claim(tmp_path / "mine", "training", "a training")
    (tmp_path / "mine" / "deep").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "letter").write_text("dear")
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "target")
    for kind in ("search", "run", "failed"):
        remove(tmp_path / "mine", kind)
        with pytest.raises(ApproxError, match="no claim"):
            claim(tmp_path / "mine", kind, f"a {kind}")
    assert (tmp_path / "mine" / "deep").is_dir()
    remove(tmp_path / "mine", "training")
    remove(tmp_path / "target", "training")
    assert contents(tmp_path) == {"target/letter": b"dear"}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_force_refuses_an_output_with_files_of_the_user(tmp_path):
    write(tmp_path / "out")
    for name in ("notes.txt", ".git/HEAD", "runs/1/events"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
        with pytest.raises(ApproxError, match=f"also holds {name}") as caught:
            write(tmp_path / "out", "new", force=True)
        assert caught.value.exit_code == Exit.REFUSED
        shutil.rmtree(tmp_path / "out" / name.split("/")[0]) if "/" in name else (tmp_path / "out" / name).unlink()
    for name in ("__pycache__/a.pyc", ".cache/huggingface/x"):
        (tmp_path / "out" / name).parent.mkdir(parents=True)
        (tmp_path / "out" / name).touch()
    write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_an_output_without_a_manifest_is_replaced_by_its_claim(tmp_path):
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "out", force=True, sealed=False) as folder:
            (folder / "config.json").write_text(text)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    (tmp_path / "out" / "added").touch()
    with pytest.raises(ApproxError, match="also holds added"):
        refuse_existing(tmp_path / "out", force=True)


@pytest.mark.parametrize("damage", ["changed byte", "missing file", "no manifest", "broken manifest"])
def test_rejects_incomplete_folder(damage, tmp_path):
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
