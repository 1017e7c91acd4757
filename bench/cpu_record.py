"""The record of `bench/cpu.py`: the parts of its plan, the identity of a run, and assembling the record."""

import datetime
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from approx.errors import ApproxError, Exit
from approx.evaluation.record import environment
from approx_kernels.dispatch.findings import generation, instructions
from bench import cpu_cases, cpu_grouped
from bench.parts import all_stored, seed, write_record

LENGTHS, DTYPES, THREADS = (512, 1024, 2048, 4096, 8192), ("float32", "bfloat16"), (1, 2)
# Frames of 10, 30 and 60 s of sound.
FRAMES = (499, 1499, 2999)
LONGEST = 65_536


class Part(NamedTuple):
    """A race, or another kind of measurement."""

    suite: str
    mode: str
    dtype: str
    threads: int
    length: int
    batch: int = 1

    @property
    def id(self) -> str:
        """The name that `--only` matches, and that of its file."""
        length = f"{self.length}" if self.batch == 1 else f"{self.length}x{self.batch}"
        return f"{self.suite}/{self.mode}/{self.dtype}/{self.threads}/{length}"

    @property
    def causal(self) -> bool:
        """Whether a query sees only its past."""
        return self.suite in ("attention-causal", "gpt2") or self.decoding

    @property
    def decoding(self) -> bool:
        """Whether one token follows others."""
        return self.suite == "decode" or self.suite in cpu_grouped.SIZES

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 if self.suite.startswith("attention") else cpu_cases.LAYERS


def planned(threads: tuple[int, ...], dtypes: tuple[str, ...], lengths: tuple[int, ...]) -> Iterator[Part]:
    """All parts. Training is timed only on all threads, and not at the greatest length."""
    for count in threads:
        for dtype in dtypes:
            for length in lengths:
                for suite in ("attention", "attention-causal", "roberta", "gpt2"):
                    yield Part(suite, "forward", dtype, count, length)
                    if count == max(threads) and length <= 4096:
                        yield Part(suite, "train", dtype, count, length)
                if length <= 4096 and (dtype == "float32" or count == max(threads)):
                    for batch in (1, 8):
                        yield Part("decode", "forward", dtype, count, length, batch)
                    for suite in cpu_grouped.SIZES if length in cpu_grouped.LENGTHS else ():
                        for batch in cpu_grouped.BATCHES:
                            yield Part(suite, "forward", dtype, count, length, batch)
            for frames in FRAMES:
                yield Part("wav2vec2", "forward", dtype, count, frames)
                if count == max(threads):
                    yield Part("wav2vec2", "train", dtype, count, frames)


def name_of(result: dict[str, Any]) -> str:
    """The name under which a result is stored."""
    if "contenders" in result:
        return Part(**{name: result[name] for name in Part._fields}).id
    if "flops" in result:
        return f"rates/{result['dtype']}/{result['threads']}"
    return f"longest/{result['name']}"


def circumstances() -> dict[str, Any]:
    """Properties that may differ between the parts of a record: commit, time, versions, processor, and the command."""
    now = environment()
    return {
        **{name: now[name] for name in ("git_commit", "torch", "transformers", "processor")},
        "instructions": instructions(),
        **generation(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def processor(machine: dict[str, Any]) -> str:
    """A processor's name, instruction set and, if known, family and model numbers."""
    numbers = ", ".join(f"{name} {machine[name]}" for name in ("family", "model") if name in machine)
    known = f" with {machine['instructions']}" if "instructions" in machine else ""
    return machine["processor"] + known + f" ({numbers})" * bool(numbers)


def take_up(output: Path) -> None:
    """Store the parts that the record of a folder has and its part files lack, as in a fresh checkout.

    Raises:
        ApproxError: if it is the record of another processor.
    """
    path = output / "record.json"
    if not path.is_file():
        return
    made, here = json.loads(path.read_text(encoding="utf-8")), circumstances()
    then = made["environment"]
    # Older records lack the family and model numbers.
    if any(then.get(name, here[name]) != here[name] for name in ("processor", "instructions", *generation())):
        raise ApproxError(
            f"{path} holds what was measured on {processor(then)}, and this is {processor(here)}. Take another folder with -o.",
            Exit.REFUSED,
        )
    seed(output / "parts", {name_of(one): one for one in (*made["rates"], *made["parts"], *made["longest"])})


def gather(output: Path) -> None:
    """Write the record of all stored parts, and list the missing parts of the plan."""
    results = {name_of(one): one for one in all_stored(output / "parts")}
    machine = environment()
    # Each part names its commit.
    del machine["git_commit"]
    made = {
        "command": _command(),
        "rates": [one for one in results.values() if "flops" in one],
        "parts": [one for one in results.values() if "contenders" in one],
        "longest": [one for one in results.values() if one.get("suite") == "longest"],
        "left": left(set(results)),
        "environment": {**machine, "instructions": instructions(), **generation()},
    }
    write_record(output / "record.json", made)


def left(done: set[str]) -> list[str]:
    """The parts of the plan that are missing, in order."""
    longest = [f"longest/{case.name}" for case in cpu_cases.cases(False, LONGEST)]
    return [name for name in (*(part.id for part in planned(THREADS, DTYPES, LENGTHS)), *longest) if name not in done]


def _command() -> str:
    return shlex.join(["python", "bench/cpu.py", *sys.argv[1:]])
