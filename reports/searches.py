"""What searches found: the table of docs/search.md, from the records named search-*."""

from pathlib import Path

from approx.evaluation import record
from approx.evaluation.record_model import QualityVariant, Record
from approx.publishing import wording
from approx.searching.proving import FOUND

_BEGIN, _END = "<!-- searched: made by reports/refresh.py -->", "<!-- end of searched -->"
# Not uniform: what the search made itself.
_MIXED = (FOUND, "finalist ", "front ")


def in_page(page: str, records: Path) -> str:
    """The page with its table made again between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = [
        "| searched | found | fastest uniform plan that loses no more than asked |",
        "|---|---|---|",
        *(_row(record.load(path), path.stem) for path in sorted(records.glob("search-*.json"))),
    ]
    return "\n".join([f"{before}{_BEGIN}", *rows, f"{_END}{after}"])


def _row(made: Record, name: str) -> str:
    task, timed = made.quality[0], made.speed[0]
    speeds = {one.name: one.ratio or 0.0 for one in timed.variants}
    scored = {one.name: one for one in task.variants}
    uniform = [
        one for one in task.variants if not one.name.startswith(_MIXED) and -one.difference <= (one.margin or 0.0)
    ]
    cells = [
        f"[{task.task}, {timed.length:,} tokens, {task.examples} examples of the proof](../reports/{name}/report.md)"
    ]
    for one in (scored[FOUND], max(uniform, key=lambda one: speeds[one.name], default=None)):
        cells.append("–" if one is None else _told(one, speeds[one.name], wording.scale(task)))
    return f"| {' | '.join(cells)} |"


def _told(one: QualityVariant, speed: float, scale: float) -> str:
    between = "" if one.interval is None else f" ({wording.between([end * scale for end in one.interval])})"
    return f"{one.name}: {wording.times(speed)}, {wording.signed(one.difference * scale, 1)} points{between}"
