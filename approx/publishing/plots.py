"""The plots of a report: speed against length with the ceiling, quality against speed, spans, and training curves."""

import base64
import io
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit
from approx.evaluation.record import KeptExact, Layer, Quality, QualityVariant, Ratio, Record, Speed, Trained, Variant
from approx.publishing import wording
from approx.publishing.summary import longest_input, standing, variant_of
from approx.publishing.sweep import QualityRow
from approx.registry import class_facts
from approx_kernels.runtime.atomic_file import write_whole

# Placeholders that matplotlib can draw with, replaced by CSS colours.
INK, FAINT, CARD = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--faint)", CARD: "var(--card)"}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    # A dollar sign in a name does not start a formula.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.edgecolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def draw(identity: str, description: str, paint: Callable[[Axes], None], inches: tuple[float, float]) -> Markup:
    """Draw one plot, whose parts have their names beside them.

    Args:
        identity: Unique in the page; prefix of all ids in the drawing.
        description: Alternative text.
        paint: Draws on the axes.
        inches: Width and height; the page scales the drawing, so a smaller one has larger text.
    """
    return _for_the_page(paths_in_lines(_saved(identity, paint, inches, ".svg").decode()), identity, description)


def draw_files(
    identity: str, description: str, paint: Callable[[Axes], None], inches: tuple[float, float]
) -> tuple[Markup, dict[str, bytes]]:
    """Draw one plot with its legend below, for the page and as files of its own on white.

    Args: as for `draw`.

    Returns:
        The drawing for the page, and suffix -> content of the file, `.svg` and `.png`.
    """
    svg = _with_palettes(paths_in_lines(_saved(identity, paint, inches, ".svg", legend=True).decode()))
    alone = svg.replace(FAINT, "#e4e6e9").replace("<svg ", '<svg style="background: #fff" ', 1)
    png = _saved(identity, paint, inches, ".png", on="white", legend=True)
    return _for_the_page(svg, identity, description), {".svg": alone.encode(), ".png": png}


def alone(drawing: str) -> str:
    """A drawing of a page as a file of its own, on white."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {names} style="background: #fff; color: #1d2126" '
    # Markup would escape what it is given.
    drawing = str(drawing).replace("<svg ", head, 1).replace(' href="#', ' xlink:href="#')
    return drawing.replace(_PAGE_COLOURS[FAINT], "#e4e6e9").replace(_PAGE_COLOURS[CARD], "#fff") + "\n"


_DPI = 150


def _saved(
    identity: str,
    paint: Callable[[Axes], None],
    inches: tuple[float, float],
    suffix: str,
    on: str | None = None,
    legend: bool = False,
) -> bytes:
    """One plot as a file, on a colour or transparent."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A user's own matplotlibrc must not change the report.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": identity})
        # A box stands for a letter that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=inches, layout="constrained")
        (FigureCanvasSVG if suffix == ".svg" else FigureCanvasAgg)(figure)
        figure.patch.set_visible(on is not None)
        figure.patch.set_facecolor(on or "none")
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        paint(axes)
        if legend and axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        undated = {"Software": None} if suffix == ".png" else dict.fromkeys(("Creator", "Date", "Format", "Type"))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], metadata=undated, dpi=_DPI if suffix == ".png" else "figure")
        return buffer.getvalue()


def paths_in_lines(svg: str) -> str:
    """An SVG with each path on a line, not each of its points: thousands of lines less in a repository."""
    return re.sub(r'\bd="[^"]*"', lambda path: " ".join(path[0].split()).replace(' "', '"'), svg)


def share_outlines(drawing: Markup, outlines: dict[str, str]) -> Markup:
    """A drawing for a page with many: its letters are those of the page, and what nobody sees of it is left out.

    Args:
        drawing: A drawing for the page.
        outlines: The outlines of the page's letters, each with its id; new ones are added.
    """
    ids: dict[str, str] = {}

    def share(path: re.Match[str]) -> str:
        ids[path[1]] = outlines.setdefault(path[2], f"letter-{len(outlines)}")
        return ""

    text = re.sub(r'<path id="([^"]*DejaVu[^"]*)" ((?:d="[^"]*" )?transform="[^"]*")/>', share, drawing)
    text = re.sub(r'href="#([^"]*)"', lambda link: f'href="#{ids.get(link[1], link[1])}"', text)
    # Only clips, markers and letters are referred to.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    # A hundredth of a point is not seen.
    numbers = r'translate\([^)]*\)|\b(?:d|x|y)="[^"]*"'
    text = re.sub(numbers, lambda part: re.sub(r"(\.\d\d)\d+", r"\1", part[0]), text)
    # Safe as markup: nothing was added to the drawing but ids.
    return Markup(re.sub(r">\s+<", "><", text))


def _with_palettes(svg: str) -> str:
    """An SVG whose images have palettes: the same pixels in a third of the bytes."""
    from PIL import Image

    def smaller(found: re.Match[str]) -> str:
        with Image.open(io.BytesIO(base64.b64decode(found[1]))) as image:
            pixels = np.asarray(image.convert("RGBA"))
        colours, level = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
        if len(colours) > _PALETTE:
            return found[0]
        return f"data:image/png;base64,{png_text(level.reshape(pixels.shape[:2]), colours)}"

    return re.sub(r"data:image/png;base64,\s*([^\"]+)", smaller, svg)


_PALETTE = 256


def png_text(level: NDArray[Any], colours: NDArray[np.uint8]) -> str:
    """A PNG as text for a page.

    Args:
        level: Number of the colour of each pixel, [n, m].
        colours: At most 256 colours, [c, 4]: red, green, blue and how opaque.
    """
    from PIL import Image

    image = Image.frombytes("P", level.shape[::-1], level.astype(np.uint8).tobytes())
    image.putpalette(colours[:, :3].tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=colours[:, 3].tobytes(), optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _for_the_page(text: str, identity: str, description: str) -> Markup:
    """Adapt the SVG to the page: no prologue, no comments, unique ids, the page's colours."""
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{identity}-", text)
    for stand_in, colour in _PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    head = f'<svg {view[0]} role="img" aria-label="{escape(description)}">'
    # Safe as markup: only numbers, ids and outlines are left, since text is outlines and comments are removed.
    return Markup(head + text[text.index(">") + 1 :].strip())


_COLUMNS = 2
_COLOURS = LinearSegmentedColormap.from_list("spans", ["#2f7fd622", "#2f7fd6"])


def spans_table(variants: list[Variant]) -> list[dict[str, str]]:
    """Lay out the spans of each variant that has any: mean, shortest and longest in tokens, and operations."""
    rows = []
    for name, layers in _with_spans(variants):
        spans = [span for layer in layers for span in layer.spans or []]
        shares = [layer.operations for layer in layers if layer.operations is not None]
        rows.append(
            {
                "name": name,
                "mean": wording.decimal(sum(spans) / len(spans), 1),
                "shortest": wording.decimal(min(spans), 0),
                "longest": wording.decimal(max(spans), 0),
                "operations": wording.percent(sum(shares) / len(shares), 1) if shares else wording.NOTHING,
            }
        )
    return rows


def spans_figure(variants: list[Variant], identity: str) -> Markup | None:
    """Draw the span of each head, a row per layer, in one panel per variant; None if no variant has spans.

    Args:
        variants: The variants of a record.
        identity: Unique in the page.
    """
    shown = _with_spans(variants)
    if not shown:
        return None
    longest = max(span for _, layers in shown for layer in layers for span in layer.spans or [])
    deepest = max(len(layers) for _, layers in shown)
    lines = -(-len(shown) // _COLUMNS)

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        for number, (name, layers) in enumerate(shown):
            line, column = divmod(number, _COLUMNS)
            place = (column / _COLUMNS + 0.06, 1 - (line + 0.82) / lines, 0.84 / _COLUMNS, 0.68 / lines)
            panel = axes.inset_axes(place)
            panel.patch.set_visible(False)
            panel.grid(False)
            for row, layer in enumerate(layers):
                spans = layer.spans or []
                panel.pcolormesh(
                    range(len(spans) + 1), [row, row + 1], [spans], cmap=_COLOURS, vmin=0, vmax=max(longest, 1)
                )
                for head, span in enumerate(spans):
                    panel.text(head + 0.5, row + 0.5, f"{span:.0f}", ha="center", va="center", fontsize=7)
            panel.set_ylim(deepest, 0)
            panel.set_yticks([row + 0.5 for row in range(len(layers))], [str(layer.layer) for layer in layers])
            heads = max(len(layer.spans or []) for layer in layers)
            panel.set_xticks([head + 0.5 for head in range(heads)], [str(head) for head in range(heads)])
            panel.tick_params(length=0, labelsize=7.5)
            panel.set_xlabel("head")
            panel.set_ylabel("layer")
            panel.set_title(name, fontsize=8.5, color=INK)

    return draw(
        identity,
        "Learned span of each head, in tokens, a row per layer. The means are in the table beside it.",
        paint,
        (7.2, lines * (0.95 + 0.27 * deepest)),
    )


def _with_spans(variants: list[Variant]) -> list[tuple[str, list[Layer]]]:
    with_spans = [(variant.name, [layer for layer in variant.layers if layer.spans]) for variant in variants]
    return [(name, layers) for name, layers in with_spans if layers]


def _kept_exact(kept: KeptExact) -> str:
    """How far each layer moves the outputs, in a sentence."""
    exact, converted = (
        ", ".join(f"{one.layer} ({wording.decimal(one.divergence, 3)})" for one in kept.layers if one.kept is which)
        for which in (True, False)
    )
    fitted = f", after {kept.steps} steps of transfer" if kept.steps else ""
    return (
        f"Layers that stay exact, with what each moves the outputs by if it alone is converted ({kept.unit}, "
        f"{wording.count(kept.inputs)} training inputs{fitted}): {exact}; the others: {converted}."
    )


def training_table(trained: Trained) -> dict[str, Any]:
    """Lay out one training: a row per mode, and the scores of held-out training examples."""
    scores = [
        ("exact attention, before training", trained.exact),
        ("before", trained.before),
        ("after", trained.after),
    ]
    return {
        "name": trained.name,
        "measure": trained.measure,
        "examples": wording.count(trained.examples),
        "held_out": wording.count(trained.held_out),
        "approximated": None if trained.approximated is None else wording.percent(trained.approximated),
        "fitted": trained.fitted,
        "helped": trained.helped,
        "kept_exact": None if trained.kept_exact is None else _kept_exact(trained.kept_exact),
        "scores": [(name, wording.decimal(value, 4)) for name, value in scores if value is not None],
        "rows": [
            {
                "mode": phase.mode,
                "steps": wording.count(phase.steps),
                "best_step": wording.count(phase.best_step),
                "parameters": wording.count(phase.parameters),
                "tokens": wording.count(phase.tokens),
                "time": wording.duration(phase.seconds),
                "ended": wording.ENDED.get(phase.ended, phase.ended),
            }
            for phase in trained.phases
        ],
    }


def training_figure(trained: Trained, colour: str, identity: str) -> Markup | None:
    """Draw the loss of each mode against its steps, and below it the measure that chose the best step.

    Returns None if nothing was trained, because the budget was met already.

    Args:
        trained: An entry of "trainings".
        colour: Colour of the variant.
        identity: Unique in the page.
    """
    phases = trained.phases
    if not phases:
        return None

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        for number, phase in enumerate(phases):
            width = 1 / len(phases)
            loss = axes.inset_axes((number * width + 0.09, 0.56, width - 0.12, 0.36))
            value = axes.inset_axes((number * width + 0.09, 0.08, width - 0.12, 0.36), sharex=loss)
            for part, key, label in (
                (loss, "loss", "training loss"),
                (value, "validation", f"held-out {phase.measure}"),
            ):
                part.patch.set_visible(False)
                points = [
                    (point.step, measured) for point in phase.curve if (measured := getattr(point, key)) is not None
                ]
                if points:
                    steps, values = zip(*points, strict=True)
                    part.plot(
                        steps,
                        values,
                        color=colour,
                        linewidth=1.4,
                        # A line of a single point is invisible.
                        marker="o" if key == "validation" or len(points) == 1 else None,
                        markersize=3,
                    )
                part.set_ylabel(label)
                part.yaxis.set_major_locator(MaxNLocator(4))
                part.xaxis.set_major_locator(MaxNLocator(4, integer=True))
                part.xaxis.set_major_formatter(FuncFormatter(lambda step, _: wording.count(int(step))))
            value.axvline(phase.best_step, color=colour, linewidth=0.8, linestyle=":")
            loss.set_title(phase.mode, fontsize=9)
            loss.tick_params(labelbottom=False)
            value.set_xlabel("steps")

    modes = " and ".join(phase.mode for phase in phases)
    title = f"Training of {trained.name}: loss and held-out {phases[-1].measure} against steps, of {modes}."
    return draw(
        identity,
        f"{title} A dotted line marks the step whose weights were kept.",
        paint,
        (3.6 * len(phases) + 1.2, 4.4),
    )


def write_pictures(pictures: dict[str, dict[str, bytes]], folder: Path) -> list[Path]:
    """Write pictures into a folder, each file atomically.

    Args:
        pictures: Name -> suffix -> content.
        folder: Created if missing; older pictures of these names are replaced.

    Returns:
        The written files.

    Raises:
        ApproxError: if the folder cannot be written.
    """
    written = []
    try:
        for name, files in pictures.items():
            for suffix, file in files.items():
                write_whole(folder / f"{name}{suffix}", file)
                written.append(folder / f"{name}{suffix}")
    except OSError as error:
        raise ApproxError(f"Pictures cannot be written to {folder}: {error.strerror}.", Exit.UNAVAILABLE) from None
    return written


# For mechanisms without a colour.
_OTHER_COLOURS = ("#c8518f", "#8a9a2b", "#b5813a", "#4aa0c8", "#d05a5a", "#6f7bd8")
_MARKERS = "osD^vPX*"
_RATIOS = [2.0**power for power in range(-7, 8)]
# The least range of every axis of ratios, so that it has a tick besides 1×.
_LEAST = (0.7, 2.0)
_LINEAR_POINTS, _APART = 2, 0.045
_POINTS = (-1000, -500, -200, -100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_CHARACTERS = 28
# A margin of so many times the largest difference would cover the plot.
_WIDEST_MARGIN = 3


def colours(record: Record) -> dict[str, str]:
    """The colour of each variant: that of the mechanism of most of its converted layers, exact ones aside."""
    exact, chosen = _facts("always_exact"), {}
    for variant in record.variants:
        counts = Counter(layer.mechanism for layer in variant.layers)
        approximate = {name: number for name, number in counts.items() if not exact.get(name)} or counts
        mechanism = min(approximate, key=lambda name: (-approximate[name], name)) if approximate else "full"
        chosen[variant.name] = colour_of(mechanism)
    # A record that was edited may measure variants that it does not describe.
    measured = [entry.name for part in (*record.quality, *record.speed) for entry in part.variants]
    return {name: _other_colour(name) for name in measured} | chosen


def colour_of(mechanism: str) -> str:
    """The colour of a mechanism: that of its class, or one that follows from its name."""
    return _facts("colour").get(mechanism) or _other_colour(mechanism)


def _facts(attribute: str) -> Mapping[str, Any]:
    # Importing the mechanisms imports torch, which a report does without.
    return class_facts("approx.mechanisms", "BUILT_IN", attribute)


def _other_colour(name: str) -> str:
    # Python's own hash of a string differs between processes.
    return _OTHER_COLOURS[zlib.crc32(name.encode("utf-8", "replace")) % len(_OTHER_COLOURS)]


def speed_figure(rows: list[Speed], record: Record, identity: str) -> Markup | None:
    """Plot speed relative to exact attention against length, with the ceiling and crossovers, for one machine and setting.

    None if there is nothing to plot, because no speed is settled.

    Args:
        rows: Entries of "speed" that differ only in length, shortest first.
        record: Their record.
        identity: Unique in the page; prefix of all ids in the drawing.
    """
    relative = [(row, one) for row in rows for one in (*row.variants, *([row.ceiling] if row.ceiling else []))]
    # Variants that ran out of memory are marked too.
    if all(one.status == "ok" and row.believed(one).ratio is None and row.base.status == "ok" for row, one in relative):
        return None
    setting = f"on {wording.setting(rows[0])}. The figures are in the table beside it."
    if len(rows) == 1:
        title = f"Speed relative to exact attention at {wording.count(rows[0].length)} tokens, {setting}"
        height = 1.2 + 0.22 * len(rows[0].variants)
        return draw(identity, title, lambda axes: _paint_row(axes, rows[0], record), (5.4, height))

    def paint(axes: Axes) -> None:
        axes.set_yscale("log", base=2)
        _length_axis(axes, rows)
        noise = [(row.length, *row.spread.interval) for row in rows if row.spread and row.spread.interval]
        if noise:
            lengths, low, high = zip(*noise, strict=True)
            axes.fill_between(lengths, low, high, color=INK, alpha=0.12, linewidth=0)
        axes.axhline(1, color=_exact_colour(), linewidth=1.4)
        ends = [End(rows[-1].length, 1.0, "exact", _exact_colour())]
        ceiling = [(row.length, ratio) for row in rows if row.ceiling and (ratio := row.believed(row.ceiling).ratio)]
        if ceiling:
            # A line of a single point is invisible.
            mark = {"marker": "_" if len(ceiling) == 1 else None, "markersize": 14, "label": "ceiling"}
            axes.plot(*zip(*ceiling, strict=True), color=INK, linestyle=(0, (5, 3)), linewidth=1.2, **mark)
            ends.append(End(*ceiling[-1], "ceiling", INK))
        crossed = {one.name: one.length for one in record.crossover}
        for name, (colour, marker) in _styles(record).items():
            entries = [(row, entry) for row in rows if (entry := variant_of(row.variants, name))]
            seen = [(row.length, row.believed(entry)) for row, entry in entries]
            points = [(length, one.ratio, *one.interval) for length, one in seen if one.ratio and one.interval]
            if points:
                lengths, ratios, low, high = zip(*points, strict=True)
                axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(lengths, ratios, color=colour, marker=marker, markersize=5, linewidth=1.8, label=name)
            lost = [row.length for row, entry in entries if standing(row, entry) == "out of memory"]
            if lost:
                style = {"marker": "x", "markersize": 7, "markeredgewidth": 2, "linestyle": ""}
                at_the_bottom = axes.get_xaxis_transform()
                axes.plot(
                    lost, [0.04] * len(lost), transform=at_the_bottom, color=colour, label=f"{name}: lost", **style
                )
            if points:
                ends.append(End(lengths[-1], ratios[-1], _short(name) + ", then out of memory" * bool(lost), colour))
            if points and (at := crossed.get(name)) is not None and at in lengths:
                axes.plot([at], [1], color=colour, marker="|", markersize=13, markeredgewidth=2)
        _mark_lost_bases(axes, rows)
        low, high = axes.get_ylim()
        _ratio_axis(axes, "y", min(low, _LEAST[0]), max(high, _LEAST[1]))
        axes.set_ylabel("speed relative to exact attention")
        _name_ends(axes, ends)

    return draw(identity, f"Speed relative to exact attention against length, {setting}", paint, (6.4, 3.9))


def memory_figure(rows: list[Speed], record: Record, identity: str) -> Markup | None:
    """Plot peak memory against length, of exact attention and of each variant; None where fewer than two lengths have it.

    Args: as for `speed_figure`.
    """
    names = ["exact", *(name for name in colours(record))]

    def peaks(name: str) -> list[tuple[int, float]]:
        timed = [(row, row.base if name == "exact" else variant_of(row.variants, name)) for row in rows]
        return [(row.length, one.peak_mb) for row, one in timed if one is not None and one.peak_mb]

    measured = {name: found for name in names if (found := peaks(name))}
    if len(measured) < 2 or max(map(len, measured.values())) < 2:
        return None

    def paint(axes: Axes) -> None:
        axes.set_yscale("log", base=2)
        _length_axis(axes, rows)
        styles = {"exact": (_exact_colour(), "o"), **_styles(record)}
        for name, points in measured.items():
            colour, marker = styles[name]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
        _mark_lost_bases(axes, rows)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.set_ylabel("peak memory (MB)")
        _name_ends(axes, [End(*points[-1], _short(name), styles[name][0]) for name, points in measured.items()])

    return draw(identity, f"Peak memory against length, on {wording.setting(rows[0])}.", paint, (6.4, 3.6))


class End(NamedTuple):
    """The last point of a line, and its name."""

    x: float
    y: float
    name: str
    colour: str


# The share of the height that a name takes, and of the width at which names stand right of the plot.
_LINE, _BESIDE = 0.062, 1.04


def _name_ends(axes: Axes, ends: list[End]) -> None:
    """Write the name of each line right of the plot, near its end, none over another."""
    places = [_fraction(axes, end.x, end.y)[1] for end in ends]
    order = sorted(range(len(ends)), key=lambda number: (places[number], number))
    heights: list[float] = []
    for number in order:
        heights.append(max(places[number], heights[-1] + _LINE if heights else 0.0))
    # Those that were pushed out at the top push the others down.
    top = 1.0
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], top)
        top = heights[place] - _LINE
    for number, height in zip(order, heights, strict=True):
        end = ends[number]
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(_BESIDE, height),
            textcoords="axes fraction",
            va="center",
            color=INK,
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 1.0, "shrinkA": 1, "shrinkB": 3},
        )


def _length_axis(axes: Axes, rows: list[Speed]) -> None:
    measured = [row.length for row in rows]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(measured))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.count(value)))
    axes.set_xlim(measured[0] / 1.12, measured[-1] * 1.12)
    axes.set_xlabel("length (tokens)")


def _mark_lost_bases(axes: Axes, rows: list[Speed]) -> None:
    """A line at each length at which exact attention is out of memory."""
    style = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 7.5}
    for row in rows:
        if row.base.status != "ok":
            axes.axvline(row.length, color=INK, linewidth=0.8, linestyle=":")
            axes.annotate("exact: out of memory", (row.length, 0.98), xycoords=("data", "axes fraction"), **style)


def _paint_row(axes: Axes, row: Speed, record: Record) -> None:
    """The variants of one length below each other, the fastest first."""
    axes.set_xscale("log", base=2)
    found = [(entry.name, row.believed(entry), standing(row, entry)) for entry in row.variants]
    found.sort(key=lambda one: one[1].ratio or 0.0)
    if row.spread and row.spread.interval:
        axes.axvspan(*row.spread.interval, color=INK, alpha=0.12, linewidth=0)
    axes.axvline(1, color=_exact_colour(), linewidth=1.4)
    ceiling = row.believed(row.ceiling).ratio if row.ceiling else None
    above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "fontsize": 8.5}
    axes.annotate("exact", (1, 1.01), **above)
    if ceiling:
        axes.axvline(ceiling, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate("ceiling", (ceiling, 1.01), **above)
    known = colours(record)
    for place, (name, believed, _) in enumerate(found):
        if believed.ratio is not None:
            low, high = believed.interval or (believed.ratio, believed.ratio)
            axes.plot([low, high], [place] * 2, color=known[name], linewidth=1.8, solid_capstyle="butt")
            axes.plot([believed.ratio], [place], color=known[name], marker="o", markersize=5)
    axes.set_yticks(range(len(found)), [_short(name) + _unless_timed(believed, kind) for name, believed, kind in found])
    axes.set_ylim(-0.7, len(found) - 0.3)
    low, high = axes.get_xlim()
    _ratio_axis(axes, "x", min(low, _LEAST[0]), max(high, _LEAST[1]))
    axes.set_xlabel(f"speed relative to exact attention at {wording.count(row.length)} tokens")


def _unless_timed(believed: Ratio, kind: str) -> str:
    return "" if believed.ratio is not None else f" ({kind})"


def layers_figure(variants: list[Variant], identity: str) -> Markup | None:
    """Draw the error of each converted layer as a heat map, a row per variant; None if no receipt has errors.

    Args:
        variants: The variants of a record.
        identity: Unique in the page.
    """
    receipts = [(variant.name, (variant.receipt or {}).get("errors") or {}) for variant in variants]
    measured = [(name, {int(layer): error for layer, error in errors.items()}) for name, errors in receipts if errors]
    if not measured:
        return None
    layers = sorted({layer for _, errors in measured for layer in errors})
    worst = max(error for _, errors in measured for error in errors.values())

    def paint(axes: Axes) -> None:
        axes.grid(False)
        for row, (_, errors) in enumerate(measured):
            for column, layer in enumerate(layers):
                if layer not in errors:
                    continue
                box = [column, column + 1], [row, row + 1], [[errors[layer]]]
                axes.pcolormesh(*box, cmap=_COLOURS, vmin=0, vmax=worst or 1)
                if len(layers) <= _WRITTEN:
                    text = f"{100 * errors[layer]:.0f}"
                    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8)
        axes.set_xlim(0, len(layers))
        axes.set_ylim(len(measured), 0)
        every = 1 if len(layers) <= _WRITTEN else 3
        axes.set_xticks([place + 0.5 for place in range(0, len(layers), every)], [str(one) for one in layers[::every]])
        axes.set_yticks([place + 0.5 for place in range(len(measured))], [_short(name) for name, _ in measured])
        axes.tick_params(length=0)
        axes.set_xlabel("layer")
        axes.spines[:].set_visible(False)

    description = (
        "Relative error of each layer in percent, darker where it is larger. The figures are in the table below."
    )
    return draw(identity, description, paint, (6.4, 0.8 + 0.24 * len(measured)))


# A heat map of more layers has no figures in its cells.
_WRITTEN = 14


def lengths_figure(task: Quality, record: Record, identity: str) -> Markup | None:
    """Draw the lengths of a task's inputs, and the share of attention that each variant approximates on them.

    None if no variant has such a share.

    Args:
        task: An entry of "quality".
        record: Its record.
        identity: Unique in the page.
    """
    shares = [
        (entry.name, entry.approximated.examples / task.examples, entry.approximated.pairs)
        for entry in task.variants
        if entry.approximated is not None and task.examples
    ]
    if not shares:
        return None
    slices = next((entry.slices for entry in task.variants if entry.slices), [])
    parts = slices if len(slices) > 1 and task.sliced_by in (None, "tokens") else []
    known, height = colours(record), 0.6 + 0.25 * len(shares)
    above = 1.1 if parts else 0.0

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        whole = height + above
        below = axes.inset_axes((0, 0, 1, (height - 0.25) / whole))
        for place, (name, inputs, pairs) in enumerate(reversed(shares)):
            below.barh(place, 100 * inputs, color=known[name], alpha=0.25, height=0.7)
            if pairs is not None:
                below.barh(place, 100 * pairs, color=known[name], height=0.36)
        below.set_yticks(range(len(shares)), [_short(name) for name, *_ in reversed(shares)])
        below.set_xlim(0, 100)
        below.set_xlabel("% of the inputs (wide bar), of the pairs of tokens (narrow bar)")
        if parts:
            bars = axes.inset_axes((0, (height + 0.25) / whole, 1, (above - 0.25) / whole))
            names = [
                f"{wording.count(one.from_)}–{wording.count(None if one.to is None else one.to - 1)}" for one in parts
            ]
            bars.bar(range(len(parts)), [one.examples for one in parts], color=_exact_colour(), width=0.7)
            bars.set_xticks(range(len(parts)), names)
            bars.set_ylabel("inputs")
            bars.yaxis.set_major_locator(MaxNLocator(3, integer=True))
            bars.set_xlabel("tokens")
            bars.patch.set_visible(False)
        below.patch.set_visible(False)

    description = f"Inputs of {task.task}, and the share of attention that each variant approximates on them."
    return draw(identity, description, paint, (6.0, height + above + 0.2))


def quality_figure(
    task: Quality, rows: list[Speed], record: Record, identity: str, chosen: str | None = None
) -> tuple[Markup, str] | None:
    """Plot the difference in quality against the speed at one length.

    Args:
        task: An entry of "quality".
        rows: Entries of "speed" that differ only in length, shortest first.
        record: Their record.
        identity: Unique in the page.
        chosen: The variant that the page is about, which is marked.

    Returns:
        The plot and its caption; None if no variant has both a speed and a tested quality.
    """
    untested = [entry.name for entry in task.variants if not wording.tested(entry)]
    task = task.model_copy(update={"variants": [entry for entry in task.variants if wording.tested(entry)]})
    row = _fullest(task, rows)
    if row is None:
        return None
    scale, unnamed = wording.scale(task), []
    shown: list[tuple[QualityVariant, Ratio]] = []
    for name in colours(record):
        quality, speed = variant_of(task.variants, name), variant_of(row.variants, name)
        believed = row.believed(speed) if speed else None
        if quality and believed and believed.ratio is not None and believed.interval:
            shown.append((quality, believed))
    front, faint_bars, logarithmic = _unbeaten(task, row), len(shown) > _CROWD, []

    def paint(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        margin = max((entry.margin or 0 for entry in task.variants), default=0) * scale
        if margin <= _WIDEST_MARGIN * _reach(task, row):
            axes.axhspan(-margin, margin, color=INK, alpha=0.1, linewidth=0)
        axes.axhline(0, color=_exact_colour(), linewidth=0.8)
        axes.axvline(1, color=_exact_colour(), linewidth=0.8)
        axes.plot([1], [0], marker="o", color=_exact_colour(), linestyle="", markersize=7, label="exact")
        points = [Named(1.0, 0.0, "exact", _exact_colour(), 1)]
        for quality, believed in shown:
            assert believed.ratio is not None
            assert believed.interval is not None
            (colour, marker), x, y = _styles(record)[quality.name], believed.ratio, quality.difference * scale
            low, high = (end * scale for end in quality.interval or [quality.difference] * 2)
            faint = faint_bars and quality.name != chosen
            axes.errorbar(
                [x],
                [y],
                xerr=[[max(x - believed.interval[0], 0)], [max(believed.interval[1] - x, 0)]],
                yerr=[[max(y - low, 0)], [max(high - y, 0)]],
                fmt="none",
                ecolor=colour,
                alpha=0.35 if faint else 1.0,
                elinewidth=0.8 if faint else 1.4,
            )
            axes.plot([x], [y], marker=marker, color=colour, linestyle="", markersize=6, label=quality.name)
            if quality.name == chosen:
                ring = {"markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": 13, "zorder": 4}
                axes.plot([x], [y], marker="o", color=INK, linestyle="", label="chosen", **ring)
            first = 0 if quality.name == chosen else 1 if (x, y) in front else 2
            points.append(Named(x, y, quality.name, colour, first))
        if len(front) > 1:
            axes.plot(*zip(*front, strict=True), color=INK, linewidth=1, linestyle=":", label="frontier", zorder=1)
        ends = [point.y for point in points]
        # In a crowd the plot is of the points, and bars may leave it.
        own = [one for one, _ in shown if one.name == chosen or not faint_bars]
        ends += [end * scale for one in own for end in one.interval or ()]
        low, high = axes.get_xlim()
        _ratio_axis(axes, "x", min(low, _LEAST[0]), max(high * 1.08, _LEAST[1]))
        if task.fraction:
            _points_axis(axes, min(ends), max(ends))
            logarithmic[:] = [axes.get_yscale() == "symlog"]
        axes.set_xlabel(f"speed relative to exact attention at {wording.count(row.length)} tokens")
        if task.lower_is_better:
            axes.invert_yaxis()
        axes.set_ylabel(f"change in {task.metric.replace('_', ' ')}" + (" (points)" if task.fraction else ""))
        unnamed[:] = _name_points(axes, points)

    caption = (
        f"{task.task} ({task.split}) against speed at {wording.count(row.length)} tokens on {wording.setting(row)}."
    )
    drawing = draw(identity, f"{caption} Further right is faster, further up is better.", paint, (5.2, 4.0))
    margin = max((entry.margin or 0 for entry in task.variants), default=0)
    if margin * scale > _WIDEST_MARGIN * _reach(task, row):
        caption += f" All differences are far within the margin of {wording.margin(task.variants[0], task)}, which is not shown."
    end = longest_input(task)
    if unnamed:
        caption += f" Without a name for lack of room: {', '.join(unnamed)}."
    if any(logarithmic):
        caption += f" The vertical scale is logarithmic beyond ±{_LINEAR_POINTS} points."
    if untested:
        caption += f" Not shown, because untested: {', '.join(untested)}."
    if end is not None and row.length >= end:
        caption += f" The task's own inputs have fewer than {wording.count(end)} tokens."
    return drawing, caption


# From so many variants on, the bars of all but the chosen one are faint.
_CROWD = 6


class Named(NamedTuple):
    """A point, its name, and how early it gets one: 0 for the first."""

    x: float
    y: float
    name: str
    colour: str
    first: int


def _name_points(axes: Axes, points: list[Named]) -> list[str]:
    """Write names beside points where there is room, over no other name or point; return the names that have none."""
    # In points, of a plot that is smaller than its figure by what labels of axes take.
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    right, high = (72 * (side - 0.75) for side in figure.get_size_inches())
    places = [(x * right, y * high) for x, y in (_fraction(axes, point.x, point.y) for point in points)]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    unnamed = []
    for number in sorted(range(len(points)), key=lambda number: (points[number].first, -points[number].x)):
        point, (x, y), text = points[number], places[number], _short(points[number].name)
        wide, tall = 5.6 * len(text), 11.0
        for across, up in _AROUND:
            start = x + across * 9 - (wide if across < 0 else wide / 2 if across == 0 else 0)
            bottom = y + up * 10 - tall / 2
            box = start, bottom, start + wide, bottom + tall
            inside = box[0] >= 0 and box[2] <= right and box[1] >= 0 and box[3] <= high
            if inside and not any(_overlap(box, other) for n, other in enumerate(taken) if n != number):
                taken.append(box)
                axes.annotate(
                    text,
                    (point.x, point.y),
                    xytext=(across * 9, up * 10),
                    textcoords="offset points",
                    ha=("center", "left", "right")[across],
                    va="center",
                    fontsize=8.5,
                    fontweight="bold" if point.first == 0 else "normal",
                    # A pale edge, so that bars below do not cross the letters.
                    bbox={"boxstyle": "square,pad=0.1", "facecolor": CARD, "edgecolor": "none", "alpha": 0.75},
                )
                break
        else:
            unnamed.append(point.name)
    return unnamed


# Where names are tried around a point.
_AROUND = [
    (1, 0),
    (-1, 0),
    (1, 1),
    (1, -1),
    (-1, 1),
    (-1, -1),
    (0, 1.3),
    (0, -1.3),
    (1, 2.2),
    (1, -2.2),
    (-1, 2.2),
    (-1, -2.2),
]


def _fraction(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Where a point is, as a share of the plot's width and height; independent of the layout."""
    across, up = axes.transLimits.transform(axes.transScale.transform((x, y)))
    return float(across), float(up)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def sweep_picture(quality: Sequence[QualityRow]) -> str | None:
    """Draw a sweep as small multiples, a panel for each checkpoint and task with a bar for each plan; None without scores.

    Bars are intervals of the difference from exact attention; over several seeds, their standard deviation.

    Args:
        quality: The rows of a sweep, best first.
    """
    panels: dict[tuple[Any, ...], list[QualityRow]] = {}
    for row in quality:
        panels.setdefault((row.checkpoint, *row.of), []).append(row)
    if not panels:
        return None
    most, lines = max(map(len, panels.values())), -(-len(panels) // _COLUMNS)

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        for number, rows in enumerate(panels.values()):
            line, column = divmod(number, _COLUMNS)
            panel = axes.inset_axes((column / _COLUMNS + 0.2, 1 - (line + 0.8) / lines, 0.27, 0.66 / lines))
            panel.patch.set_visible(False)
            panel.axvline(0, color=_exact_colour(), linewidth=1.2)
            scale = wording.scale(rows[0])
            for place, row in enumerate(rows):
                middle, apart = row.difference.mean * scale, (row.difference.sd or 0.0) * scale
                ends = [end * scale for end in row.interval or ()] or [middle - apart, middle + apart]
                colour = _plan_colour(row.plan)
                panel.plot(ends, [place] * 2, color=colour, linewidth=1.8, solid_capstyle="butt")
                panel.plot([middle], [place], color=colour, marker="o", markersize=4, label=row.plan)
            panel.set_yticks(range(len(rows)), [_short(row.plan) for row in rows])
            panel.set_ylim(most - 0.5, -0.5)
            panel.tick_params(labelsize=7.5)
            panel.set_title(f"{rows[0].checkpoint}: {rows[0].task}", fontsize=8.5)
            panel.set_xlabel(
                f"change in {rows[0].metric.replace('_', ' ')}" + (" (points)" if rows[0].fraction else "")
            )

    description = "Change in quality of each plan of a sweep, with intervals. The figures are in sweep.csv."
    return alone(draw("sweep", description, paint, (8.4, lines * (1.2 + 0.22 * most))))


class Bubble(NamedTuple):
    """A model in a plot of score against speed: its score in percent with an interval, and the size of its bubble."""

    name: str
    speed: float
    score: float
    interval: tuple[float, float] | None
    memory: float


class Bubbles(NamedTuple):
    """One panel of bubbles.

    Attributes:
        title: Above it.
        speed: What its horizontal axis is.
        bubbles: What it shows.
        chance: The score of guessing, in percent; None draws no line.
    """

    title: str
    speed: str
    bubbles: list[Bubble]
    chance: float | None


def bubbles_picture(panels: Sequence[Bubbles]) -> str:
    """Draw scores against speed, with areas that stand for memory: a file of its own, with a panel each.

    Source: Tay et al., 2021, "Long Range Arena", arXiv 2011.04006, figure 3.
    """
    lines = -(-len(panels) // _COLUMNS)

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        for number, one in enumerate(panels):
            line, column = divmod(number, _COLUMNS)
            panel = axes.inset_axes((column * 0.52 + 0.06, 1 - (line + 0.82) / lines, 0.42, 0.68 / lines))
            panel.patch.set_visible(False)
            most = max((bubble.memory for bubble in one.bubbles), default=1.0) or 1.0
            for bubble in one.bubbles:
                colour = _exact_colour() if bubble.name == "exact" else _plan_colour(bubble.name)
                low, high = bubble.interval or (bubble.score, bubble.score)
                apart = [[max(bubble.score - low, 0)], [max(high - bubble.score, 0)]]
                panel.errorbar([bubble.speed], [bubble.score], yerr=apart, fmt="none", ecolor=colour, elinewidth=1)
                area = max(_LARGEST * bubble.memory / most, 6)
                panel.scatter([bubble.speed], [bubble.score], s=area, color=colour, alpha=0.55, linewidths=0)
            if one.chance is not None:
                panel.axhline(one.chance, color=INK, linewidth=0.8, linestyle=":")
            fastest = max((bubble.speed for bubble in one.bubbles), default=1.0)
            panel.set_xlim(0, fastest * 1.25)
            panel.margins(y=0.25)
            panel.tick_params(labelsize=7.5)
            panel.xaxis.set_major_locator(MaxNLocator(5))
            panel.yaxis.set_major_locator(MaxNLocator(5))
            panel.set_title(one.title, fontsize=9)
            panel.set_xlabel(one.speed)
            panel.set_ylabel("score (%)")
            for bubble in one.bubbles:
                panel.annotate(
                    bubble.name, (bubble.speed, bubble.score), ha="center", va="center", fontsize=7.5, zorder=5
                )

    description = "Score against speed of encoders trained from scratch; the area of a bubble is its memory."
    return alone(draw("arena", description, paint, (8.4, 3.6 * lines)))


# The area of the largest bubble, in square points.
_LARGEST = 700


def _plan_colour(plan: str) -> str:
    """The colour of the mechanism that the name of a plan begins with."""
    named = [name for name in _facts("colour") if plan == name or plan.startswith((f"{name} ", f"{name},"))]
    mechanism = max(named, key=len, default=plan)
    return _facts("colour").get(mechanism) or _other_colour(mechanism)


def _exact_colour() -> str:
    return _facts("colour")["sdpa"]


def _reach(task: Quality, row: Speed) -> float:
    """The largest difference or end of an interval that the plot shows."""
    shown = [entry for entry in task.variants if variant_of(row.variants, entry.name)]
    ends = [abs(end) for entry in shown for end in (entry.difference, *(entry.interval or ()))]
    return max(ends, default=0.0) * wording.scale(task)


def _unbeaten(task: Quality, row: Speed) -> list[tuple[float, float]]:
    """Speed and difference of exact attention and of the variants that no other beats in both, fastest first."""
    scale, sign = wording.scale(task), -1 if task.lower_is_better else 1
    shown = [(1.0, 0.0)]
    for entry in task.variants:
        speed = variant_of(row.variants, entry.name)
        ratio = row.believed(speed).ratio if speed else None
        if ratio is not None:
            shown.append((ratio, entry.difference * scale))
    front: list[tuple[float, float]] = []
    for ratio, difference in sorted(shown, key=lambda point: (-point[0], -sign * point[1])):
        if not front or sign * difference > sign * front[-1][1]:
            front.append((ratio, difference))
    return front


def _fullest(task: Quality, rows: list[Speed]) -> Speed | None:
    """Return the row in which most variants have both a speed and a quality; of several, the longest."""
    names = {entry.name for entry in task.variants}
    counts = {
        row.length: sum(row.believed(entry).ratio is not None and entry.name in names for entry in row.variants)
        for row in rows
    }
    best = max(rows, key=lambda row: (counts[row.length], row.length))
    return best if counts[best.length] else None


def _styles(record: Record) -> dict[str, tuple[str, str]]:
    """Colour and marker of each variant; variants with the same colour have different markers."""
    used: Counter[str] = Counter()
    styles = {}
    for name, colour in colours(record).items():
        styles[name] = colour, _MARKERS[used[colour] % len(_MARKERS)]
        used[colour] += 1
    return styles


def _short(name: str) -> str:
    return name if len(name) <= _CHARACTERS else name[: _CHARACTERS - 1] + "…"


def _points_axis(axes: Axes, low: float, high: float) -> None:
    """Make the axis logarithmic beyond ±2 points, so that small differences stay visible next to large ones."""
    digits, apart = 1, 0.08 * (high - low) or 1.0
    axes.set_ylim(low - apart, high + apart)
    if max(-low, high) > _LINEAR_POINTS * 5:
        axes.set_yscale("symlog", linthresh=_LINEAR_POINTS, linscale=1.5)
        axes.set_ylim(min(low * 1.5, -1), max(high * 1.5, 1))
        low, high = axes.get_ylim()
        # Ticks that would be written over each other are left out, those nearer to 0 first come.
        ticks = dict[int, float]()
        for tick in sorted((tick for tick in _POINTS if low <= tick <= high), key=abs):
            place = _fraction(axes, 1, tick)[1]
            if all(abs(place - other) > _APART for other in ticks.values()):
                ticks[tick] = place
        axes.yaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axes.yaxis.set_minor_locator(NullLocator())
        digits = 0
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.signed(value, digits)))


def _ratio_axis(axes: Axes, which: str, low: float, high: float) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator([ratio for ratio in _RATIOS if low <= ratio <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
