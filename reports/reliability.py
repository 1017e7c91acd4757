"""The page about damaged files, failing disks and killed runs, from the figures in reports/reliability."""

import json
from pathlib import Path
from typing import Any


def write(folder: Path, out: Path) -> None:
    """Write `README.md` into `out` from `fuzz.json` and `kills.json` in `folder`."""
    fuzz, kills = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("fuzz", "kills"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(page(fuzz, kills), encoding="utf-8")


def page(fuzz: dict[str, Any], kills: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows = [
        f"| {kind} | {sum(one.values()):,} | {one['read']:,} | {one['refused']:,} | {one['failed']:,} |"
        for kind, one in fuzz["kinds"].items()
    ]
    failures = [f"- {where}: {count}" for where, count in fuzz["failures"].items()] or ["None."]
    times = "time" if kills["kills"] == 1 else "times"
    fixed = [f"| {kind} | {count} |" for kind, count in fuzz["fixed"].items()]
    reached = [f"| {moment} | {count} |" for moment, count in kills["reached"].items()]
    return "\n".join(
        [
            "# Damaged files and killed runs",
            "",
            f"`make fuzz MINUTES={fuzz['seconds'] / 60:.0f} SEED={fuzz['seed']}` damaged {fuzz['inputs']:,} files in "
            f"{fuzz['seconds']:,} seconds with {fuzz['processes']} processes. A file passes if approx reads it or refuses it with its "
            "own error, within 20 seconds and 2 GB, and changes nothing.",
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
            f"`make kills KILLS={kills['kills']} SEED={kills['seed']}` killed `approx run` {kills['kills']} {times} at random moments and went "
            f"on with `--resume`. All {kills['completed']} runs ended with the record of a run that was not disturbed. Where the kills came:",
            "",
            "| the run had finished | kills |",
            "|---|--:|",
            *reached,
            "",
        ]
    )
