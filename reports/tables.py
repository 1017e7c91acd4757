"""The tables that records put into README.md and docs/: results, quickstart, healing, searches, and speed on CPUs."""

import io
from pathlib import Path

from rich.console import Console

from approx.cli.figures import quality_tables, speed_tables
from approx.errors import ApproxError
from approx.evaluation.options import BASE
from approx.evaluation.record import Quality, QualityVariant, Record, Scores, Speed, SpeedVariant, Tokens, Trained
from approx.publishing import wording
from approx.publishing.summary import standing, variant_of
from approx.recipe import HEALED, TRAINED
from approx.searching.search import FOUND
from approx.tasks.metrics import METRICS
from bench import cpu_page, pages
from reports import sources

# The README's tables: the record whose texts are as long as what was timed, and where; those of SQuAD with healed variants, of
# the same questions, of which the first was timed.
LONG, LENGTHS = "genres", (512, 2048)
SQUAD, SQUAD_LENGTH = ("heal-squad", "heal-squad-linear"), 384
# Columns of the terminal whose output the README shows.
WIDTH = 136
# Plans that a search made itself.
_MIXED = (FOUND, "finalist ", "front ")


def marked(page: str, name: str, text: str) -> str:
    """The page with what is between the markers of a name replaced."""
    begin, end = f"<!-- {name}: made by reports/refresh.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def in_readme(page: str, records: Path) -> str:
    """The README with the output of the quickstart, and its tables of quality and speed."""
    made = {name: sources.opened(records, name) for name in (LONG, *SQUAD, "quickstart")}
    shown = made["quickstart"]
    text = f"{printed(shown)}\nFrom {sources.where(shown, 'quickstart', 'reports')}."
    page = marked(page, "quickstart", text)
    text = f"{results_long(made[LONG])}\n\n{kept({name: made[name] for name in SQUAD})}"
    return marked(page, "results", text)


def in_healing(page: str, records: Path) -> str:
    """docs/healing.md with a table of SQuAD, and one for each record named heal-* and for Whisper."""
    squads = {name: sources.opened(records, name) for name in SQUAD}
    page = marked(page, "squad", results_healed(squads))
    tables = [
        _healed(sources.opened(records, path.name), path.name)
        for path in [*sorted(records.glob("heal-*")), records / "whisper"]
    ]
    return marked(page, "healed", "\n".join(tables))


def in_search(page: str, records: Path) -> str:
    """docs/search.md with the table of the records named search-*."""
    made = {path.name: sources.opened(records, path.name) for path in sorted(records.glob("search-*"))}
    rows = [
        "| searched | found | fastest uniform plan that is shown to lose no more than asked |",
        "|---|---|---|",
        *(_searched(one, name) for name, one in made.items()),
        "",
        f"From {'; '.join(sources.where(one, name, '../reports') for name, one in made.items())}.",
    ]
    return marked(page, "searched", "\n".join(rows))


def in_speed(page: str, records: Path) -> str:
    """docs/speed.md with a table for each processor."""
    tables = []
    for folder in processors(records):
        made, name = pages.opened(folder), f"reports/{folder.name}"
        tables.append(
            f"## {cpu_page.processor(made['environment'])}\n\n{cpu_page.processor_table(made)}\n\n"
            f"[The whole report](../{name}/report.md), made by `python bench/cpu.py -o {name}`.\n"
        )
    return marked(page, "speed", "\n".join(tables))


def processors(records: Path) -> list[Path]:
    """The folders of the records of `bench/cpu.py`, one a processor."""
    return sorted(path.parent for path in records.glob("cpu*/record.json"))


def printed(made: Record) -> str:
    """What `approx run` prints of a record, of its last length alone, as a block of Markdown."""
    console = Console(width=WIDTH, file=io.StringIO(), markup=False, highlight=False)
    for shown in (*(one for entry in made.quality for one in quality_tables(entry)), *speed_tables(made.speed[-1:])):
        console.print(shown)
    written = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return "\n".join(["```text", *(line.rstrip() for line in written.splitlines() if line.strip()), "```"])


def results_healed(squads: dict[str, Record]) -> str:
    """The table of SQuAD: quality before and after training, and speed, a row for each variant.

    Args:
        squads: Name -> record of the same questions with healed variants; the first was timed at `SQUAD_LENGTH`.
    """
    first = next(iter(squads.values()))
    base, speed = first.quality[0], _timed(first, SQUAD_LENGTH)
    rows = [
        ["attention", "F1 without training", "healed", "kept", f"speed at {SQUAD_LENGTH} tokens"],
        ["---", "---", "---", "--:", "--:"],
        ["exact", _in_per_cent(base, base.base.scores), _quality(base, TRAINED), "", _exact(speed)],
        ["*no attention: the ceiling*", "–", "–", "", _ceiling(speed)],
    ]
    for made in squads.values():
        entry = made.quality[0]
        if (entry.examples, entry.base.scores) != (base.examples, base.base.scores):
            raise ApproxError(f"{', '.join(squads)} are not of the same questions. Make them again with the same data.")
        for variant in made.variants:
            if variant.name.endswith((HEALED, TRAINED)):
                continue
            healed, kept = variant_of(entry.variants, variant.name + HEALED), "–"
            if made is not first and healed is None:
                continue
            best = healed or variant_of(entry.variants, variant.name)
            if best is not None:
                kept = f"{100 * best.scores[entry.metric] / entry.base.scores[entry.metric]:.1f} %"
            timed = _timed(made, SQUAD_LENGTH)
            name = variant.name + HEALED if healed else variant.name
            quick = "–" if timed is None else _speed(timed, name)
            rows.append(
                [
                    _code(variant.name),
                    _quality(entry, variant.name),
                    _quality(entry, variant.name + HEALED),
                    kept,
                    quick,
                ]
            )
    tokens = base.tokens
    assert tokens is not None
    made = [sources.where(one, name, "../reports") for name, one in squads.items()]
    caption = (
        f"{base.examples:,} SQuAD questions about six articles, {tokens.median} tokens in the median{_longest(tokens)}. F1 in per "
        "cent; in brackets the 95 % interval of the difference from exact attention, in points; **bold: no loss** beyond "
        f"{_margin(base)}. **Healed** is after minutes of training on 23 other articles, which exact attention "
        f"got too; *kept* is the share of the exact score, healed where that was done. {_machine(first)} From {'; '.join(made)}."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", caption])


def kept(squads: dict[str, Record]) -> str:
    """What healing keeps of the exact score on SQuAD, in a sentence; the table is in docs/healing.md.

    Args:
        squads: Name -> record of the same questions with healed variants.
    """
    shares: dict[str, float] = {}
    for made in squads.values():
        entry = made.quality[0]
        for variant in entry.variants:
            if variant.name.endswith(HEALED):
                shares[variant.name.removesuffix(HEALED)] = (
                    variant.scores[entry.metric] / entry.base.scores[entry.metric]
                )
    best = sorted(shares, key=lambda name: -shares[name])
    written = "; ".join(f"{100 * shares[name]:.1f} % with {_code(name)}" for name in best)
    return (
        "Minutes of training bring most of what a conversion loses back. Of the F1 of exact attention on "
        f"{next(iter(squads.values())).quality[0].examples:,} SQuAD questions are then kept: {written}. "
        "[Healing](docs/healing.md#what-it-gives-back) has the table, with intervals and what is lost without training."
    )


def results_long(long: Record) -> str:
    """The README's table of long documents: quality and speed at the same lengths, a row for each variant, healed where it was.

    Args:
        long: A record whose texts fill `LENGTHS`, and that was timed at these.
    """
    read = {entry.tokens.median: entry for entry in long.quality if entry.tokens}
    columns = [(read[length], _timed(long, length)) for length in LENGTHS]
    heads = [f"documents of {length:,} tokens: accuracy | speed" for length in LENGTHS]
    rows = [["attention", *heads], ["---", *["---|--:"] * len(LENGTHS)]]
    rows.append(["exact", *(f"{_in_per_cent(entry, entry.base.scores)} | {_exact(speed)}" for entry, speed in columns)])
    rows.append(["*no attention: the ceiling*", *(f"– | {_ceiling(speed)}" for _, speed in columns)])
    names = {variant.name for variant in long.variants}
    for variant in long.variants:
        if variant.name + HEALED in names:
            continue
        cells = [f"{_quality(entry, variant.name)} | {_speed(speed, variant.name)}" for entry, speed in columns]
        rows.append([_code(variant.name), *cells])
    entry = read[LENGTHS[-1]]
    caption = (
        f"{entry.examples} texts of the Brown corpus, cut to that length; accuracy in per cent. Those called healed learned from "
        "exact attention for minutes, on speeches and film reviews; the others are as converted. The model was "
        "trained for minutes, mostly on shorter texts, so compare within a column. "
        f"{_of_chance(long)}{_machine(long)} From {sources.where(long, LONG, 'reports')}."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", caption])


def _code(name: str) -> str:
    """A variant whose mechanism is set in code."""
    mechanism, space, more = name.partition(" ")
    return f"`{mechanism.rstrip(',')}`{mechanism[len(mechanism.rstrip(',')) :]}{space}{more}"


def _margin(entry: Quality) -> str:
    margin = entry.variants[0].margin
    assert margin is not None
    return f"{100 * margin:.0f} point"


def _machine(made: Record) -> str:
    """What speed means, and where it was measured."""
    timed, machine = made.speed[0], made.environment
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (
        "Speed: time of the best exact attention of the machine divided by that of the row, bold where faster beyond the noise; "
        f"{timed.dtype}, batch {timed.batch}, {machine['processor']}, {threads}, torch {machine['torch']}."
    )


def _longest(tokens: Tokens) -> str:
    # Older records added up the windows of an example, whose overlaps count twice.
    return "" if tokens.windows is None else f", {tokens.longest} at most"


def _of_chance(made: Record) -> str:
    """What the best answer scores that ignores its input."""
    known = {round(entry.chance, 3) for entry in made.quality if entry.chance is not None}
    if len(known) != 1:
        return ""
    return f"Always the most common class would score {100 * known.pop():.1f}. "


def _timed(made: Record, length: int) -> Speed | None:
    return next((row for row in made.speed if row.length == length), None)


def _in_per_cent(entry: Quality, scores: Scores) -> str:
    return f"{100 * scores[entry.metric]:.1f}"


def _quality(entry: Quality, name: str) -> str:
    variant = variant_of(entry.variants, name)
    if variant is None:
        return "–"
    score = _in_per_cent(entry, variant.scores)
    if variant.at_chance:
        score += " *at chance*"
    if not wording.tested(variant) or variant.interval is None:
        return f"{score}, {variant.verdict}"
    low, high = (100 * end for end in variant.interval)
    shown = f"**{score}**" if variant.verdict == "no loss" else score
    return f"{shown} ({wording.signed(low, 1)} … {wording.signed(high, 1)})"


def _exact(speed: Speed | None) -> str:
    return "not timed" if speed is None else f"1 ({speed.base.median_ms:.0f} ms)"


def _ceiling(speed: Speed | None) -> str:
    return "not timed" if speed is None or speed.ceiling is None else wording.times(speed.believed(speed.ceiling).ratio)


def _speed(speed: Speed | None, name: str) -> str:
    if speed is None:
        return "not timed"
    variant = variant_of(speed.variants, name)
    if variant is None:
        return "–"
    if variant.ratio is None or variant.interval is None:
        return variant.status
    if not speed.settled(variant):
        return "not settled"
    return f"**{variant.ratio:.2f}×**" if variant.interval[0] > 1 else f"{variant.ratio:.2f}×"


def _healed(made: Record, name: str) -> str:
    """One record: a row for each variant, with its score before and after training, for each of its tasks."""
    rows = [
        f"**{made.title}**",
        "",
        "| attention | without training | healed | against exact attention | training |",
        "|---|--:|--:|--:|---|",
    ]
    trained = {one.name: one for one in made.trainings}
    for entry in made.quality:
        metric = entry.metric
        scored = {one.name: one for one in entry.variants}
        exact = entry.base.scores[metric]
        if len(made.quality) > 1:
            rows.append(f"| *{entry.task}, {entry.split}* | | | | |")
        after = scored.get(TRAINED)
        cells = [_score(metric, exact), "–" if after is None else _with_interval(metric, after)]
        text = ""
        if after is not None:
            text = f"{_against(metric, after.scores[metric], exact)}, {_direction(metric, after)}"
        rows.append(f"| {BASE} | {' | '.join(cells)} | {text} | {_training(trained.get(TRAINED))} |")
        for variant in made.variants:
            if variant.name not in scored or variant.name.endswith((HEALED, TRAINED)):
                continue
            healed = scored.get(variant.name + HEALED)
            best = healed or scored[variant.name]
            cells = [
                _with_interval(metric, scored[variant.name]),
                "–" if healed is None else _with_interval(metric, healed),
                f"{_against(metric, best.scores[metric], exact)}, {_direction(metric, best)}",
                "–" if healed is None else _training(trained.get(healed.name)),
            ]
            rows.append(f"| {variant.name} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"From {sources.where(made, name, '../reports')}.", ""])


def _against(metric: str, value: float, exact: float) -> str:
    """A score next to that of exact attention: the share kept, or how much more of what should be small."""
    if not METRICS[metric].lower_is_better:
        return f"{100 * value / exact:.1f} % kept"
    if METRICS[metric].fraction:
        return f"{wording.signed(100 * (value - exact), 1)} points"
    return f"{wording.signed(100 * (value / exact - 1), 1)} %"


def _score(metric: str, value: float) -> str:
    return f"{100 * value:.1f}" if METRICS[metric].fraction else f"{value:.3f}"


def _with_interval(metric: str, variant: QualityVariant) -> str:
    score = _score(metric, variant.scores[metric])
    if variant.interval is None:
        return score
    scale, digits = (100, 1) if METRICS[metric].fraction else (1, 4)
    low, high = (scale * end for end in variant.interval)
    exact = "" if wording.tested(variant) else "; attention is exact on these inputs"
    return f"{score} ({wording.signed(low, digits)} … {wording.signed(high, digits)}{exact})"


def _direction(metric: str, variant: QualityVariant) -> str:
    """Whether the interval of a difference is all on one side of exact attention."""
    if variant.interval is None:
        return "no interval"
    low, high = variant.interval if METRICS[metric].lower_is_better else (-variant.interval[1], -variant.interval[0])
    return "worse" if low > 0 else "better" if high < 0 else "no clear change"


def _training(trained: Trained | None) -> str:
    if trained is None:
        return ""
    parts = [f"{phase.mode} {wording.count(phase.steps)} steps" for phase in trained.phases]
    return f"{', '.join(parts)}; {wording.duration(sum(phase.seconds for phase in trained.phases))}"


def _searched(made: Record, name: str) -> str:
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
