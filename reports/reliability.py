"""The page about damaged files, killed runs and large checkpoints, from the figures in reports/reliability."""

import json
from pathlib import Path
from typing import Any

NAMES = ("fuzz", "kills", "big-model", "push")


def write(folder: Path, out: Path) -> None:
    """Write `README.md` into `out` from the records of `NAMES` in `folder`."""
    records = [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES]
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(page(*records), encoding="utf-8")


def page(fuzz: dict[str, Any], kills: dict[str, Any], big: dict[str, Any], push: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows = [
        f"| {kind} | {sum(one.values()):,} | {one['read']:,} | {one['refused']:,} | {one['failed']:,} |"
        for kind, one in fuzz["kinds"].items()
    ]
    failures = [f"- {where}: {count}" for where, count in fuzz["failures"].items()] or ["None."]
    times = "time" if kills["kills"] == 1 else "times"
    fixed = [f"| {kind} | {count} |" for kind, count in fuzz["fixed"].items()]
    reached = [
        f"| `{name}` | {one['kills']} | {one['completed']} | {', '.join(f'{what} {n}' for what, n in one['reached'].items() if n)} |"
        for name, one in kills["commands"].items()
    ]
    return "\n".join(
        [
            "# Damaged files, killed runs, large checkpoints",
            "",
            f"`make fuzz MINUTES={fuzz['seconds'] / 60:.0f} SEED={fuzz['seed']}` damaged {fuzz['inputs']:,} files in "
            f"{fuzz['seconds']:,} seconds with {fuzz['processes']} processes. A file passes if approx reads it or refuses it with its "
            "own error, within 20 seconds and 2 GB, and changes nothing. What comes from others, such as checkpoints, also makes it read "
            "nothing outside of its folder and run none of its code: both are put there to be found.",
            "",
            "| kind of file | inputs | read | refused | failed |",
            "|---|--:|--:|--:|--:|",
            *rows,
            "",
            "Failures of this run:",
            "",
            *failures,
            "",
            f"`tests/fuzz/found` keeps {sum(fuzz['fixed'].values())} small files on which approx failed before it was fixed; every run "
            "of the tests reads them again:",
            "",
            "| kind of file | cases |",
            "|---|--:|",
            *fixed,
            "",
            f"`make kills KILLS={kills['kills']} SEED={kills['seed']}` killed commands {kills['kills']} {times} at random moments and went on: "
            "with `--resume`, or with the same words where a command has no such option. "
            f"All {kills['completed']} ended with what a command that nobody disturbed ends with, left nothing else behind, and changed no "
            "file of their neighbours. The last column says how far the commands had come when they were killed.",
            "",
            "| command | kills | ended | reached |",
            "|---|--:|--:|---|",
            *reached,
            "",
            *_large(big, push),
            "",
        ]
    )


def _large(big: dict[str, Any], push: dict[str, Any]) -> list[str]:
    """Time and memory of a large checkpoint, and what a push takes beside the upload alone."""
    done = [
        f"| {command} | {one['seconds']:.0f} s | {one['memory_gb']:.1f} GB | {one['without_files_gb']:.1f} GB |"
        for command, one in ((command, big[command]) for command in ("convert", "revert"))
    ]
    return [
        f"`python bench/big_model.py -o RECORD` converted a random Llama of {big['checkpoint_gb']:.1f} GB in bfloat16 to "
        f"`{big['mechanism']}`, with all checks, and reverted it. Weights are mapped from files, so their pages are "
        "memory that the system takes back when it needs it; the last column leaves them out.",
        "",
        "| command | time | memory with pages of files | memory |",
        "|---|--:|--:|--:|",
        *done,
        "",
        f"`python bench/push.py -o RECORD` pushed a converted Llama of {push['checkpoint_gb']:.2f} GB to a hub on the same machine in "
        f"{push['push_seconds']:.0f} seconds; uploading the folder with the hub client alone took {push['client_seconds']:.0f}. The "
        "difference is Python's imports, the download, and the comparison in a clean process.",
    ]
