"""The cells of a sweep: what one is, what it depends on, and how its result is made and kept.

A cell is idempotent: its key is a hash of all that its result depends on (weights, plan, task, data, code), and its
result is one file of that name, written whole. So cells may be computed anywhere, in any order, twice or at once.
"""

import json
import os
import platform
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.evaluation.prediction_cache import fingerprint
from approx.measuring.identity import beside, examples_read, identity
from approx.measuring.measure import make_record, measure_quality, measure_speed, open_all, silent
from approx.pipeline.journal import write_whole
from approx.planning.plan import Plan
from approx.recipe import BASE
from approx.tasks import open_task

SCHEMA = 1


@dataclass(frozen=True)
class Cell:
    """One piece of a sweep.

    Attributes:
        kind: `convert` makes and verifies a folder; `base` scores the exact base, whose outputs the others then find;
            `evaluate` compares a plan with it; `bench` times a plan.
        key: Hash of all that the result depends on.
        checkpoint: The base.
        plan: Name of the plan; None for the base.
        rules: The plan as plain data, with its seed.
        seed: Of the plan; None where it draws nothing at random.
        label: What records call the plan with its seed.
        stage: What is measured; None for a conversion.
        texts: The task whose texts are timed.
        folder: Key of the conversion that it needs.
    """

    kind: Literal["convert", "base", "evaluate", "bench"]
    key: str
    checkpoint: str
    plan: str | None = None
    rules: Any = None
    seed: int | None = None
    label: str = ""
    stage: EvaluateStage | BenchStage | None = None
    texts: EvaluateStage | None = None
    folder: str | None = None

    @property
    def title(self) -> str:
        """In words: `evaluate clustered clusters=25 on needle`."""
        what = {"evaluate": "on ", "base": "on ", "bench": "at "}.get(self.kind, "")
        if isinstance(self.stage, EvaluateStage):
            what += self.stage.task
        elif isinstance(self.stage, BenchStage):
            what += f"{', '.join(map(str, self.stage.lengths))} tokens"
        words = (self.kind if self.kind != "base" else "evaluate", self.label or "the exact base", what)
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Workshop:
    """What all cells of a sweep share.

    Attributes:
        out: Folder of the sweep.
        title: Of the records.
        notice: Of the records.
        revision: Of the checkpoint.
        device: As asked for.
        dtype: As asked for.
        seed: Of the bootstrap and of random inputs.
        offline: Whether only local files and the hub's cache may be used.
        command: For the records.
    """

    out: Path
    title: str
    notice: str | None
    revision: str | None
    device: str
    dtype: str
    seed: int
    offline: bool
    command: str

    def converted(self, key: str) -> Path:
        """Folder of a conversion."""
        return self.out / "converted" / key[:16]

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The outcome of a cell; None where it was not computed, or its file is damaged."""
        try:
            found = json.loads(self._file(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.get("key") != cell.key:
            return None
        # A plan may have had another name when it was computed.
        made = found["record"] or {"variants": [], "quality": [], "speed": []}
        measured = [variant for entry in made["quality"] + made["speed"] for variant in entry["variants"]]
        for named in (*made["variants"], *measured):
            named["name"] = cell.label
        return {**found, "plan": cell.plan, "title": cell.title}

    def state(self, cell: Cell) -> str:
        """`done`, `failed` or `missing`."""
        found = self.read(cell)
        if found is None or (cell.kind == "convert" and found["status"] == "done" and not self._is_there(cell)):
            return "missing"
        return found["status"]

    def write(self, cell: Cell, **outcome: Any) -> dict[str, Any]:
        """Keep what came of a cell."""
        about = {key: getattr(cell, key) for key in ("key", "kind", "checkpoint", "plan", "rules", "seed", "title")}
        stage = None if cell.stage is None else cell.stage.model_dump()
        whole = {"schema": SCHEMA, **about, "stage": stage, "record": None, "error": None, "exit_code": 0, **outcome}
        write_whole(self._file(cell), json.dumps(whole, allow_nan=False), f".{platform.node()}-{os.getpid()}")
        return whole

    def _file(self, cell: Cell) -> Path:
        return self.out / "cells" / f"{cell.key}.json"

    def _is_there(self, cell: Cell) -> bool:
        return self.converted(cell.key).is_dir()


def compute(shop: Workshop, cell: Cell, threads: int | None) -> dict[str, Any]:
    """Compute a cell and keep what came of it; an error is an outcome too.

    Args:
        shop: What the cells share.
        cell: Which.
        threads: To compute with; None leaves it to torch.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.monotonic()
    try:
        made = _convert(shop, cell) if cell.kind == "convert" else _measure(shop, cell)
    except ApproxError as error:
        return failed(shop, cell, error)
    except Exception as error:
        return shop.write(
            cell, status="failed", error=_told(error), exit_code=Exit.INTERNAL, traceback=traceback.format_exc()
        )
    return shop.write(cell, status="done", record=made, seconds=round(time.monotonic() - start, 3))


def failed(shop: Workshop, cell: Cell, error: BaseException) -> dict[str, Any]:
    """Keep that a cell failed."""
    known = isinstance(error, ApproxError)
    code = error.exit_code if known else Exit.INTERNAL
    return shop.write(cell, status="failed", error=str(error) if known else _told(error), exit_code=code)


def _convert(shop: Workshop, cell: Cell) -> None:
    folder = shop.converted(cell.key)
    # The key is in its name, and it gets its name when it is complete and verified.
    if not folder.is_dir():
        plan = Plan.parse(cell.rules)
        convert.convert(cell.checkpoint, folder, plan, revision=shop.revision, offline=shop.offline)


def _measure(shop: Workshop, cell: Cell) -> dict[str, Any]:
    opened = open_all({BASE: cell.checkpoint}, shop.device, shop.dtype, revision=shop.revision, offline=shop.offline)
    if cell.folder is not None:
        opened |= open_all({cell.label: str(shop.converted(cell.folder))}, shop.device, shop.dtype)
    found: dict[str, Any] = {}
    if isinstance(cell.stage, BenchStage):
        found["speed"] = measure_speed(opened, cell.stage, cell.texts, seed=shop.seed, progress=silent)
    elif cell.stage is not None:
        outputs = shop.out / "cells" / f"{cell.key}.parquet"
        entry = measure_quality(opened, cell.stage, seed=shop.seed, outputs=outputs, fresh=False, progress=silent)
        found["quality"] = [entry]
    return make_record(opened, title=shop.title, notice=shop.notice, seed=shop.seed, command=shop.command, **found)


class Keys:
    """Makes the keys of the cells of one checkpoint.

    Args:
        base: The exact base, as it was opened.
        about: What else all of them depend on: device, seed.
    """

    def __init__(self, base: checkpoint.Checkpoint, *about: Any) -> None:
        # Weights, config, dtype, versions and code are in the identity.
        self._about = (identity(base), beside(base.source.folder), *about)
        self._data: dict[str, str] = {}

    def key(self, kind: str, *parts: Any) -> str:
        """The key of a cell."""
        return fingerprint(*self._about, kind, *parts)

    def stage(self, stage: EvaluateStage) -> tuple[str, dict[str, Any]]:
        """What a task's result depends on: its examples as they were loaded, wherever they lie, and its settings."""
        settings = {key: value for key, value in stage.model_dump().items() if key != "data"}
        name = fingerprint(stage.model_dump())
        if name not in self._data:
            data = None if stage.data is None else Path(stage.data)
            task = open_task(stage.task, **stage.settings)
            self._data[name] = examples_read(task, task.load(data, stage.split, stage.limit))
        return self._data[name], settings


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
