"""The record: one JSON file that holds a whole run, and the only input of a report.

`approx.evaluation.record_model` describes it; it is validated on reading and on writing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from approx.errors import ApproxError, Exit
from approx.evaluation.record_model import Quality, Record
from approx.validation import validate
from approx_kernels.runtime.atomic_file import atomic_file

SCHEMA: Final = 1
# Mistakes of a damaged record that its error lists.
_SHOWN = 12
# The mark of a parquet file that this tool wrote.
_MADE = {b"approx": b"outputs of each example"}


def save(path: Path, record: Record) -> None:
    """Write a record atomically.

    Args:
        path: The file; its folder is created. An older record is replaced.
        record: The record. Keys that it was not made with are left out.

    Raises:
        ApproxError: if the record is invalid, a number is not finite, or the file cannot be written.
    """
    data = record.to_data()
    # Parts may have been changed since they were validated.
    validated(data, f"The record for {path}", Exit.INTERNAL)
    try:
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise ApproxError(f"The record for {path} cannot be stored: {error}.", Exit.INTERNAL) from None
    _write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ApproxError: if the record is missing, damaged, invalid, or of another schema; lists what is wrong.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ApproxError(f"The record {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    except (ValueError, RecursionError) as error:
        raise ApproxError(
            f"The record {path} is damaged: {error}. Make it again with the command that made it.",
            Exit.UNAVAILABLE,
        ) from None
    return validated(data, f"The record {path}", Exit.UNAVAILABLE)


def validated(data: Any, what: str, exit_code: Exit) -> Record:
    """Make a record from plain data.

    Args:
        data: The content of a file, or the stored result of a stage.
        what: Begins the error: `The record speed.json`.
        exit_code: Exit code of the error.

    Raises:
        ApproxError: if the data are invalid or of another schema; lists what is wrong.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise ApproxError(f"{what} is not a record: it has no key 'schema'.", exit_code)
    if data["schema"] != SCHEMA:
        raise ApproxError(
            f"{what} has schema {data['schema']}, but this version of approx reads schema {SCHEMA}. "
            "Make the record again, or use the version that made it.",
            exit_code,
        )
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApproxError(
            f"{what} is damaged: it holds half of a surrogate pair, which is not a character. Make it again with the command that "
            "made it.",
            exit_code,
        ) from None
    record, mistakes = validate(Record, data, "record")
    if record is None:
        listed = "; ".join(one.text.rstrip(".") for one in mistakes[:_SHOWN])
        more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        raise ApproxError(f"{what} is damaged: {listed}{more}. Make it again with the command that made it.", exit_code)
    return record


_LATER: dict[str, tuple[str, Callable[[Quality], bool]]] = {
    "rare": (
        "intervals that count rare losses",
        lambda task: all("rare" in one.model_fields_set for one in task.variants),
    ),
    "pairs": (
        "the share of pairs that was approximated",
        lambda task: all(
            "approximated" in one.model_fields_set and (one.approximated is None or one.approximated.pairs is not None)
            for one in task.variants
        ),
    ),
    "chance": ("the score of guessing", lambda task: "chance" in task.model_fields_set),
    "grouped_by": ("what examples were resampled by", lambda task: "grouped_by" in task.model_fields_set),
    "windows": ("the length of the longest input", lambda task: task.tokens is None or task.tokens.windows is not None),
}


def lacking(made: Record) -> dict[str, str]:
    """The fields of its quality that a record is older than, with what they hold in words."""
    return {name: words for name, (words, known) in _LATER.items() if not all(map(known, made.quality))}


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

    table = pyarrow.table({name: list(values) for name, values in columns.items()}).replace_schema_metadata(_MADE)
    _write(Path(path), lambda temporary: pyarrow.parquet.write_table(table, temporary))


def refuse_foreign_outputs(path: Path) -> None:
    """Check that a file of per-example outputs, which no option names, is ours before it is replaced.

    Args:
        path: The parquet file. Earlier versions did not mark it, but the record beside it names it.

    Raises:
        ApproxError: if it is the user's (exit code 8).
    """
    if not path.exists():
        return
    import pyarrow
    import pyarrow.parquet

    with contextlib.suppress(OSError, pyarrow.ArrowException):
        if _MADE.items() <= (pyarrow.parquet.read_schema(path).metadata or {}).items():
            return
    with contextlib.suppress(ApproxError):
        if path.name in [one.outputs for one in load(path.with_suffix(".json")).quality]:
            return
    raise ApproxError(
        f"{path} would hold the outputs of each example, but exists and was not written by approx; --force replaces only the record. "
        "Move it away, or choose another output.",
        Exit.REFUSED,
    )


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
