"""The command line in a separate process: from a checkout, in an empty folder, on a terminal, in a pipe, interrupted."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from approx.version import __version__
from tiny_study import tiny_recipe

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "cli.py")]
CANARY = "hf_canary0123456789abcdefghijklmnopq"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": "", "HF_TOKEN": CANARY, **more}


def start(*words: object, cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *map(str, words)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_help_imports_no_large_library_and_version_lists_usable_parts(tmp_path):
    # Imports decide how long a command takes, and unlike seconds do not depend on the machine.
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"],
        cwd=tmp_path,
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    imported = {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in run.stderr.splitlines() if "|" in line}
    assert "typer" in imported, "the list of imports was not read"
    assert not imported & {
        "torch",
        "transformers",
        "datasets",
        "matplotlib",
        "scipy",
        "numpy",
        "huggingface_hub",
        "pydantic",
    }
    done = subprocess.run(
        [*COMMAND, "--version", "--verbose"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for what in ("approx ", "torch: ", "transformers: ", "gpu: ", "triton: "):
        assert f"\n{what}" in f"\n{done.stdout}"
    assert CANARY not in done.stdout + done.stderr


def test_a_wrong_name_is_refused_before_torch_is_imported(tmp_path):
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "plan", "quickstart", "-m", "locall"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (
        "error: Invalid value for '--mechanism' / '-m': Unknown mechanism 'locall'. Did you mean 'local'?" in run.stderr
    )
    assert run.returncode == 2
    imported = {line.rsplit("|", 1)[1].strip().partition(".")[0] for line in run.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert "torch" not in imported


def test_the_version_is_also_an_object(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--version", "--json"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"approx": __version__}


@pytest.mark.sample(0)
def test_a_closed_pipe_is_no_error(tmp_path):
    process = start("mechanisms", "--json", cwd=tmp_path)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.slow
def test_tables_and_bars_fit_a_narrow_terminal(base, tmp_path):
    """Run in a pseudo-terminal of 80 columns."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = ["convert", str(base), "-o", "out", "-m", "improved-clustered", "--set", "clusters=4", "--set", "topk=8"]
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=environment(TERM="xterm"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert process.wait() == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "convert: reloading in a fresh process" in text
    assert "improved-clustered" in text
    assert "Loading weights" not in text
    assert [line for line in re.split(r"[\r\n]+", text) if len(line) > 80] == []


def test_ctrl_c_exits_with_130_and_says_how_to_resume(base, data, tmp_path):
    process = start("run", tiny_recipe(tmp_path / "r.yaml", base, data), "-o", "run", "--json", cwd=tmp_path)
    assert process.stderr
    assert process.stdout
    for line in process.stderr:
        if "convert to" in line:
            break
    process.send_signal(signal.SIGINT)
    errors = [line for line in process.stderr.read().splitlines() if not line.startswith("[")]
    assert process.wait() == 130
    assert errors == ["error: Interrupted. Finished stages are kept; run the same command with --resume to continue."]
    assert json.loads(process.stdout.read())["exit_code"] == 130


# Writes a file and prints, also below Python, as libraries in C do.
_PRINTS_WHILE_A_FILE_IS_OPEN = f"""
import os, sys
sys.path[:0] = {[str(ROOT), str(ROOT / "kernels")]!r}
from approx.cli.terminal import open_streams
open_streams()
with open(sys.argv[1], "w") as file:
    os.write(1, b"noise")
    os.write(2, b"noise")
    print("noise", file=sys.stderr)
    print("noise", flush=True)
    file.write("the record")
"""


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [
        ("exec {command} tasks --json <&- 2>&-", 0, '"name": "glue/sst2"'),
        ("exec {command} tasks >&-", 0, "Next: approx tasks NAME"),
        ("exec {script} {record} <&- >&- 2>&-", 0, ""),
        ("rmdir $PWD && exec {command} tasks", 5, "The current folder cannot be opened"),
    ],
    ids=["input and errors", "output", "all", "deleted folder"],
)
@pytest.mark.sample(2)
def test_handles_closed_streams_and_a_deleted_folder(line, code, printed, tmp_path):
    place, record = tmp_path / "here", tmp_path / "record.json"
    place.mkdir()
    script = shlex.join([sys.executable, "-c", _PRINTS_WHILE_A_FILE_IS_OPEN])
    whole = line.format(command=shlex.join(COMMAND), script=script, record=record)
    done = subprocess.run(["/bin/sh", "-c", whole], cwd=place, env=environment(), capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert (done.returncode, printed in said, bool(said)) == (code, True, bool(printed)), said
    assert "Traceback" not in said
    # The first file that is opened would take the number of a closed stream, and then hold what is printed.
    if "{record}" in line:
        assert record.read_text("utf-8") == "the record"
