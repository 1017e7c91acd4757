"""Make every page again from its record, the README's table and the pictures of patterns: `python reports/refresh.py [--check]`.

Nothing is measured here: the records under reports/records hold what was measured, `approx run` makes them. Patterns are
counted and drawn anew.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

from approx.evaluation import record
from approx.patterns import figures, find_pattern, pattern_names
from approx.patterns.study import draw
from approx.publishing import wording
from approx.publishing.report import write_report
from bench import growth
from reports import clustered_paper, cpu_speed, long_documents

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SHOWN = "minilm-sst2"
DRAWN: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "ltr": ("ltr", 1024, False, {}),
    "strided-causal": ("strided", 1024, True, {"stride": 32}),
    "fixed-causal": ("fixed", 1024, True, {"stride": 32, "summary": 4}),
    "bigbird": ("bigbird", 1024, False, {}),
}
COUNTED = 2048
BEGIN, END = "<!-- results: made by reports/refresh.py -->", "<!-- end of results -->"


def results(made: dict[str, Any]) -> str:
    """The README's table: quality and speed of one record side by side, a row a variant; speed is over default SDPA."""
    quality = made["quality"][0]
    lengths = [row["length"] for row in made["speed"]]
    head = ["attention", f"{quality['task']} {quality['metric']}", "difference (95 %)", "verdict", "approximated on"]
    lines = [head + [f"×, {length} tokens" for length in lengths]]
    base = quality["base"]["scores"][quality["metric"]]
    ceilings = [
        "–" if row["ceiling"] is None else f"{row['ceiling']['ratio'] / _default(row):.2f}" for row in made["speed"]
    ]
    lines.append(["exact (default SDPA)", f"{100 * base:.1f}", "", "", ""] + ["1"] * len(lengths))
    lines.append(["exact, the best way here", *[""] * 4, *(f"{1 / _default(row):.2f}" for row in made["speed"])])
    lines.append(["*no attention at all: the ceiling*", "", "", "", "", *ceilings])
    for variant in quality["variants"]:
        low, high = (100 * end for end in variant["interval"])
        lines.append(
            [
                variant["name"],
                f"{100 * variant['scores'][quality['metric']]:.1f}",
                f"{100 * variant['difference']:+.1f} ({low:+.1f} … {high:+.1f})",
                variant["verdict"],
                wording.approximated(variant, quality),
                *(_ratio(row, variant["name"]) for row in made["speed"]),
            ]
        )
    rows = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|" + "---|" * len(head) + "--:|" * len(lengths)
    examples = f"{quality['examples']} examples" + (", a subset" if quality["subset"] else "")
    tokens = quality["tokens"]
    machine = made["environment"]
    caption = (
        f"{made['checkpoint']['parameters'] / 1e6:.0f} M parameters, {made['checkpoint']['layers']} layers, {examples}; forward "
        f"time relative to PyTorch's default SDPA, {made['speed'][0]['dtype']}, batch {made['speed'][0]['batch']}, "
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}. Above 1 is "
        f"faster; bold is faster than the best exact attention of the same run. The sentences have {tokens['median']} tokens in the median and {tokens['longest']} at most, so the quality is that of "
        "short inputs; longer ones are timed, beyond 512 tokens on extended position tables."
    )
    return "\n".join([rows[0], rule, *rows[1:], "", caption])


def _ratio(row: dict[str, Any], name: str) -> str:
    variant = next(variant for variant in row["variants"] if variant["name"] == name)
    if variant["ratio"] is None:
        return variant["status"]
    text = f"{variant['ratio'] / _default(row):.2f}"
    return f"**{text}**" if variant["interval"][0] > 1 else text


def _default(row: dict[str, Any]) -> float:
    """Speed of default SDPA relative to the best exact attention, which all ratios of a record are over."""
    return 1.0 if row["default"] is None else row["default"]["ratio"]


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
        rows.append(f"| `{name}` | {pattern.told} | {' | '.join(cells)} | {100 * found['flow']['coverage']:.0f} % |")
    parts = [
        "# Sparse patterns",
        f"Each at its defaults over {COUNTED:,} tokens, its steps merged, as `approx pattern NAME --length {COUNTED} --no-draw` counts "
        "them (`sinks` with `--causal`). *Tiles of 64* is the share of 64 × 64 tiles that hold an edge: what a kernel on "
        "blocks computes; *rewritten* is what is left of it when keys are gathered or the sequence is permuted, exactly. *Reached by "
        "its steps* is the share of pairs in which a position has heard of the other after all steps in their order.",
        "\n".join(rows),
    ]
    for folder, (name, length, causal, given) in DRAWN.items():
        draw(find_pattern(name, length, causal, given), out / folder, suffixes=[".svg"])
        words = [f"approx pattern {name} --length {length}", *(["--causal"] if causal else [])]
        words += [f"--set {key}={value}" for key, value in given.items()]
        parts += [f"## {name}", f"`{' '.join(words)}`", f"![steps of {name}]({folder}/steps.svg)"]
        parts.append(f"![information flow of {name}]({folder}/flow.svg)")
    (out / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def refresh(readme: str, out: Path) -> str:
    """Write every report and the page about patterns into `out` and return the README with its table made again."""
    patterns(out / "patterns")
    for page in (clustered_paper, long_documents):
        page.write(ROOT / "reports" / "records", out)
    for path in sorted((ROOT / "reports" / "records").glob("*.json")):
        write_report([record.load(path)], out / path.stem)
    growth.write(ROOT / "reports" / "growth", out / "growth")
    cpu_speed.write(ROOT / "reports", out)
    if (ROOT / "reports" / "gpu" / "record.json").is_file():
        from bench import gpu_page

        gpu_page.write(ROOT / "reports" / "gpu", out / "gpu")
    readme = cpu_speed.in_readme(readme, ROOT / "reports")
    table = results(record.load(ROOT / "reports" / "records" / f"{SHOWN}.json"))
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    """Refresh, or with --check say what is not fresh; 1 if anything is not."""
    readme = README.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        README.write_text(refresh(readme, ROOT / "reports"), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        stale = [] if refresh(readme, Path(scratch)) == readme else ["README.md"]
        for path in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            kept = ROOT / "reports" / path.relative_to(scratch)
            # Another version of matplotlib draws the same figures with other bytes.
            drawn = path.suffix in (".html", ".svg")
            if not kept.is_file() or (not drawn and kept.read_bytes() != path.read_bytes()):
                stale.append(str(kept.relative_to(ROOT)))
    for name in stale:
        sys.stderr.write(f"{name} is not what its record says; run python reports/refresh.py\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
