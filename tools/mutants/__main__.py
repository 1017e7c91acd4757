"""Change the code of a room in many small ways, one at a time, and count how many of them its tests notice.

    python tools/mutants tasks --sample 60 --seed 1

Works on copies of the repository, in processes forked from one that has read torch already. A mutant is shown to the
tests that run its lines, and to those that start processes; the first that fails has noticed it. The report of those
that nobody noticed is runs/mutants/ROOM.toml, in the layout of equivalent.toml: what changes nothing that can be
observed is moved there, with its reason, and counts no longer.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import tomllib
from pathlib import Path

from baseline import Baseline, baseline_of, tests_to_run
from changes import Mutant, mutants_of
from copies import Room
from forks import noticed_by
from scipy.stats import binomtest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    """Run, print what came out, and return the exit code: 0, 1 for too many survivors, 2 where nothing could be said."""
    asked = _arguments()
    settings = tomllib.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))
    if not isinstance(room := settings.get(asked.room), dict):
        known = ", ".join(name for name, value in settings.items() if isinstance(value, dict))
        print(f"There is no room '{asked.room}'. Known: {known}.")
        return 2
    equal = _entries(HERE / "equivalent.toml")
    report = ROOT / "runs" / "mutants" / f"{asked.room}.toml"
    again = _entries(report) if asked.again else None
    everything = _mutants(ROOT / room["sources"], room.get("texts", False))
    if stale := [entry for entry in equal if entry[0].startswith(room["sources"] + "/") and entry not in everything]:
        print("These lines of equivalent.toml fit no mutant any more; remove them:")
        print(*(f"  {file}: {now}" for file, _, now in stale), sep="\n")
    wanted = [key for key in _shuffled(everything, asked.seed) if again is None or key in again]
    wanted = wanted[: asked.sample] if again is None else wanted
    left = [key for key in wanted if key in equal]
    # As tests/conftest.py has it, for the libraries that read these when they are imported.
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("OMP_NUM_THREADS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    for name in settings["preloaded"]:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="approx-mutants-") as scratch:
        tests = room.get("tests", [f"tests/{asked.room}"])
        place = Room(ROOT, room["sources"], tests, Path(scratch), asked.jobs, room.get("slow", True))
        try:
            baseline = baseline_of(place, report.with_name(f"{asked.room}-baseline.json"))
        except RuntimeError as error:
            print(error)
            return 2
        tried = [everything[key] for key in wanted if key not in equal]
        noticed = noticed_by(place, baseline, tried, _tell)
    survivors = [mutant for mutant in tried if noticed[mutant] is None]
    _write(report, survivors, baseline)
    killed, total = len(tried) - len(survivors), len(tried)
    low, high = binomtest(killed, total).proportion_ci(0.95, "wilson") if total else (0.0, 1.0)
    print(
        f"{asked.room}: {len(everything)} mutants, {len(wanted)} taken (seed {asked.seed}); {killed} killed, "
        f"{len(survivors)} survived, {len(left)} equivalent: {killed / max(total, 1):.0%} of {total} "
        f"(of all: {low:.0%} to {high:.0%} with 95 % confidence). Survivors: {report.relative_to(ROOT)}"
    )
    return int(len(survivors) > settings["survivors"] * total)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("room", help="a table of rooms.toml")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants are taken")
    parser.add_argument(
        "--seed", type=int, default=1, help="which ones; a larger sample of a seed contains a smaller one"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    parser.add_argument("--again", action="store_true", help="only the survivors in the last report of the room")
    return parser.parse_args()


def _mutants(folder: Path, texts: bool) -> dict[tuple[str, str, str], Mutant]:
    """Every mutant by its file and its lines before and after; of those that read alike the first."""
    mutants: dict[tuple[str, str, str], Mutant] = {}
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        for mutant in mutants_of(name, file.read_text(encoding="utf-8"), texts):
            mutants.setdefault((name, *mutant.shown()), mutant)
    return mutants


def _shuffled(keys: dict[tuple[str, str, str], Mutant], seed: int) -> list[tuple[str, str, str]]:
    """In an order that the seed decides, and in which no change elsewhere moves one past another."""
    return sorted(keys, key=lambda key: hashlib.sha256("\0".join((str(seed), *key)).encode()).digest())


def _entries(file: Path) -> set[tuple[str, str, str]]:
    if not file.is_file():
        return set()
    return {
        (one["file"], one["was"], one["now"])
        for one in tomllib.loads(file.read_text(encoding="utf-8")).get("mutant", [])
    }


def _write(report: Path, survivors: list[Mutant], baseline: Baseline) -> None:
    report.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for mutant in survivors:
        was, now = (json.dumps(text, ensure_ascii=False) for text in mutant.shown())
        seen = f"# line {mutant.line}; {len(tests_to_run(baseline, mutant))} tests were shown it"
        parts.append(f'[[mutant]]\n{seen}\nfile = "{mutant.file}"\nwas = {was}\nnow = {now}\nwhy = ""\n')
    report.write_text("\n".join(parts), encoding="utf-8")


def _tell(mutant: Mutant, test: str | None) -> None:
    print(
        f"{mutant.file}:{mutant.line} {f'killed by {test}' if test else 'SURVIVED: ' + mutant.shown()[1]}", flush=True
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Triton complains of leaks at the end of a process that imported it.
    os._exit(code)
