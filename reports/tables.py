"""The tables that records put into README.md and docs/: results, quickstart, healing, searches, and speed on CPUs."""

import io
from pathlib import Path

from rich.console import Console

from approx.cli.figures import quality_table, speed_tables
from approx.evaluation.options import BASE
from approx.evaluation.record import Quality, QualityVariant, Record, Scores, Speed, SpeedVariant, Tokens, Trained
from approx.publishing import wording
from approx.publishing.summary import standing, variant_of
from approx.recipe import HEALED, TRAINED
from approx.searching.search import FOUND
from approx.tasks.metrics import METRICS
from bench import cpu_page, pages
from reports import sources

# The README's table: the record whose texts are as long as what was timed, and where; the one of SQuAD with healed
# variants, and the one with all mechanisms.
LONG, LENGTHS = "genres", (512, 2048)
SQUAD, SQUAD_LENGTH, UNHEALED = "heal-squad", 384, "minilm-squad"
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
    """The README with the output of the quickstart, and its table of quality and speed."""
    made = {name: sources.opened(records, name) for name in (LONG, SQUAD, UNHEALED, "quickstart")}
    shown = made["quickstart"]
    text = f"{printed(shown)}\nFrom {sources.where(shown, 'quickstart', 'reports')}."
    page = marked(page, "quickstart", text)
    return marked(page, "results", results(made[LONG], made[SQUAD], made[UNHEALED]))


def in_healing(page: str, records: Path) -> str:
    """docs/healing.md with a table for each record named heal-*."""
    tables = [_healed(sources.opened(records, path.name), path.name) for path in sorted(records.glob("heal-*"))]
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
    for shown in (*map(quality_table, made.quality), *speed_tables(made.speed[-1:])):
        console.print(shown)
    written = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return "\n".join(["```text", *(line.rstrip() for line in written.splitlines() if line.strip()), "```"])


def results(long: Record, squad: Record, unhealed: Record) -> str:
    """The README's table: quality and speed at the same lengths, a row for each variant of both records.

    Args:
        long: A record whose texts fill `LENGTHS`, and that was timed at these.
        squad: A record of SQuAD with healed variants, timed at `SQUAD_LENGTH`.
        unhealed: A record of the same questions, for variants that were not healed.
    """
    read = {entry.tokens.median: entry for entry in long.quality if entry.tokens}
    columns = [(read[length], _timed(long, length)) for length in LENGTHS]
    columns.append((squad.quality[0], _timed(squad, SQUAD_LENGTH)))
    heads = [f"documents of {length:,} tokens: accuracy | speed" for length in LENGTHS]
    heads.append("SQuAD: F1 | healed | speed")
    rows = [["attention", *heads], ["---", *["---|--:"] * len(LENGTHS), "---|---|--:"]]
    exact = [f"{_in_per_cent(entry, entry.base.scores)} | {_exact(speed)}" for entry, speed in columns]
    rows.append(["exact", *exact[:-1], exact[-1].replace(" | ", f" | {_quality(columns[-1][0], TRAINED)} | ")])
    rows.append(["*no attention: the ceiling*", *(f"– | {_ceiling(speed)}" for _, speed in columns[:-1])])
    rows[-1].append(f"– | – | {_ceiling(columns[-1][1])}")
    names = [variant.name for variant in long.variants]
    names += [variant.name for variant in squad.variants if not variant.name.endswith((HEALED, TRAINED))]
    for name in dict.fromkeys(names):
        row = [f"{_quality(entry, name)} | {_speed(speed, name)}" for entry, speed in columns[:-1]]
        entry, speed = columns[-1]
        known = entry if any(variant.name == name for variant in entry.variants) else unhealed.quality[0]
        row.append(f"{_quality(known, name)} | {_quality(entry, name + HEALED)} | {_speed(speed, name + HEALED)}")
        rows.append([f"`{name.partition(' ')[0]}`{name.partition(' ')[1]}{name.partition(' ')[2]}", *row])
    machine, entry, tokens = long.environment, read[LENGTHS[-1]], squad.quality[0].tokens
    (variant, *_), timed = entry.variants, long.speed[0]
    assert variant.margin is not None
    assert tokens is not None
    caption = (
        "Scores in per cent; in brackets the 95 % interval of the difference from exact attention, in points; **bold: no loss** "
        f"beyond {100 * variant.margin:.0f} point. Speed: time of the best exact attention of the machine divided "
        f"by that of the row; {timed.dtype}, batch {timed.batch}, {machine['processor']}, "
        f"{machine['threads']} threads, torch {machine['torch']}; bold is faster beyond the noise. Documents: {entry.examples} texts "
        "of the Brown corpus, cut to that length; a small model trained for minutes, mostly on shorter texts, so compare within a column. "
        f"{_of_chance(long)}SQuAD: {squad.quality[0].examples:,} questions of {tokens.median} tokens in the median{_longest(tokens)}; "
        f"timed at {SQUAD_LENGTH}; **healed** is after [minutes of training](docs/healing.md) on other articles, which exact "
        "attention got too. Every mechanism at the defaults of its version, unless its settings are named. From "
        + "; ".join(
            sources.where(made, name, "reports") for made, name in ((long, LONG), (squad, SQUAD), (unhealed, UNHEALED))
        )
        + "."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", caption])


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
    return f"{shown} ({low:+.1f} … {high:+.1f})"


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
            healed = scored.get(variant.name + HEALED)
            if healed is None:
                continue
            value = healed.scores[metric]
            cells = [
                _with_interval(metric, scored[variant.name]),
                _with_interval(metric, healed),
                f"{_against(metric, value, exact)}, {_direction(metric, healed)}",
                _training(trained.get(healed.name)),
            ]
            rows.append(f"| {variant.name} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"From {sources.where(made, name, '../reports')}.", ""])


def _against(metric: str, value: float, exact: float) -> str:
    """A score next to that of exact attention: the share kept, or how much more of what should be small."""
    if not METRICS[metric].lower_is_better:
        return f"{100 * value / exact:.1f} % kept"
    if METRICS[metric].fraction:
        return f"{100 * (value - exact):+.1f} points"
    return f"{100 * (value / exact - 1):+.1f} %"


def _score(metric: str, value: float) -> str:
    return f"{100 * value:.1f}" if METRICS[metric].fraction else f"{value:.3f}"


def _with_interval(metric: str, variant: QualityVariant) -> str:
    score = _score(metric, variant.scores[metric])
    if variant.interval is None:
        return score
    scale, digits = (100, 1) if METRICS[metric].fraction else (1, 4)
    low, high = (scale * end for end in variant.interval)
    exact = "" if wording.tested(variant) else "; attention is exact on these inputs"
    return f"{score} ({low:+.{digits}f} … {high:+.{digits}f}{exact})"


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
