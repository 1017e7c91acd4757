"""Make the pages, the tables of README.md and docs/speed.md and the pictures of patterns: `python reports/refresh.py [--check]`.

Nothing is measured here: each report.json under reports holds what was measured, `approx run` makes them. Patterns are
counted and drawn again.
"""

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

from approx.cli.figures import quality_table, speed_tables
from approx.evaluation import record
from approx.evaluation.record import Quality, Record, Scores, Speed, Tokens
from approx.patterns import figures, find_pattern, pattern_names
from approx.patterns.study import draw
from approx.publishing import wording
from approx.publishing.report import write_report
from approx.publishing.summary import variant_of
from approx.recipe import HEALED, TRAINED
from bench import growth
from reports import clustered_paper, cpu_speed, healing, long_documents, reliability, searches, sources

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SPEED = ROOT / "docs" / "speed.md"
HEALING = ROOT / "docs" / "healing.md"
SEARCH = ROOT / "docs" / "search.md"
# The README's table: the record whose texts are as long as what was timed, and where; the one of SQuAD with healed
# variants, and the one with all mechanisms.
LONG, LENGTHS = "genres", (512, 2048)
SQUAD, SQUAD_LENGTH, UNHEALED = "heal-squad", 384, "minilm-squad"
# The reports whose pages are kept; of the others there are the record, the text and the tables.
SHOWN = (
    "genres",
    "heal-speech",
    "heal-squad",
    "heal-sst2",
    "long-documents",
    "minilm-squad",
    "minilm-sst2",
    "quickstart",
    "search-imdb",
    "search-squad",
)
# Columns of the terminal whose output the README shows.
WIDTH = 136
DRAWN: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "ltr": ("ltr", 1024, False, {}),
    "strided-causal": ("strided", 1024, True, {"stride": 32}),
    "fixed-causal": ("fixed", 1024, True, {"stride": 32, "summary": 4}),
    "bigbird": ("bigbird", 1024, False, {}),
}
COUNTED = 2048


def in_readme(readme: str, records: Path) -> str:
    """The README with the output of the quickstart and the table of quality and speed made again between their markers."""
    made = {name: sources.opened(records, name) for name in (LONG, SQUAD, UNHEALED, "quickstart")}
    shown = made["quickstart"]
    for name, text in (
        ("quickstart", f"{printed(shown)}\nFrom {sources.where(shown, 'quickstart', 'reports')}."),
        ("results", results(made[LONG], made[SQUAD], made[UNHEALED])),
    ):
        begin, end = f"<!-- {name}: made by reports/refresh.py -->", f"<!-- end of {name} -->"
        before, _, rest = readme.partition(begin)
        _, _, after = rest.partition(end)
        readme = f"{before}{begin}\n{text}\n{end}{after}"
    return readme


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
    exact = [f"{_score(entry, entry.base.scores)} | {_exact(speed)}" for entry, speed in columns]
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


def _score(entry: Quality, scores: Scores) -> str:
    return f"{100 * scores[entry.metric]:.1f}"


def _quality(entry: Quality, name: str) -> str:
    variant = variant_of(entry.variants, name)
    if variant is None:
        return "–"
    score = _score(entry, variant.scores)
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


def patterns(out: Path) -> None:
    """Write the page about patterns: the figures of all, each at its defaults, and pictures of some."""
    rows = [
        "| pattern | settings | keys a query sees | of all pairs | tiles of 64 | rewritten | reached by its steps |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name in pattern_names():
        # The causal form of those that have no other.
        pattern = find_pattern(name, COUNTED, name == "sinks", {})
        found = figures(pattern)
        counts, degree = found["merged"], found["merged"]["in_degree"]
        shares = (counts["density"], counts["block_density"], counts["rewritten"]["block_density"])
        cells = [f"{degree['min']} … {degree['max']}", *(f"{100 * share:.1f} %" for share in shares)]
        rows.append(
            f"| `{name}` | {pattern.description} | {' | '.join(cells)} | {100 * found['flow']['coverage']:.0f} % |"
        )
    parts = [
        "# Sparse patterns",
        f"Each at its defaults over {COUNTED:,} tokens, its steps merged, as `approx pattern NAME --length {COUNTED} --no-draw` counts "
        "them (`sinks` with `--causal`). *Tiles of 64* is the share of 64 × 64 tiles that hold an edge: what a kernel on "
        "blocks computes; *rewritten* is what is left of it when keys are gathered or the sequence is permuted, exactly. *Reached by "
        "its steps* is the share of pairs in which information has passed from one position to the other after all steps in their order.",
        "\n".join(rows),
    ]
    for folder, (name, length, causal, settings) in DRAWN.items():
        draw(find_pattern(name, length, causal, settings), out / folder, suffixes=[".svg"])
        words = [f"approx pattern {name} --length {length}", *(["--causal"] if causal else [])]
        words += [f"--set {key}={value}" for key, value in settings.items()]
        parts += [f"## {name}", f"`{' '.join(words)}`", f"![steps of {name}]({folder}/steps.svg)"]
        parts.append(f"![information flow of {name}]({folder}/flow.svg)")
    (out / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def refresh(out: Path) -> dict[Path, str]:
    """Write every report and the page about patterns into `out`; return the texts of the documents with tables in them."""
    patterns(out / "patterns")
    records = ROOT / "reports"
    for page in (clustered_paper, long_documents):
        page.write(records, out)
    for path in sorted(records.glob("*/report.json")):
        write_report([record.load(path)], folder := out / path.parent.name, force=True)
        if folder.name not in SHOWN:
            (folder / "index.html").unlink()
    growth.write(ROOT / "reports" / "growth", out / "growth")
    reliability.write(ROOT / "reports" / "reliability", out / "reliability")
    cpu_speed.write(ROOT / "reports", out)
    if (ROOT / "reports" / "gpu" / "record.json").is_file():
        from bench import gpu_page

        gpu_page.write(ROOT / "reports" / "gpu", out / "gpu")
    return {
        README: in_readme(README.read_text(encoding="utf-8"), records),
        HEALING: healing.in_page(HEALING.read_text(encoding="utf-8"), records),
        SEARCH: searches.in_page(SEARCH.read_text(encoding="utf-8"), records),
        SPEED: cpu_speed.in_page(SPEED.read_text(encoding="utf-8"), ROOT / "reports"),
    }


def main() -> int:
    """Refresh, or with --check say what is not fresh; 1 if anything is not."""
    if "--check" not in sys.argv:
        for document, text in refresh(ROOT / "reports").items():
            document.write_text(text, encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        documents = refresh(Path(scratch))
        stale = [document for document, text in documents.items() if document.read_text(encoding="utf-8") != text]
        for path in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            current = ROOT / "reports" / path.relative_to(scratch)
            # Another version of matplotlib draws the same figures with other bytes.
            drawn = path.suffix in (".html", ".svg")
            if not current.is_file() or (not drawn and current.read_bytes() != path.read_bytes()):
                stale.append(current)
    for path in stale:
        sys.stderr.write(f"{path.relative_to(ROOT)} differs from what its record says; run python reports/refresh.py\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
