"""The record: one JSON file that holds a whole run, and the only input of a report.

A record is a plain dict. `approx.evaluation.record_model` describes it, and validates it on writing and reading.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from approx.errors import ApproxError, Exit
from approx.evaluation.record_model import RecordModel
from approx.validation import validate
from approx_kernels.runtime.atomic_file import atomic_file

SCHEMA = 1
# Mistakes of a damaged record that its error lists.
_SHOWN = 12

Record = dict[str, Any]


def save(path: Path, record: Record) -> None:
    """Write a record atomically.

    Args:
        path: The file; its folder is created. An older record is replaced.
        record: The record; see `RecordModel`.

    Raises:
        ApproxError: if the record is invalid, a number is not finite, or the file cannot be written.
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
        ApproxError: if the record is missing, damaged, invalid, or of another schema; lists what is wrong.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
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
    """Describe the machine and the versions of a measurement.

    Args:
        threads: Threads of torch; None if torch was not used.
        gpu: Torch's name of the device; None on a CPU.
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
    """Write per-example outputs as parquet, atomically.

    Args:
        path: The file; its folder is created.
        columns: Name -> one value per example.
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
    _, mistakes = validate(RecordModel, record, "record")
    if mistakes:
        listed = "; ".join(one.text.rstrip(".") for one in mistakes[:_SHOWN])
        more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        raise ApproxError(f"{what} is damaged: {listed}{more}. Make it again with the command that made it.", exit_code)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        with atomic_file(path) as temporary:
            write(temporary)
    except OSError as error:
        raise ApproxError(f"{path} cannot be written: {error.strerror or error}.", Exit.UNAVAILABLE) from None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is not installed has no metadata.
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
        process = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return process.stdout.strip()

    try:
        # An environment inside another repository would give that repository's commit.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None
