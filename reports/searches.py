"""What searches found: the table of docs/search.md, from the records named search-*."""

from pathlib import Path

from approx.evaluation.record import Quality, QualityVariant, Record, Speed, SpeedVariant
from approx.publishing import wording
from approx.publishing.summary import standing
from approx.searching.search import FOUND
from reports import sources

_BEGIN, _END = "<!-- searched: made by reports/refresh.py -->", "<!-- end of searched -->"
# Not uniform: what the search made itself.
_MIXED = (FOUND, "finalist ", "front ")


def in_page(page: str, records: Path) -> str:
    """The page with its table made again between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    made = {path.name: sources.opened(records, path.name) for path in sorted(records.glob("search-*"))}
    rows = [
        "| searched | found | fastest uniform plan that is shown to lose no more than asked |",
        "|---|---|---|",
        *(_row(one, name) for name, one in made.items()),
        "",
        f"From {'; '.join(sources.where(one, name, '../reports') for name, one in made.items())}.",
    ]
    return "\n".join([f"{before}{_BEGIN}", *rows, f"{_END}{after}"])


def _row(made: Record, name: str) -> str:
    task, timed = made.quality[0], made.speed[0]
    speeds = {one.name: one for one in timed.variants}
    scored = {one.name: one for one in task.variants}
    # What was exact on these inputs, or was not shown to keep within the margin, is no plan to compare with.
    uniform = [
        one
        for one in task.variants
        if not one.name.startswith(_MIXED) and one.verdict in ("no loss", "loss within margin") and _approximates(one)
    ]
    fastest = max(uniform, key=lambda one: (speeds[one.name].ratio or 0.0) if one.name in speeds else 0.0, default=None)
    cells = [
        f"[{task.task}, {timed.length:,} tokens, {task.examples} examples of the proof](../reports/{name}/report.md)"
    ]
    for one in (scored[FOUND], fastest):
        cells.append("none" if one is None else _result(one, timed, speeds.get(one.name), task))
    return f"| {' | '.join(cells)} |"


def _approximates(one: QualityVariant) -> bool:
    return one.approximated is not None and one.approximated.examples > 0


def _result(one: QualityVariant, row: Speed, timed: SpeedVariant | None, task: Quality) -> str:
    scale = wording.scale(task)
    between = "" if one.interval is None else f" ({wording.between([end * scale for end in one.interval])})"
    speed = "not timed"
    if timed is not None and timed.ratio is not None:
        speed = f"{wording.times(timed.ratio)} ({wording.between(timed.interval)}; {standing(row, timed)})"
    return f"{one.name}: {speed}, {wording.signed(one.difference * scale, 1)} points{between}, {one.verdict}"
