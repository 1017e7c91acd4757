"""A disk that fails at any operation of a command: one line, the right exit code, the old output as it was, nothing beside it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from approx.errors import Exit
from faults import ERRORS, failing

from .conftest import call

LINEAR = ("--set", "window=2")
# The command without its output, and the output.
COMMANDS = {
    "convert": (("convert", "base", "-m", "local", "--set", "left=2", "--set", "right=2", "--force"), "-o", "out"),
    "revert": (("revert", "converted", "--force"), "-o", "out"),
    "finetune": (
        (
            "finetune",
            "converted",
            "--task",
            "glue/sst2",
            "--data",
            "SST-2",
            "--recover",
            "task",
            "--steps",
            "2",
            "--force",
        ),
        "-o",
        "out",
    ),
    "evaluate": (("evaluate", "converted", "--task", "glue/sst2", "--data", "SST-2", "--force"), "-o", "out/q.json"),
    "report": (("report", "record.json"), "-o", "out"),
    "push": (
        ("push", "converted", "me/model", "--record", "record.json", "--offline", "--force", "--dry-run"),
        "-o",
        "out",
    ),
}


@pytest.fixture
def place(base, converted, data, tmp_path, monkeypatch, pushed_record):
    """Everything that the commands read, and an old output of each."""
    place = tmp_path / "place"
    shutil.copytree(base, place / "base")
    shutil.copytree(converted, place / "converted")
    shutil.copytree(data, place / "SST-2")
    lines = (place / "SST-2" / "dev.tsv").read_text("utf-8").splitlines()
    train = [lines[0], *(f"long long {line}" for line in lines[1:])]
    (place / "SST-2" / "train.tsv").write_text("\n".join(train) + "\n", encoding="utf-8")
    shutil.copy(pushed_record, place / "record.json")
    (place / "cache").mkdir()
    # Only results are stored on the failing disk; compiled code is made once for all tests.
    (place / "cache" / "compiled").symlink_to(Path(os.environ["APPROX_CACHE"]) / "compiled")
    monkeypatch.setenv("APPROX_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="session")
def pushed_record(converted, data, tmp_path_factory):
    file = tmp_path_factory.mktemp("record") / "record.json"
    answer = call("evaluate", converted, "--task", "glue/sst2", "--data", data, "-o", file)
    assert answer.code == Exit.OK, answer
    return file


def contents(place: Path) -> dict[str, bytes]:
    """The files of a folder, except for those that a later run continues from."""
    return {
        name: path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not (name := path.relative_to(place).as_posix()).startswith(("cache/", "out.training/"))
    }


def attempts(name: str, place: Path, chosen) -> int:
    """Fail at each chosen operation; returns how many there are."""
    words, *output = COMMANDS[name]
    # The old output, of the same kind.
    assert (answer := call(*words, *output)).code == Exit.OK, answer
    before, total, tolerated = contents(place), None, []
    with failing(place, 0, 0) as disk:
        assert call(*words, *output).code == Exit.OK
    total = len(disk.done)
    before = contents(place)
    for at in chosen(total):
        error = ERRORS[at % len(ERRORS)]
        shutil.rmtree(place / "out.training", ignore_errors=True)
        shutil.rmtree(place / "cache" / "outputs", ignore_errors=True)
        with failing(place, at, error) as disk:
            answer = call(*words, *output)
        if not disk.failed:
            continue
        where = f"operation {at} of {total}, {disk.done[at - 1]}, {os.strerror(error)}: {answer}"
        after = contents(place)
        if answer.code == Exit.OK:
            tolerated.append(disk.done[at - 1])
            assert after.keys() == before.keys(), where
            continue
        lines = [line for line in answer.err.splitlines() if not line.startswith(("[", "Compiling C"))]
        assert answer.code == Exit.UNAVAILABLE, where
        assert len(lines) == 1, where
        assert lines[0].startswith("error: "), where
        assert os.strerror(error) in lines[0], where
        assert "Internal error" not in lines[0], where
        if name == "report":
            # Its files are replaced one by one, each of them as a whole.
            assert after.keys() == before.keys(), where
            continue
        assert {key for key in {*before, *after} if before.get(key) != after.get(key)} == set(), where
    # Where the kernel cannot copy a file, Python does.
    assert all("/cache/" in path or what == "sendfile" for what, path in tolerated), tolerated
    shutil.rmtree(place / "out.training", ignore_errors=True)
    assert call(*words, *output).code == Exit.OK
    assert contents(place).keys() == before.keys()
    return total


def some(total: int) -> list[int]:
    """The first, the last and a few between."""
    return sorted({1, 2, 3, total // 3, total // 2, 2 * total // 3, total - 2, total - 1, total} - {0})


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.sample(1)
def test_survives_a_disk_that_fails_sometimes(name, place):
    assert attempts(name, place, some) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_survives_a_disk_that_fails_at_any_call(name, place):
    assert attempts(name, place, lambda total: range(1, total + 1)) > 5


def test_the_simulated_disk_fails(tmp_path):
    seen = []
    for at in range(1, 20):
        with failing(tmp_path, at, errno.EIO) as disk:
            try:
                with open(tmp_path / "a", "w") as file:
                    file.write("abcd")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(tmp_path / "a", tmp_path / "b")
            except OSError:
                seen.append(disk.done[-1][0] if disk.done[-1][0] != "close" else disk.done[at - 1][0])
                continue
        break
    assert seen == ["write", "flush", "fsync", "close", "replace"]
    with open(tmp_path / "c", "w") as file:
        file.write("no longer counted")
    assert type(file).__name__ == "TextIOWrapper"
