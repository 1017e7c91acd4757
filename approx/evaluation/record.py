"""The record: one JSON file that holds a whole run, and the only thing a report is made from.

A record is a plain dict, so that it reads the same in every program. Scores are fractions (0.8956), margins are
fractions of the same score (0.005), times are milliseconds, memory is megabytes (10^6 bytes), a difference is
converted minus base, a ratio is base time / variant time, and an interval is [low, high]. Not measured is null,
never 0 or NaN. Its keys:

    schema       1; a reader refuses any other
    title        str
    notice       str or null: "A demonstration, not a benchmark."
    command      str: what was typed
    seed         int
    recipe       {text, sha256} or null
    checkpoint   {name, revision, weights_sha256, family, parameters, layers, positions (int or null)}
    variants     [{name, layers: [{layer, heads (if split), mechanism, settings}], verified: bool, receipt: dict or null}]
    quality      [{task, split, metric, fraction: bool (told in percent and points), lower_is_better: bool, examples,
                   sliced_by: what the bounds of slices count, slice_metric, subset: bool, truncated: examples that were cut,
                   groups: speakers or documents that are drawn together, null where examples are independent,
                   tokens: {median, longest: int}, notes: [str], what was left out or changed when the examples were read,
                   base: {scores: {metric: score}, interval}; an interval is null where there is one example or group,
                   variants: [{name, scores, difference, interval, confidence, test, p_value, margin,
                               verdict: see `approx.evaluation.statistics.verdict`,
                               p_adjusted: p_value raised by Holm over the tasks of the variant, or of its plan where
                               records are read together; null if there is one,
                               needed_examples: int or null,
                               approximated: {examples: on how many of them anything but exact attention is computed, in any
                                              window that they are read in, tokens: share of all real tokens in such
                                              windows}, null for a model that is not converted; older records lack it,
                               seeds: {seeds: what was added to the seed of each layer, 0 first, scores: of the metric, one
                                       a seed, mean, sd, low, high}, all empty or null where nothing is drawn; only if asked,
                               slices: [{from, to (excluded), examples, base, converted: scores by slice_metric}]}],
                   outputs: name of the parquet of per-example outputs, beside the record, or null,
                   fast_products: whether all models ran within `approx.fast_products()`; older records lack it}]
    speed        [{device, dtype, threads, batch, length, mode, inputs: "real" or "synthetic", baseline: the exact attention
                   that is the base, the fastest that was found,
                   crowded: whether other programs used the cores all the while,
                   fast_products: as of quality,
                   base: {median_ms, p10_ms, p90_ms, first_ms, samples, rejected, peak_mb,
                          status: "ok" or "out of memory",
                          chosen: {op: the implementation that it ran in, such as "cpu" or "triton"; "reference" and
                                   "tiles" are plain PyTorch}, or null; older records lack it},
                   default: the same of PyTorch's default SDPA, with ratio and interval, or null where that is the base,
                   ceiling: the same of the model without attention, with ratio and interval, or null,
                   spread: {ratio, interval} of base against itself,
                   variants: [the same as base with name, ratio, interval, share_of_ceiling,
                              verdict: "faster" or "exact is better here", null without a ratio]}]
    crossover    [{name, batch, dtype, device, length: int or null}]: first length with a ratio interval above 1
    environment  what `environment` returns

Further keys may stand beside these; a reader ignores those that it does not know.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit

SCHEMA = 1
_STALE_SECONDS = 24 * 60 * 60

Record = dict[str, Any]

_KEYS = {
    "record": {
        *("schema", "title", "notice", "command", "seed", "recipe", "checkpoint", "variants", "quality"),
        *("speed", "crossover", "environment"),
    },
    "checkpoint": {"name", "revision", "weights_sha256", "family", "parameters", "layers", "positions"},
    "variants": {"name", "layers", "verified", "receipt"},
    "quality": {"task", "split", "metric", "examples", "subset", "truncated", "base", "variants", "outputs"},
    "speed": {"device", "dtype", "threads", "batch", "length", "mode", "inputs", "baseline", "base", "variants"},
    "crossover": {"name", "batch", "dtype", "device", "length"},
}


def save(path: Path, record: Record) -> None:
    """Write a record whole or not at all.

    Args:
        path: The file; its folder is made. An older record is replaced in one step.
        record: As this module describes it.

    Raises:
        ApproxError: if keys are missing, a number is not finite, or the file cannot be written.
    """
    _check(record, f"The record for {path}", Exit.INTERNAL)
    try:
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise ApproxError(f"The record for {path} cannot be stored: {error}.", Exit.INTERNAL) from None
    _write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ApproxError: if there is none, it is damaged, of another schema, or lacks keys.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ApproxError(f"The record {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    except ValueError as error:
        raise ApproxError(
            f"The record {path} is damaged: {error}. Make it again with the command that made it.",
            Exit.UNAVAILABLE,
        ) from None
    _check(record, f"The record {path}", Exit.UNAVAILABLE)
    return record


def environment(threads: int | None = None, gpu: str | None = None) -> dict[str, Any]:
    """Describe the machine and the versions that a measurement was made with.

    Args:
        threads: How many torch computes with; None where nobody asked torch.
        gpu: The device's name as torch gives it; None on a CPU.
    """
    packages = {"approx": "approx-attention", "torch": "torch", "transformers": "transformers", "triton": "triton"}
    return {
        **{key: _version(package) for key, package in packages.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "gpu": gpu,
        "git_commit": _git_commit(),
    }


def write_outputs(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    """Write per-example outputs as parquet, whole or not at all.

    Args:
        path: The file; its folder is made.
        columns: Name -> one value an example, all equally long.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    _write(Path(path), lambda temporary: pyarrow.parquet.write_table(table, temporary))


def _check(record: Any, what: str, exit_code: Exit) -> None:
    if not isinstance(record, dict) or "schema" not in record:
        raise ApproxError(f"{what} is not a record: it has no key 'schema'.", exit_code)
    if record["schema"] != SCHEMA:
        raise ApproxError(
            f"{what} has schema {record['schema']}, but this version of approx reads schema {SCHEMA}. "
            "Make the record again, or use the version that made it.",
            exit_code,
        )
    mistakes = _missing(record, "record", "")
    if not mistakes:
        for part in ("checkpoint", "variants", "quality", "speed", "crossover"):
            entries = [record[part]] if part == "checkpoint" else record[part]
            if not isinstance(entries, list):
                mistakes.append(f"{part} is not a list")
                continue
            for index, entry in enumerate(entries):
                mistakes += _missing(entry, part, part if part == "checkpoint" else f"{part}[{index}]")
    if mistakes:
        raise ApproxError(f"{what} is incomplete: {'; '.join(mistakes)}. Make the record again.", exit_code)


def _missing(entry: Any, part: str, place: str) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{place or part} is not an object"]
    return [f"{place}.{key} is missing".lstrip(".") for key in sorted(_KEYS[part] - entry.keys())]


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    # In the same folder, since a rename is atomic only within one file system; of a name that no other process has, on
    # whatever machine, since several may write the same record.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy_up(path)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ApproxError(f"{path} cannot be written: {error.strerror or error}.", Exit.UNAVAILABLE) from None
    finally:
        # The parent may be no folder at all; the error about that is the one to show.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _tidy_up(path: Path) -> None:
    """Remove what killed processes left; nobody writes a record for so long."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A plain checkout is not installed; its package says its version itself.
        return getattr(sys.modules.get("approx"), "__version__", None) if package == "approx-attention" else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _git_commit() -> str | None:
    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return found.stdout.strip()

    try:
        # Installed into an environment inside somebody's repository, the commit would be that repository's.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None
