"""What all benchmarks share: parts that are stored as they are measured, records, and the pages made from records.

A benchmark with one record is a function that measures it, and one that makes its page; `main` does the rest.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from approx.errors import ApproxError, Exit
from approx.evaluation.record import in_lines
from approx.publishing.plots import paths_in_lines

RECORD, PAGE = "record.json", "report.md"
MODES = {"forward": "forward", "train": "forward and backward"}
# From a record, and the folder for its pictures, to its page in Markdown.
Report = Callable[[dict[str, Any], Path], str]


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of an option, such as lengths; argparse reports invalid ones."""
    if not all(one.isdecimal() and int(one) for one in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text} was asked for; allowed are whole numbers from 1 on, as in 512,1024")
    return tuple(int(one) for one in text.split(","))


def stored(folder: Path, name: str) -> dict[str, Any] | None:
    """The stored result of a part; None if it was not measured."""
    path = _path(folder, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def keep(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Store the result of a part."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, name)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    half.replace(path)


def seed(folder: Path, made: dict[str, dict[str, Any]]) -> None:
    """Store results that a record has and the folder lacks, by name: a fresh checkout has only the record."""
    for name, result in made.items():
        if not _path(folder, name).is_file():
            keep(folder, name, result)


def all_stored(folder: Path) -> list[dict[str, Any]]:
    """All stored results, ordered by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '.').replace(' ', '_')}.json"


def find(made: dict[str, Any], **wanted: Any) -> dict[str, Any] | None:
    """The part of a record with these properties."""
    return next((part for part in made["parts"] if all(part[key] == value for key, value in wanted.items())), None)


def row(part: dict[str, Any] | None, name: str | None) -> dict[str, Any] | None:
    """The result of one contender in a part; None if it did not run or did not finish."""
    rows = [] if part is None else part["contenders"]
    return next((one for one in rows if one["name"] == name and one["status"] == "ok"), None)


def names(parts: list[dict[str, Any]]) -> list[str]:
    """All contenders of some parts, in order."""
    return list(dict.fromkeys(one["name"] for part in parts for one in part["contenders"]))


def spread_of(ms: np.ndarray) -> dict[str, float]:
    """What a contender's row says of its milliseconds: the median, the middle four fifths, and the least."""
    low, middle, high = (float(x) for x in np.quantile(ms, (0.1, 0.5, 0.9)))
    return {"median_ms": middle, "p10_ms": low, "p90_ms": high, "least_ms": float(ms.min())}


def noise(part: dict[str, Any]) -> float:
    """The ratio by which equal contenders of a part may seem to differ: smaller gains are indistinguishable from noise.

    SDPA is compared with itself, and mechanisms with no attention at all, which does strictly less; when decoding, that
    still copies a cache, so a state may be faster.
    """
    seen = [part["spread"] or 1.0]
    free = next((one for one in part["contenders"] if one["role"] == "ceiling" and one["status"] == "ok"), None)
    if free and part["suite"] != "decode":
        seen += [
            free["median_ms"] / one["median_ms"]
            for one in part["contenders"]
            if one["role"] == "variant" and one["status"] == "ok"
        ]
    return max(*seen, 1 / seen[0])


def opened(folder: Path) -> dict[str, Any]:
    """The record of a folder.

    Raises:
        ApproxError: if there is none.
    """
    path = folder / RECORD
    if not path.is_file():
        raise ApproxError(f"{path} is not there. Measure it: the same command without --redraw.", Exit.UNAVAILABLE)
    return json.loads(path.read_text(encoding="utf-8"))


def write_record(path: Path, made: Any) -> None:
    """Write a record as JSON, in which what fits into a line is one, so that rows can be read and compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_lines(made) + "\n", encoding="utf-8")


def write_page(report: Report, source: Path, output: Path) -> str:
    """Write the page and the pictures of a folder's record into that folder or another; returns the page."""
    made = opened(source)
    output.mkdir(parents=True, exist_ok=True)
    text = report(made, output)
    (output / PAGE).write_text(text, encoding="utf-8")
    return text


def main(
    about: str | None, measure: Callable[..., dict[str, Any]], report: Report, *, on_real_texts: bool = False
) -> dict[str, Any]:
    """Run a benchmark of one record: measure it, write it and its page, and print the page.

    Args:
        about: The docstring of the benchmark.
        measure: Makes the record; if `on_real_texts`, from the folders of data and checkpoints.
        report: Makes the page.
        on_real_texts: Whether there are options for these folders.

    Returns:
        The record.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder for the record and what is made from it"
    )
    for name in ("data", "checkpoints") if on_real_texts else ():
        where = os.environ.get(f"APPROX_{name.upper()}_DIR")
        parser.add_argument(f"--{name}", type=Path, default=where, help=f"folder of {name}; $APPROX_{name.upper()}_DIR")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the page from the record")
    options = parser.parse_args()
    if not options.redraw:
        folders = [options.data, options.checkpoints] if on_real_texts else []
        if None in folders:
            parser.error("name the folders of the data and the checkpoints, --data and --checkpoints")
        write_record(options.output / RECORD, measure(*folders))
    try:
        sys.stdout.write(write_page(report, options.output, options.output))
    except ApproxError as error:
        parser.exit(error.exit_code, f"{error}\n")
    return opened(options.output)


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


def asked_and_found(value: float | None, asked: float, *, at_most: bool = False) -> str:
    """The target, the measured value, and whether it was reached."""
    if value is None:
        return f"{asked:g}: not measured"
    reached = value <= asked if at_most else value >= asked
    return f"{asked:g}: {value:.2f}, {'reached' if reached else 'not reached'}"


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float] = (8, 5.5), legend: float = 7.5) -> Iterator[Axes]:
    """Axes of a figure that is written as an SVG at the end, the same on every day."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "path", "font.size": 9})
        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(drawn)
        axes = drawn.add_subplot()
        yield axes
        axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside right center", fontsize=legend, frameon=False)
        drawn.savefig(buffer := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
        path.write_text(paths_in_lines(buffer.getvalue()), encoding="utf-8")


def line(axes: Axes, number: int, name: str, points: Sequence[tuple[float, float]], colour: str | None = None) -> None:
    """Draw one of many lines, which have ten colours and three styles, or a colour of their own."""
    style = number // 10 % 3
    dashes, marker = ("-", "--", ":")[style], "osD"[style]
    axes.plot(*zip(*points, strict=True), label=name, color=colour, ms=3, linestyle=dashes, marker=marker)


def draw(lines: Mapping[str, Sequence[tuple[int, float]]], speedup: str, path: Path) -> None:
    """Plot points over tokens, one line per contender; both axes are logarithmic.

    Args:
        lines: Name -> tokens and speed-up.
        speedup: Description of the speed-up.
        path: The SVG file.
    """
    with figure(path, (9, 5.5), legend=7) as axes:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for number, (name, points) in enumerate(lines.items()):
            line(axes, number, name, points)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.set_xlabel("tokens")
        axes.set_ylabel(speedup)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
