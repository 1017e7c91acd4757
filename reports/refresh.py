"""Make the pages of all records, the tables of README.md and docs/, and pictures: `python reports/refresh.py [--check]`.

Nothing is measured here: each report.json under reports holds what `approx run` measured, each record.json what a
benchmark did. Patterns are counted and drawn again. The picture of the README is taken by a headless Chromium, when the page
that it shows has changed.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from approx.evaluation import record
from approx.patterns import figures, find_pattern, pattern_names
from approx.patterns.study import draw
from approx.publishing.report import write_report
from bench import calibration, cpu_page, defaults, estimates, gpu_page, growth, offline, pages, papers
from reports import clustered_paper, long_documents, reliability, tables

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "reports"
# Benchmarks with one record, by its folder; those of CPUs have one a processor, those of papers one an experiment.
BENCHMARKS = {
    "calibration": calibration.report,
    "defaults": defaults.report,
    "estimates": estimates.report,
    "gpu": gpu_page.report,
    "growth": growth.report,
    "kernels": offline.report,
    **{folder.name: cpu_page.report for folder in tables.processors(RECORDS)},
    **{
        f"papers/{name}": report
        for name, (_, report) in papers.EXPERIMENTS.items()
        if (RECORDS / "papers" / name / pages.RECORD).is_file()
    },
}
# Documents with tables in them.
DOCUMENTS = {
    ROOT / "README.md": tables.in_readme,
    ROOT / "docs" / "healing.md": tables.in_healing,
    ROOT / "docs" / "papers.md": papers.in_docs,
    ROOT / "docs" / "search.md": tables.in_search,
    ROOT / "docs" / "speed.md": tables.in_speed,
}
# The reports whose pages are kept; of the others there are the record, the text and the tables.
SHOWN = (
    "genres",
    "heal-squad",
    "heal-sst2",
    "long-documents",
    "minilm-squad",
    "minilm-sst2",
    "quickstart",
    "search-imdb",
    "smollm2",
    "whisper",
)
DRAWN: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "ltr": ("ltr", 1024, False, {}),
    "strided-causal": ("strided", 1024, True, {"stride": 32}),
    "fixed-causal": ("fixed", 1024, True, {"stride": 32, "summary": 4}),
    "bigbird": ("bigbird", 1024, False, {}),
}
COUNTED = 2048
# The picture of the README, the page that it shows, and names of the browser that takes it.
PICTURE, PICTURED = ROOT / "docs" / "images" / "report.png", RECORDS / "quickstart" / "index.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OF_PAGE = "sha256 of the page"


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
    for page in (clustered_paper, long_documents):
        page.write(RECORDS, out)
    for path in sorted(RECORDS.glob("*/report.json")):
        made = record.load(path)
        # The data may be licensed for research only.
        for entry in (entry for task in made.quality for entry in task.variants if entry.worst):
            entry.worst = []
        write_report([made], folder := out / path.parent.name, force=True)
        if folder.name not in SHOWN:
            (folder / "index.html").unlink()
    for name, report in BENCHMARKS.items():
        pages.write_page(report, RECORDS / name, out / name)
    reliability.write(RECORDS / "reliability", out / "reliability")
    return {path: fill(path.read_text(encoding="utf-8"), RECORDS) for path, fill in DOCUMENTS.items()}


def page_of_picture(picture: Path) -> str | None:
    """The hash of the page that a picture was taken of; None if it does not say."""
    with Image.open(picture) as opened:
        return opened.info.get(_OF_PAGE)


def take_picture(page: Path, picture: Path) -> None:
    """Take a picture of the first screen of a page, and note of which page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(
            f"{picture.relative_to(ROOT)} is not of {page.relative_to(ROOT)} as it is; install Chromium to take it again"
        )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1160"]
    with tempfile.TemporaryDirectory() as scratch:
        taken = Path(scratch) / "page.png"
        subprocess.run(
            [browser, *options, f"--screenshot={taken}", page.as_uri()], check=True, capture_output=True, timeout=300
        )
        with Image.open(taken) as opened:
            about = PngInfo()
            about.add_text(_OF_PAGE, hashlib.sha256(page.read_bytes()).hexdigest())
            opened.convert("RGB").save(picture, pnginfo=about, optimize=True)


def main() -> int:
    """Refresh, or with --check say what is not fresh; 1 if anything is not."""
    if "--check" not in sys.argv:
        for document, text in refresh(RECORDS).items():
            document.write_text(text, encoding="utf-8")
        if page_of_picture(PICTURE) != hashlib.sha256(PICTURED.read_bytes()).hexdigest():
            take_picture(PICTURED, PICTURE)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        documents = refresh(Path(scratch))
        stale = [document for document, text in documents.items() if document.read_text(encoding="utf-8") != text]
        for path in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            current = RECORDS / path.relative_to(scratch)
            # Another version of matplotlib draws the same figures with other bytes.
            drawn = path.suffix in (".html", ".svg")
            if not current.is_file() or (not drawn and current.read_bytes() != path.read_bytes()):
                stale.append(current)
    if page_of_picture(PICTURE) != hashlib.sha256(PICTURED.read_bytes()).hexdigest():
        stale.append(PICTURE)
    for path in stale:
        sys.stderr.write(f"{path.relative_to(ROOT)} differs from what its record says; run python reports/refresh.py\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
