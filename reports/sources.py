"""Where the figures of generated tables come from.

A record that is older than a field of verdicts makes `reports/refresh.py` fail, unless older.toml lists it with the
reason why it was not made again; the table then says what it lacks.
"""

import tomllib
from pathlib import Path

from approx.errors import ApproxError
from approx.evaluation import record
from approx.evaluation.record import Record

# Of a search that names everything; the report has it whole.
_SHOWN = 60
OLDER = Path(__file__).with_name("older.toml")


def file(records: Path, name: str) -> Path:
    """The record of a name, in a folder of reports."""
    return records / name / "report.json"


def opened(records: Path, name: str) -> Record:
    """Load the record of a table.

    Args:
        records: The folder of records.
        name: Name of the record.

    Raises:
        ApproxError: if the record is older than a field, and older.toml does not list it; or lists one that it has.
    """
    made = record.load(file(records, name))
    lacks, listed = set(record.lacking(made)), set(_older().get(name, ()))
    if lacks - listed:
        raise ApproxError(
            f"The record '{name}' is older than {', '.join(sorted(lacks - listed))}, which its table needs. Make it again: "
            f"{made.command}; or list it in {OLDER.name} with the reason why not, and the table says what it lacks."
        )
    if listed - lacks:
        raise ApproxError(
            f"{OLDER.name} lists {', '.join(sorted(listed - lacks))} of the record '{name}', which has it. Remove it there."
        )
    return made


def where(made: Record, name: str, page: str) -> str:
    """The record of a table in words: its report, what made it, from which code, and whether it is too old for its verdicts.

    Args:
        made: The record.
        name: Its name.
        page: The path to the folder of reports, from the document.
    """
    code = made.environment.get("git_commit")
    version = f"approx {made.environment['approx']}" + (f" at {code[:7]}" if code else "")
    command = f", `{made.command}`" if len(made.command) <= _SHOWN else ""
    older = ", an earlier version: its report says what it lacks" if record.lacking(made) else ""
    return f"[{name}]({page}/{name}/report.md){command}, {version}{older}"


def _older() -> dict[str, list[str]]:
    return {name: one["lacks"] for name, one in tomllib.loads(OLDER.read_text(encoding="utf-8")).items()}
