"""The plots of a report: speed against length with the ceiling, quality against speed, spans, and training curves."""

import io
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from approx.errors import ApproxError, Exit
from approx.evaluation.record import KeptExact, Layer, Quality, Ratio, Record, Speed, Trained, Variant
from approx.publishing import wording
from approx.publishing.summary import longest_input, standing, variant_of
from approx.registry import class_facts
from approx_kernels.runtime.atomic_file import write_whole

# Placeholders that matplotlib can draw with, replaced by CSS colours.
INK, FAINT = "#010203", "#040506"
_PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--faint)"}
# Inches of a line of the legend, beyond those that every size allows for.
_LEGEND_COLUMNS, _LEGEND_LINE, _LEGEND_FREE = 2, 0.2, 4
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
    """Draw one plot with its legend below.

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
    """Draw one plot for the page, and as files of its own on white.

    Args: as for `draw`.

    Returns:
        The drawing for the page, and suffix -> content of the file, `.svg` and `.png`.
    """
    svg = paths_in_lines(_saved(identity, paint, inches, ".svg").decode())
    alone = svg.replace(FAINT, "#e4e6e9").replace("<svg ", '<svg style="background: #fff" ', 1)
    png = _saved(identity, paint, inches, ".png", on="white")
    return _for_the_page(svg, identity, description), {".svg": alone.encode(), ".png": png}


_DPI = 150


def _saved(
    identity: str, paint: Callable[[Axes], None], inches: tuple[float, float], suffix: str, on: str | None = None
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
        if entries := axes.get_legend_handles_labels()[0]:
            # The legend has separate room, so that it does not shrink the plot.
            lines = -(-len(entries) // _LEGEND_COLUMNS)
            figure.set_size_inches(inches[0], inches[1] + _LEGEND_LINE * max(lines - _LEGEND_FREE, 0))
            figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8.5)
        undated = {"Software": None} if suffix == ".png" else dict.fromkeys(("Creator", "Date", "Format", "Type"))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], metadata=undated, dpi=_DPI if suffix == ".png" else "figure")
        return buffer.getvalue()


def paths_in_lines(svg: str) -> str:
    """An SVG with each path on a line, not each of its points: thousands of lines less in a repository."""
    return re.sub(r'\bd="[^"]*"', lambda path: " ".join(path[0].split()).replace(' "', '"'), svg)


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
_LINEAR_POINTS = 2
_POINTS = (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100)
_LEGEND_CHARACTERS = 40
# A margin of so many times the largest difference would cover the plot.
_WIDEST_MARGIN = 3


def colours(record: Record) -> dict[str, str]:
    """The colour of each variant: that of the mechanism of most of its converted layers, exact ones aside."""
    exact, colour_of, chosen = _facts("always_exact"), _facts("colour"), {}
    for variant in record.variants:
        counts = Counter(layer.mechanism for layer in variant.layers)
        approximate = {name: number for name, number in counts.items() if not exact.get(name)} or counts
        mechanism = min(approximate, key=lambda name: (-approximate[name], name)) if approximate else "full"
        chosen[variant.name] = colour_of.get(mechanism) or _other_colour(mechanism)
    # A record that was edited may measure variants that it does not describe.
    measured = [entry.name for part in (*record.quality, *record.speed) for entry in part.variants]
    return {name: _other_colour(name) for name in measured} | chosen


def _facts(attribute: str) -> Mapping[str, Any]:
    # Importing the mechanisms imports torch, which a report does without.
    return class_facts("approx.mechanisms", "BUILT_IN", attribute)


def _other_colour(name: str) -> str:
    # Python's own hash of a string differs between processes.
    return _OTHER_COLOURS[zlib.crc32(name.encode("utf-8", "replace")) % len(_OTHER_COLOURS)]


def speed_figure(rows: list[Speed], record: Record, identity: str) -> Markup | None:
    """Plot speed relative to exact attention against length, with the ceiling, for one machine and setting.

    None if there is nothing to plot, because no speed is settled.

    Args:
        rows: Entries of "speed" that differ only in length, shortest first.
        record: Their record.
        identity: Unique in the page; prefix of all ids in the drawing.
    """
    measured = [row.length for row in rows]
    relative = [(row, one) for row in rows for one in (*row.variants, *([row.ceiling] if row.ceiling else []))]
    # Variants that ran out of memory are marked too.
    if all(one.status == "ok" and row.believed(one).ratio is None and row.base.status == "ok" for row, one in relative):
        return None

    def paint(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        noise = [(row.length, *row.spread.interval) for row in rows if row.spread and row.spread.interval]
        if noise:
            lengths, low, high = zip(*noise, strict=True)
            band = {"color": INK, "alpha": 0.12, "linewidth": 0, "label": "exact against itself"}
            axes.fill_between(lengths, low, high, **band)
        axes.axhline(1, color=INK, linewidth=1)
        ceiling = {row.length: ratio for row in rows if row.ceiling and (ratio := row.believed(row.ceiling).ratio)}
        axes.plot(
            list(ceiling),
            list(ceiling.values()),
            color=INK,
            linestyle=(0, (5, 3)),
            linewidth=1.2,
            # A line of a single point is invisible.
            marker="_" if len(ceiling) == 1 else None,
            markersize=14,
            label="ceiling: attention removed" if ceiling else None,
        )
        for variant, (colour, marker) in _styles(record).items():
            _speed_line(axes, rows, variant, colour, marker)
        for row in rows:
            if row.base.status != "ok":
                axes.axvline(row.length, color=INK, linewidth=0.8, linestyle=":")
                axes.annotate(
                    "exact: out of memory",
                    (row.length, 0.98),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    va="top",
                    ha="right",
                    fontsize=7.5,
                )
        axes.xaxis.set_major_locator(FixedLocator(measured))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.count(value)))
        axes.set_xlim(measured[0] / 1.25, measured[-1] * 1.25)
        low, high = axes.get_ylim()
        _ratio_axis(axes, "y", min(low, _LEAST[0]), max(high, _LEAST[1]))
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("speed relative to exact attention")

    setting = f"on {wording.setting(rows[0])}. The figures are in the table beside it."
    if len(rows) == 1:
        title = f"Speed relative to exact attention at {wording.count(measured[0])} tokens, {setting}"
        height = 1.2 + 0.22 * len(rows[0].variants)
        return draw(identity, title, lambda axes: _paint_row(axes, rows[0], record), (5.4, height))
    return draw(identity, f"Speed relative to exact attention against length, {setting}", paint, (5.4, 4.2))


def _paint_row(axes: Axes, row: Speed, record: Record) -> None:
    """The variants of one length below each other, the fastest first."""
    axes.set_xscale("log", base=2)
    found = [(entry.name, row.believed(entry), standing(row, entry)) for entry in row.variants]
    found.sort(key=lambda one: one[1].ratio or 0.0)
    if row.spread and row.spread.interval:
        axes.axvspan(*row.spread.interval, color=INK, alpha=0.12, linewidth=0, label="exact against itself")
    axes.axvline(1, color=INK, linewidth=1)
    ceiling = row.believed(row.ceiling).ratio if row.ceiling else None
    if ceiling:
        axes.axvline(ceiling, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), label="ceiling: attention removed")
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


def quality_figure(task: Quality, rows: list[Speed], record: Record, identity: str) -> tuple[Markup, str] | None:
    """Plot the difference in quality against the speed at one length.

    Args:
        task: An entry of "quality".
        rows: Entries of "speed" that differ only in length, shortest first.
        record: Their record.
        identity: Unique in the page.

    Returns:
        The plot and its caption; None if no variant has both a speed and a tested quality.
    """
    untested = [entry.name for entry in task.variants if not wording.tested(entry)]
    task = task.model_copy(update={"variants": [entry for entry in task.variants if wording.tested(entry)]})
    row = _fullest(task, rows)
    if row is None:
        return None

    def paint(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        scale = wording.scale(task)
        margin = max((entry.margin or 0 for entry in task.variants), default=0) * scale
        reach = _reach(task, row)
        if margin <= _WIDEST_MARGIN * reach:
            axes.axhspan(-margin, margin, color=INK, alpha=0.1, linewidth=0, label="within the margin")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.plot([1], [0], marker="o", color=INK, linestyle="", markersize=6, label="exact")
        for name, (colour, marker) in _styles(record).items():
            quality, speed = variant_of(task.variants, name), variant_of(row.variants, name)
            believed = row.believed(speed) if speed else None
            if not quality or not believed or believed.ratio is None or not believed.interval:
                continue
            x, y = believed.ratio, quality.difference * scale
            low, high = (end * scale for end in quality.interval or [quality.difference] * 2)
            axes.errorbar(
                [x],
                [y],
                xerr=[[max(x - believed.interval[0], 0)], [max(believed.interval[1] - x, 0)]],
                yerr=[[max(y - low, 0)], [max(high - y, 0)]],
                fmt="none",
                ecolor=colour,
                elinewidth=1.4,
            )
            # In the legend, bars would hide which marker it is.
            axes.plot([x], [y], marker=marker, color=colour, linestyle="", markersize=6, label=_short(name))
        front = _unbeaten(task, row)
        if len(front) > 1:
            axes.plot(
                *zip(*front, strict=True), color=INK, linewidth=1, linestyle=":", label="not beaten in both", zorder=1
            )
        low, high = axes.get_xlim()
        _ratio_axis(axes, "x", min(low, _LEAST[0]), max(high, _LEAST[1]))
        if task.fraction:
            _points_axis(axes)
        axes.set_xlabel(f"speed relative to exact attention at {wording.count(row.length)} tokens")
        if task.lower_is_better:
            axes.invert_yaxis()
        metric = task.metric.replace("_", " ")
        axes.set_ylabel(f"change in {metric}" + (" (points)" if task.fraction else ""))

    caption = (
        f"{task.task} ({task.split}) against speed at {wording.count(row.length)} tokens on {wording.setting(row)}."
    )
    margin = max((entry.margin or 0 for entry in task.variants), default=0)
    if margin * wording.scale(task) > _WIDEST_MARGIN * _reach(task, row):
        caption += f" All differences are far within the margin of {wording.margin(task.variants[0], task)}, which is not shown."
    end = longest_input(task)
    if untested:
        caption += f" Not shown, because untested: {', '.join(untested)}."
    if end is not None and row.length >= end:
        caption += f" The task's own inputs have fewer than {wording.count(end)} tokens."
    description = f"{caption} Further right is faster, further up is better."
    return draw(identity, description, paint, (4.9, 4.2)), caption


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


def _speed_line(axes: Axes, rows: list[Speed], name: str, colour: str, marker: str) -> None:
    entries = [(row, entry) for row in rows if (entry := variant_of(row.variants, name))]
    settled = [(row.length, row.believed(entry)) for row, entry in entries]
    seen = [(length, one.ratio, *one.interval) for length, one in settled if one.ratio and one.interval]
    if seen:
        lengths, ratios, low, high = zip(*seen, strict=True)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(lengths, ratios, color=colour, marker=marker, markersize=5, linewidth=1.8, label=_short(name))
    lost = [row.length for row, entry in entries if standing(row, entry) == "out of memory"]
    if lost:
        axes.plot(
            lost,
            [0.04] * len(lost),
            transform=axes.get_xaxis_transform(),
            color=colour,
            marker="x",
            markersize=7,
            markeredgewidth=2,
            linestyle="",
            label=f"{_short(name)}: out of memory",
        )


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
    return name if len(name) <= _LEGEND_CHARACTERS else name[: _LEGEND_CHARACTERS - 1] + "…"


def _points_axis(axes: Axes) -> None:
    """Make the axis logarithmic beyond ±2 points, so that small differences stay visible next to large ones."""
    digits = 1
    if max(map(abs, axes.get_ylim())) > _LINEAR_POINTS * 5:
        low, high = axes.get_ylim()
        axes.set_yscale("symlog", linthresh=_LINEAR_POINTS, linscale=1.5)
        axes.set_ylim(min(low * 1.3, -1), max(high, 1))
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in _POINTS if low <= tick <= high]))
        axes.yaxis.set_minor_locator(NullLocator())
        digits = 0
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.signed(value, digits)))


def _ratio_axis(axes: Axes, which: str, low: float, high: float) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator([ratio for ratio in _RATIOS if low <= ratio <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
