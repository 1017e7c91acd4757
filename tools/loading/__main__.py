"""Convert tiny models of seven families and load them in every way that people do, where approx cannot be imported.

    python tools/loading [FAMILY …]

It prints which way works for which head with the installed versions, and exits with 1 if one does not.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

# What pytest does by itself.
sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tests", "tools", ".", "kernels"))

from converted import run
from hub_server import serve
from hub_state import Hub
from loading.models import HEADS, write

HERE = Path(__file__).resolve().parent
Results = dict[str, dict[str, str]]


def matrix(family: str, folder: Path) -> Results:
    """Convert the heads of a family and load them in another process.

    Args:
        family: A key of `HEADS`.
        folder: An empty folder.

    Returns:
        Head -> way -> `ok`, `-` with the reason why it does not apply, or the error.
    """
    hub = Hub()
    for head in write(family, folder):
        repo = hub.create(f"ada/{head}", private=False)
        files = {path.name: path.read_bytes() for path in (folder / head).iterdir() if path.is_file()}
        (folder / f"{head}.revision").write_text(repo.commit("main", files, "converted"), encoding="utf-8")
        repo.commit("main", {"README.md": b"Everything was deleted."}, "moved on")
    server = serve(hub)
    try:
        child = run(
            "-P",
            HERE / "without_approx.py",
            folder,
            HF_ENDPOINT=hub.endpoint,
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            HF_HOME=folder / "home",
            HF_MODULES_CACHE=folder / "modules",
            HF_HUB_DISABLE_TELEMETRY="1",
        )
    finally:
        server.shutdown()
        server.server_close()
    if child.returncode:
        raise RuntimeError(child.stderr[-3000:])
    return json.loads((folder / "results.json").read_text("utf-8"))


def main(families: list[str]) -> int:
    """Print the matrix; 1 if anything fails."""
    # As in the other process: convolutions round differently on more threads.
    torch.set_num_threads(1)
    results: Results = {}
    for family in families or HEADS:
        with tempfile.TemporaryDirectory() as folder:
            results |= matrix(family, Path(folder))
    ways = list(next(iter(results.values())))
    say = sys.stdout.write
    say(", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "peft", "accelerate")) + "\n")
    say("".join([" " * 36, *(f"{way:<13}" for way in ways)]) + "\n")
    failed = []
    for head, words in results.items():
        marks = {
            way: word if word == "ok" else "–" if word.startswith("-") else "FAILED" for way, word in words.items()
        }
        say("".join([f"{head:<36}", *(f"{marks[way]:<13}" for way in ways)]) + "\n")
        failed += [f"{head}, {way}: {words[way]}" for way, mark in marks.items() if mark == "FAILED"]
    reasons = sorted({word[2:] for words in results.values() for word in words.values() if word.startswith("-")})
    say("".join(f"– {reason}\n" for reason in reasons) + "".join(f"{line}\n" for line in failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
