"""Kill commands at random moments, go on, and compare what they end with to the result of a command that nobody disturbed.

python tools/fuzz/kills.py --kills 100 --seed 1
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """title: Killed
checkpoint: quickstart
variants:
  local: {mechanism: local, settings: {left: 8, right: 8}}
  clustered: {mechanism: clustered, settings: {clusters: 5}, layers: 0}
evaluate:
  - {task: needle, settings: {length: 64}, limit: 12, batch_size: 1}
device: cpu
"""
GRID = """title: Killed
checkpoint: base
variants:
  clustered: {mechanism: clustered, layers: 0, settings: {bits: 8}, grid: {clusters: [2, 3]}}
evaluate: {task: glue/sst2, data: SST-2, margin: 0.5, limit: 8}
device: cpu
"""
TOKEN = "hf_killed0123456789abcdefghijklmnopqr"
REPO = "ada/killed"
# A user's files with names that resemble ours.
NEIGHBOURS = ("{}.tmp-0a1b2c3d/mine.txt", "{}.failed/mine.txt", "{}.old/mine.txt", ".{}.tmp", "{}.txt")
# What differs between two results when nothing else does, wherever it is in a JSON file.
TIMES = ("command", "seconds")
_LONGEST = 600

Reached = Callable[[Path], bool]


@dataclass(frozen=True)
class Command:
    """A command that is killed.

    Attributes:
        words: How it is typed, in a folder of inputs; a word with `{}` gets the folder for outputs.
        outputs: What it makes there and leaves at its end.
        moments: What it has reached -> whether it has, by the folder for outputs, in the order in which it happens.
        compared: Patterns of the files that are compared, in the folder for outputs.
        resume: Words to go on with, once the first moment is reached.
        times: Further keys of JSON files that are not compared.
        codes: Exit codes that end it well.
        environment: Variables to add.
        ended: Whether nothing is left to do, after which the same words would be refused.
        more: What is compared besides files.
        cleared: Called before the command starts anew.
    """

    words: tuple[str, ...]
    outputs: tuple[str, ...]
    moments: dict[str, Reached]
    compared: tuple[str, ...] = ("**/*",)
    resume: tuple[str, ...] = ("--resume",)
    times: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)
    environment: dict[str, str] = field(default_factory=dict)
    ended: Reached = lambda place: False
    more: Callable[[], dict[str, Any]] = dict
    cleared: Callable[[], None] = lambda: None


def exists(pattern: str, count: int = 1) -> Reached:
    """Whether so many files are there."""
    return lambda place: len(list(place.glob(pattern))) >= count


def commands(hub: Any) -> dict[str, Command]:
    """The commands, by name; the last one pushes to a hub, with the state of `hub_state`."""

    def commits(count: int) -> Reached:
        return lambda place: REPO in hub.repos and len(hub.repos[REPO].commits) >= count

    def pushed() -> dict[str, Any]:
        repo = hub.repos[REPO]
        return {"private": repo.private, "messages": repo.messages, **repo.commits[repo.refs["main"]]}

    def forgotten() -> None:
        hub.repos.clear()
        hub.objects.clear()

    first, second = "healed.training/0-transfer", "healed.training/1-task"
    return {
        "run": Command(
            ("run", "recipe.yaml", "-o", "{}/run", "--quiet"),
            ("run",),
            {
                "its recipe": exists("run/recipe.yaml"),
                **{f"stage {n}": exists("run/stages/*.json", n) for n in (1, 2, 3)},
                "its record": exists("run/record.json"),
            },
            compared=("run/record.json", "run/converted/**/*", "run/recipe.yaml"),
        ),
        "finetune": Command(
            tuple(
                shlex.split(
                    "finetune converted --task glue/sst2 --data SST-2 --steps 4 --batch-size 8 --evaluate-every 2 "
                    "--device cpu --quiet -o {}/healed"
                )
            ),
            ("healed",),
            {
                "its state": exists("healed.training/training.json"),
                "a checkpoint of the transfer": lambda place: (
                    any(place.glob(f"{first}/*/complete.json")) or (place / first / "finished.json").is_file()
                ),
                "the transfer": exists(f"{first}/finished.json"),
                "a checkpoint of the task": lambda place: (
                    any(place.glob(f"{second}/*/complete.json")) or (place / second / "finished.json").is_file()
                ),
                "the task": exists(f"{second}/finished.json"),
                "the checkpoint": exists("healed"),
            },
            # The config has the seconds of the training, and the manifest has its hash.
            times=("config.json",),
            ended=lambda place: (place / "healed").exists() and not (place / "healed.training").exists(),
        ),
        "search": Command(
            tuple(
                shlex.split(
                    "search quickstart --task needle --set length=128 --length 1024 --mechanisms local --limit 24 "
                    "--calibration 4 --examples 12 --proof 12 --front 0 --budget loss<=100 --device cpu --quiet -o "
                    "{}/plan.yaml"
                )
            ),
            ("plan.yaml", "plan-search"),
            {
                "its folder": exists("plan-search/.approx-claim.json"),
                "the sensitivities": exists("plan-search/sensitivities.json"),
                "a measured plan": exists("plan-search/measured.json"),
                "its outcome": exists("plan-search/search.json"),
                "its report": exists("plan-search/report"),
            },
            # Which plan is the fastest depends on times, and on a busy machine none may be proven to be faster.
            compared=("plan-search/sensitivities.json",),
            codes=(0, 7),
        ),
        "sweep": Command(
            ("sweep", "grid.yaml", "--quiet", "-o", "{}/sweep"),
            ("sweep",),
            {
                **{f"cell {n}": exists("sweep/stages/*.json", n) for n in (1, 2, 3, 4, 5)},
                "its tables": exists("sweep/sweep.md"),
            },
            compared=("sweep/sweep.*", "sweep/records/*", "sweep/converted/**/*"),
            resume=(),
        ),
        "push": Command(
            ("push", "converted", REPO, "--yes", "--quiet"),
            (),
            {"the repository": commits(1), "the files": commits(2), "the card": commits(3)},
            resume=(),
            environment={
                "HF_ENDPOINT": hub.endpoint,
                "HF_HUB_OFFLINE": "0",
                "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_XET": "1",
                # The user's own cache would keep what is downloaded, for a hub that names its commits alike.
                "HF_HOME": f"{os.environ.get('APPROX_CACHE')}/hub",
            },
            more=pushed,
            cleared=forgotten,
        ),
    }


@dataclass
class Figures:
    """What came of the kills of one command."""

    kills: int = 0
    completed: int = 0
    reached: Counter[str] = field(default_factory=Counter)


class Trial:
    """One command, killed as often as wanted.

    Args:
        command: The command.
        folder: The folder of inputs; outputs and messages go into folders inside it.
        name: Of the command.

    Raises:
        AssertionError: if it fails, or two undisturbed results differ.
    """

    def __init__(self, command: Command, folder: Path, name: str) -> None:
        self.command, self.figures = command, Figures()
        self.inputs, self.place, self.errors = folder, folder / f"outputs-{name}", folder / f"errors-{name}"
        # The first one compiles C, once for all, and shows that undisturbed results are alike.
        self.wanted = self._undisturbed()[0]
        again, self.spans = self._undisturbed()
        assert _different(self.wanted, again) == []

    def disturbed(self, random: Random, more: Callable[[], bool]) -> None:
        """Start the command, kill it and go on until it ends by itself or there should be no more kills; then compare.

        Raises:
            AssertionError: if it does not go on, leaves something, or ends with something else.
        """
        import killable

        mine, last = self._cleared(), False
        while more() and not last:
            reached, process = self._reached(), self._start()
            wanted = random.randrange(reached, len(self.spans))
            while process.is_alive() and self._reached() < wanted:
                time.sleep(0.005)
            # What was reached before is loaded again first.
            process.join(random.uniform(0, self.spans[wanted] + self.spans[0] * (0 < wanted == reached)))
            # It may end by itself just before the signal.
            if not process.is_alive() or killable.ended(process, signal.SIGKILL) != -signal.SIGKILL:
                break
            self.figures.kills += 1
            moments = ["nothing", *self.command.moments]
            self.figures.reached[moments[self._reached()]] += 1
            if self.command.ended(self.place):
                break
            last = self._reached() == len(self.command.moments)
        else:
            process = self._start()
            process.join(_LONGEST)
        self.figures.completed += 1
        self._check(None if self.command.ended(self.place) else process, mine)

    def _undisturbed(self) -> tuple[dict[str, Any], list[float]]:
        """The result, and the seconds from each moment to the next."""
        mine, process, since = self._cleared(), self._start(), time.monotonic()
        times: list[float] = []
        while process.is_alive():
            times += [time.monotonic() - since] * (self._reached() - len(times))
            process.join(0.005)
        times += [time.monotonic() - since] * (len(self.command.moments) + 1 - len(times))
        self._check(process, mine)
        return self._result(), [end - begin for begin, end in zip([0.0, *times], times, strict=False)]

    def _cleared(self) -> dict[str, str]:
        """Remove everything that was made, and give the folder for outputs neighbours; these as `_tree` has them."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.errors.unlink(missing_ok=True)
        # Outputs that an earlier command stored would leave this one nothing to do.
        shutil.rmtree(Path(os.environ["APPROX_CACHE"], "outputs"), ignore_errors=True)
        self.command.cleared()
        for path in (self.place / one.format(name) for name in self.command.outputs for one in NEIGHBOURS):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine", encoding="utf-8")
        self.place.mkdir(exist_ok=True)
        return _tree(self.place) | _tree(self.inputs / "converted")

    def _start(self) -> Any:
        import killable

        inputs = {path.name: str(path) for path in self.inputs.iterdir()}
        words = [inputs.get(word, word.format(self.place)) for word in self.command.words]
        resume = self.command.resume if self._reached() else ()
        return killable.start(*words, *resume, errors=self.errors, environment=self.command.environment)

    def _reached(self) -> int:
        return max((n for n, there in enumerate(self.command.moments.values(), 1) if there(self.place)), default=0)

    def _check(self, process: Any, mine: dict[str, str]) -> None:
        said = self.errors.read_text(encoding="utf-8") if self.errors.exists() else ""
        assert process is None or process.exitcode in self.command.codes, (process.exitcode, said)
        assert "rror: " not in said, said
        assert "Traceback" not in said, said
        found = _tree(self.place) | _tree(self.inputs / "converted")
        touched = [name for name, content in mine.items() if found.get(name) != content]
        assert touched == [], touched
        made = [Path(name) for name in found.keys() - mine.keys()]
        others = [str(path) for path in made if path.relative_to(self.place).parts[0] not in self.command.outputs]
        assert others == [], others
        from approx.checkpoints.atomic_folder import CLAIM

        left = [str(path) for path in made if ".tmp" in path.name or (path.name.startswith(".") and path.name != CLAIM)]
        assert left == [], left
        if hasattr(self, "wanted"):
            assert (different := _different(self.wanted, self._result())) == [], different

    def _result(self) -> dict[str, Any]:
        left_out = {*TIMES, *self.command.times}
        files = (path for pattern in self.command.compared for path in self.place.glob(pattern))
        own = (
            path for path in files if path.is_file() and path.relative_to(self.place).parts[0] in self.command.outputs
        )
        return {str(path.relative_to(self.place)): _content(path, left_out) for path in own} | self.command.more()


def killed(kills: int, seed: int, folder: Path, seconds: float = math.inf, only: Sequence[str] = ()) -> dict[str, Any]:
    """Kill commands so many times, or as often as there is time for; returns the figures.

    Args:
        kills: Number of kills over all commands.
        seed: Seed of commands and moments.
        folder: An empty folder for inputs and outputs.
        seconds: After them, nothing more is killed.
        only: Names of the commands; empty takes all.

    Raises:
        AssertionError: if a command does not go on, or ends with something else than an undisturbed one.
    """
    began, random = time.monotonic(), Random(seed)
    with _inputs(folder) as hub:
        trials = {name: Trial(one, folder, name) for name, one in commands(hub).items() if not only or name in only}
        while (now := _more(trials, kills, began + seconds))():
            fewest = min(one.figures.kills for one in trials.values())
            random.choice([one for one in trials.values() if one.figures.kills == fewest]).disturbed(random, now)
    return {
        "seed": seed,
        "kills": sum(one.figures.kills for one in trials.values()),
        "completed": sum(one.figures.completed for one in trials.values()),
        "seconds": round(time.monotonic() - began),
        "python": platform.python_version(),
        "commands": {
            name: {
                "kills": one.figures.kills,
                "completed": one.figures.completed,
                "reached": {moment: one.figures.reached[moment] for moment in ("nothing", *one.command.moments)},
            }
            for name, one in trials.items()
        },
    }


def _more(trials: dict[str, Trial], kills: int, until: float) -> Callable[[], bool]:
    return lambda: sum(one.figures.kills for one in trials.values()) < kills and time.monotonic() < until


@contextmanager
def _inputs(folder: Path) -> Iterator[Any]:
    """Write the inputs of all commands, and serve a hub."""
    from approx.conversion.convert import convert
    from approx.planning.plan import Plan
    from hub_server import serve
    from hub_state import Hub
    from tiny_study import tiny_checkpoint
    from tiny_training import write_sst2

    folder.mkdir(exist_ok=True)
    base = tiny_checkpoint(folder / "base")
    train = Path(write_sst2(folder), "train.tsv")
    shutil.copy(train, train.with_name("dev.tsv"))
    convert(base, folder / "converted", Plan.of("linear", feature_map="hedgehog"), offline=True)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    named = GRID.replace("base", str(base)).replace("SST-2", str(train.parent))
    (folder / "grid.yaml").write_text(named, encoding="utf-8")
    hub = Hub(tokens={TOKEN: ("ada", "write")})
    server = serve(hub)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _tree(folder: Path) -> dict[str, str]:
    """Every path below a folder -> the hash of its content."""
    return {str(path): _hash(path.read_bytes()) if path.is_file() else "" for path in folder.rglob("*")}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(path: Path, left_out: set[str]) -> Any:
    if path.suffix == ".json":
        return _without(json.loads(path.read_text(encoding="utf-8")), left_out)
    return _hash(path.read_bytes())


def _without(data: Any, keys: set[str]) -> Any:
    if isinstance(data, dict):
        return {key: _without(value, keys) for key, value in data.items() if key not in keys}
    return [_without(one, keys) for one in data] if isinstance(data, list) else data


def _different(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return sorted(key for key in {*wanted, *found} if key not in found or wanted.get(key) != found[key])


def main() -> int:
    """Run; 0 if every command went on to the same result."""
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "tools", ".", "kernels")]
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)
    from hub_state import Hub

    parser = argparse.ArgumentParser(prog="make kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many, over all commands")
    parser.add_argument("--seed", type=int, default=1, help="seed of commands and moments")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for how long at most")
    parser.add_argument(
        "--only", action="append", default=[], choices=[*commands(Hub())], help="kill only this command"
    )
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    asked = parser.parse_args()
    # The processes that are killed print where this one does.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory(prefix="approx-kills-") as scratch:
        # The outputs that other runs stored would leave nothing to do.
        os.environ["APPROX_CACHE"] = f"{scratch}/cache"
        # The checkout may be edited meanwhile, and records name its commit.
        os.environ["GIT_DIR"] = f"{scratch}/none"
        figures = killed(asked.kills, asked.seed, Path(scratch, "work"), 60 * asked.minutes, asked.only)
    print(json.dumps(figures, indent=1), file=said, flush=True)
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
