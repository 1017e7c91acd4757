"""Tables and plots of the pages made from records of benchmarks."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from approx.publishing.plots import paths_in_lines
from bench.parts import noise, row


def table(head: list[str], rows: list[list[str]], words: int = 1, remarks: int = 0) -> str:
    """A table in Markdown, whose first `words` columns and last `remarks` columns hold text and the others figures."""
    figures = len(head) - words - remarks
    lines = [head, [*["---"] * words, *["--:"] * figures, *["---"] * remarks], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ratio(part: dict[str, Any] | None, name: str, key: str) -> str:
    """A ratio of a contender, bold if its interval lies above 1 and above the noise of its part; a dash if missing."""
    contender = row(part, name)
    if part is None or contender is None or contender[key] is None:
        return "–"
    middle, low, _ = contender[key]
    return f"**{middle:.2f}**" if low > max(noise(part), 1) else f"{middle:.2f}"


def asked_and_found(value: float | None, least: float) -> str:
    """The target, the measured value, and whether it was reached."""
    if value is None:
        return f"{least:g}: not measured"
    return f"{least:g}: {value:.2f}, {'reached' if value >= least else 'not reached'}"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG that is the same on every day."""
    figure.savefig(buffer := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(paths_in_lines(buffer.getvalue()), encoding="utf-8")


def draw(lines: Mapping[str, Sequence[tuple[int, float]]], speedup: str, path: Path) -> None:
    """Plot points over tokens, one line per contender; both axes are logarithmic.

    Args:
        lines: Name -> tokens and speed-up.
        speedup: Description of the speed-up.
        path: The SVG file.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "path", "font.size": 9})
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_prop_cycle(color=matplotlib.colormaps["tab10"].colors)  # pyright: ignore[reportAttributeAccessIssue]  # a listed colormap
        for number, (name, points) in enumerate(lines.items()):
            style = {
                "linestyle": ("-", "--", ":")[number // 10 % 3],
                "marker": "osD"[number // 10 % 3],
                "markersize": 3,
            }
            axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.set_xlabel("tokens")
        axes.set_ylabel(speedup)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right center", fontsize=7, frameon=False)
        save_figure(figure, path)
