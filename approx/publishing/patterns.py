"""Pictures of sparse patterns: the steps as grids, and the graph of their information flow.

The SVGs are reproducible byte for byte: text is drawn as outlines, ids are salted and no date is written.
"""

import contextlib
import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from numpy.typing import NDArray

from approx.publishing.plots import paths_in_lines

Mask = NDArray[np.bool_]

INK, OWN, PALE = "#1f2430", "#1b2a41", "#c3cad4"
STEPS = ("#2f7fd6", "#e8893a", "#2a9d7f", "#d0508a")
_NOTHING, _FUTURE, _OWN, _SEVERAL = -1, -2, -3, -4
_COLOURS = {_NOTHING: "#e9edf2", _FUTURE: "#f7f8fa", _OWN: OWN, _SEVERAL: "#7b4fb5"}
# Patterns longer than _CELLS are drawn as an image of at most _POINTS points a side.
_CELLS, _POINTS, _DPI = 48, 256, 200
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "pattern",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "legend.frameon": False,
}


def steps_picture(
    title: str, note: str, views: Sequence[Mask], *, causal: bool, suffixes: Sequence[str]
) -> dict[str, bytes]:
    """Draw the steps of a pattern side by side, and merged: rows are queries, columns are keys.

    The style follows Child et al. 2019, arXiv 1904.10509, figure 3.

    Args:
        title: Heading of the picture.
        note: Line below the title; may be empty.
        views: The pattern at one or more lengths, each a row of panels; [p, n, n] bool.
        causal: Whether the upper triangle is masked.
        suffixes: Formats to draw: `.svg`, `.png`.

    Returns:
        Suffix -> content of the file.
    """
    panels = len(views[0]) + (len(views[0]) > 1)
    # A pattern of one step has one panel per length, so all lengths share a row.
    rows, columns = (len(views), panels) if panels > 1 else (1, len(views))
    with _style():
        figure = Figure(figsize=(0.5 + 2.75 * columns, 1.0 + 2.85 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for steps in views:
            names = [f"step {number + 1}" for number in range(len(steps))] if len(steps) > 1 else [""]
            for number, name in enumerate(names):
                only = np.zeros_like(steps)
                only[number] = steps[number]
                _panel(next(grid), only, name, causal)
            if len(steps) > 1:
                _panel(next(grid), steps, "merged", causal)
        _headline(figure, title, note)
        figure.legend(handles=_legend(views, causal), loc="outside lower center", ncols=6)
        return _files(figure, suffixes)


def flow_picture(
    title: str, note: str, steps: Mask, *, causal: bool, node: int | None = None, suffixes: Sequence[str]
) -> dict[str, bytes]:
    """Draw the information-flow graph: a row of positions before each step and after the last, an edge for each pair.

    All positions from which information reaches the chosen one are highlighted, with their paths. A pattern of one
    step is drawn as two layers.

    Source: Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287.

    Args:
        title: Heading of the picture.
        note: Line below the title; may be empty.
        steps: The steps, [p, n, n] bool.
        causal: Whether `node` defaults to the last position instead of the middle one.
        node: The position whose paths are highlighted.
        suffixes: Formats to draw: `.svg`, `.png`.

    Returns:
        Suffix -> content of the file.
    """
    layers = list(steps) if len(steps) > 1 else [steps[0]] * 2
    length = steps.shape[1]
    chosen = node if node is not None else (length - 1 if causal else length // 2)
    lit = [np.arange(length) == chosen]
    for mask in layers[::-1]:
        lit.insert(0, mask[lit[0]].any(0))
    with _style():
        figure = Figure(
            figsize=(min(max(4.0, 1.6 + 0.42 * length), 12), 1.1 + 1.75 * len(layers)), layout="constrained"
        )
        axes = figure.add_subplot()
        for level, mask in enumerate(layers):
            colour = STEPS[level % len(STEPS)] if len(steps) > 1 else STEPS[0]
            _edges(axes, mask, level, lit[level + 1], colour)
            word = f"step {level + 1}" if len(steps) > 1 else f"layer {level + 1}"
            axes.text(-0.7, level + 0.5, word, color=colour, ha="right", va="center", fontweight="bold")
        for level, on in enumerate(lit):
            _nodes(axes, level, on, chosen if level == len(layers) else None)
        for position in range(length):
            axes.text(position, -0.12, str(position), ha="center", va="top", fontsize=7.5)
        axes.text(-0.7, 0, "tokens", ha="right", va="center", fontsize=8)
        reached = "all" if lit[0].all() else f"{int(lit[0].sum())} of the"
        side = "center" if abs(2 * chosen - length + 1) < length / 2 else "right" if 2 * chosen > length else "left"
        axes.text(
            chosen, len(layers) + 0.14, f"position {chosen} receives from {reached} {length}", ha=side, va="bottom"
        )
        axes.set_xlim(-0.9, length - 0.5)
        axes.set_ylim(-0.25, len(layers) + 0.3)
        axes.axis("off")
        _headline(figure, title, note)
        return _files(figure, suffixes)


def _panel(axes: Axes, steps: Mask, name: str, causal: bool) -> None:
    """Draw one grid; pairs in several steps have their own colour."""
    length = steps.shape[1]
    (_cells if length <= _CELLS else _points)(axes, _kinds(steps, causal))
    axes.set_title(f"{name}, {length:,} tokens" if name else f"{length:,} tokens")
    axes.set_xticks([0, length - 1] if length > 1 else [0])
    axes.set_yticks([0, length - 1] if length > 1 else [0])
    axes.tick_params(length=0, labelsize=7.5, colors="#6b7480")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("key", labelpad=-8, fontsize=8)
    axes.set_ylabel("query", labelpad=-8, fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _kinds(steps: Mask, causal: bool) -> NDArray[np.intp]:
    """The colour of each pair: the number of its step, from 0, or a key of `_COLOURS`."""
    kinds = np.where(steps.sum(0) > 1, _SEVERAL, steps.argmax(0))
    kinds[~steps.any(0)] = _NOTHING
    if causal:
        kinds[np.triu_indices(len(kinds), 1)] = _FUTURE
    seen = np.flatnonzero(np.diagonal(steps.any(0)))
    kinds[seen, seen] = _OWN
    return kinds


def _colour(kind: int) -> str:
    return _COLOURS[kind] if kind in _COLOURS else STEPS[kind % len(STEPS)]


def _cells(axes: Axes, kinds: NDArray[np.intp]) -> None:
    """Draw cells separated by white lines; one outline per colour keeps the SVG small."""
    length = len(kinds)
    corner = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
    for kind in np.unique(kinds):
        ends = np.diff((kinds == kind).astype(np.int8), axis=1, prepend=0, append=0)
        (rows, first), (_, last) = np.nonzero(ends == 1), np.nonzero(ends == -1)
        size = np.stack([last - first, np.ones_like(first)], 1)[:, None]
        runs = Outline((np.stack([first, rows], 1)[:, None] + corner * size - 0.5).reshape(-1, 2), codes * len(rows))
        axes.add_patch(PathPatch(runs, facecolor=_colour(kind), linewidth=0))
    between = np.arange(length + 1) - 0.5
    lines = [((at, -0.5), (at, length - 0.5)) for at in between] + [((-0.5, at), (length - 0.5, at)) for at in between]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=min(1.6, 30 / length)))
    axes.set_xlim(-0.5, length - 0.5)
    axes.set_ylim(length - 0.5, -0.5)
    axes.set_aspect("equal")


def _points(axes: Axes, kinds: NDArray[np.intp]) -> None:
    """Draw an image; the strength of a point is the cube root of its share of edges."""
    length, side = len(kinds), math.ceil(len(kinds) / _POINTS)
    starts = np.arange(0, length, side)

    def shares(where: Mask) -> NDArray[np.float64]:
        sums = np.add.reduceat(np.add.reduceat(where, starts, axis=0, dtype=np.int64), starts, axis=1)
        return sums / side**2

    shares_of = {kind: shares(kinds == kind) for kind in np.unique(kinds)}
    ground = np.where(
        (shares_of.get(_FUTURE, np.zeros(1)) > 0.5)[..., None], to_rgb(_colour(_FUTURE)), to_rgb(_colour(_NOTHING))
    )
    edges = {kind: share for kind, share in shares_of.items() if kind not in (_FUTURE, _NOTHING)}
    total = np.maximum(sum(edges.values()), 1e-9)[..., None]
    mixed = sum(share[..., None] * to_rgb(_colour(kind)) for kind, share in edges.items()) / total
    strength = np.minimum(np.cbrt(total), 1)
    image = (1 - strength) * ground + strength * mixed
    # With "none", viewers that scale the image down drop thin columns.
    axes.imshow(image, interpolation="nearest", extent=(-0.5, length - 0.5, length - 0.5, -0.5))


def _edges(axes: Axes, mask: Mask, level: int, reached: Mask, colour: str) -> None:
    """Draw the edges of one step, with those into highlighted positions on top."""
    pairs = np.argwhere(mask)
    on = reached[pairs[:, 0]]
    width = float(np.clip(60 / max(on.sum(), 1), 0.8, 1.5))
    for chosen, shade, thickness, order in ((pairs[~on], PALE, 0.6, 1), (pairs[on], colour, width, 2)):
        lines = [((key, level), (query, level + 1)) for query, key in chosen]
        axes.add_collection(LineCollection(lines, colors=shade, linewidths=thickness, zorder=order))


def _nodes(axes: Axes, level: int, lit: Mask, chosen: int | None) -> None:
    for position, on in enumerate(lit):
        is_chosen = position == chosen
        axes.plot(
            [position],
            [level],
            marker="o",
            markersize=9 if is_chosen else 6.5,
            markerfacecolor=OWN if on else "white",
            markeredgecolor=OWN if on else PALE,
            markeredgewidth=1.2,
            zorder=3,
        )


def _legend(views: Sequence[Mask], causal: bool) -> list[Patch]:
    count = len(views[0])
    named = {number: f"step {number + 1}" for number in range(count)} if count > 1 else {0: "seen"}
    if any((_kinds(steps, causal) == _SEVERAL).any() for steps in views):
        named[_SEVERAL] = "both" if count == 2 else "several"
    named[_OWN] = "the query's own position"
    if causal:
        named[_FUTURE] = "the future"
    return [Patch(facecolor=_colour(kind), edgecolor=PALE, linewidth=0.5, label=name) for kind, name in named.items()]


def _headline(figure: Figure, title: str, note: str) -> None:
    """Draw the title and the note below it; constrained layout makes room for a single text only."""
    inches = figure.get_figwidth()
    titles, notes = textwrap.wrap(title, int(10 * inches)), textwrap.wrap(note, int(14 * inches))
    heading = figure.suptitle("\n".join(titles + [" "] * len(notes)), fontsize=11, fontweight="bold", linespacing=1.4)
    if notes:
        figure.draw_without_rendering()
        box = heading.get_window_extent().transformed(figure.transFigure.inverted())
        figure.text(0.5, box.y0, "\n".join(notes), ha="center", va="bottom", fontsize=8.5, color="#5b6470")


@contextlib.contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context():
        # A user's own matplotlibrc must not change the pictures.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _files(figure: Figure, suffixes: Sequence[str]) -> dict[str, bytes]:
    files = {}
    for suffix in suffixes:
        (FigureCanvasSVG if suffix == ".svg" else FigureCanvasAgg)(figure)
        undated = {"Software": None} if suffix == ".png" else dict.fromkeys(("Creator", "Date", "Format", "Type"))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], dpi=_DPI, metadata=undated)
        files[suffix] = buffer.getvalue()
        if suffix == ".svg":
            files[suffix] = paths_in_lines(buffer.getvalue().decode()).encode()
    return files
