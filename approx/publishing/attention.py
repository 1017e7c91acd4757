"""Pictures of attention, exact and approximate: heat maps, lines between tokens, alignments, and the page that holds them."""

import base64
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from approx.publishing import wording
from approx.publishing.patterns import steps_picture
from approx.publishing.plots import INK, draw_files, png_text, share_outlines
from approx_kernels.runtime.atomic_file import write_whole

Matrix = NDArray[np.floating[Any]]

WEIGHT, LESS, MORE = "#2f7fd6", "#d0508a", "#2a9d7f"
_WEIGHTS = LinearSegmentedColormap.from_list("weights", [f"{WEIGHT}00", WEIGHT])
_CHANGES = LinearSegmentedColormap.from_list("changes", [(0, LESS), (0.5, f"{LESS}00"), (0.5, f"{MORE}00"), (1, MORE)])
_SUFFIXES = (".svg", ".png")
# Ticks on a side of a heat map, and letters of a token there.
_TICKS, _LETTERS = 16, 10
# Letters of a token that the narrowest column of the lines shows whole.
_UNCUT = 6
# Words that have a tick each in an alignment.
_WORDS = 64
# Shades of a small picture, which is seen at a pixel a cell: 4 bits each. Changes have the same to both sides.
_SHADES = 16
# Lines of a query to its strongest keys, and the weight from which a line is drawn.
_LINES, _FAINTEST = 6, 0.02
# Strengths of lines, each with a style of its own: a line of weight w is in class 1 + floor(sqrt(w) * this).
_STRENGTHS = 5
# Groups that are listed with their members, and members of each.
_LISTED, _MEMBERS = 12, 24


@dataclass(frozen=True)
class Axis:
    """The queries or keys of a picture, which draws blocks of them.

    Attributes:
        labels: What each position is called, before it is put into blocks.
        block: Positions of a block.
        kind: What a position is: `token`, `frame`, `patch` or `position`.
        seconds: Seconds of a position of sound.
    """

    labels: Sequence[str]
    block: int
    kind: str
    seconds: float | None = None

    def names(self) -> list[str]:
        """The name of each block: that of its first position."""
        return list(self.labels[:: self.block])

    def __str__(self) -> str:
        many = f"{len(self.labels):,} {self.kind}s"
        return many if self.block == 1 else f"{many} in blocks of {self.block}"


@dataclass(frozen=True)
class Estimates:
    """How the weights of a mechanism follow the exact ones: quantiles of the approximate weight, by the exact one.

    Attributes:
        exact: Middle of each bin of exact weights.
        low: 10th percentile of the approximate weight of the same pairs, of each bin.
        middle: The median.
        high: 90th percentile.
        relative: ‖A − A_exact‖ / ‖A_exact‖ of the weights, over all pairs.
    """

    exact: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]
    relative: float


@dataclass(frozen=True)
class Groups:
    """The cluster of each query, or the bucket of each query and key in each round.

    Attributes:
        name: What a group is called: `cluster` or `bucket`.
        queries: Number of the group of each query, in each round.
        keys: The same of keys; None if they have no groups, or those of the queries.
    """

    name: str
    queries: list[list[int]]
    keys: list[list[int]] | None


@dataclass(frozen=True)
class Spans:
    """Learned spans: tokens that each head of a layer sees, the head that is shown, and the length of the ramp."""

    spans: list[float]
    own: int
    ramp: int


@dataclass(frozen=True)
class Steps:
    """The steps of a pattern, [p, n, n] bool, whether queries see no later keys, and the step of this head; None for all."""

    steps: NDArray[np.bool_]
    causal: bool
    own: int | None


@dataclass(frozen=True)
class FarShare:
    """Share of the weight beyond the exact keys, along the queries: exact and approximate; and which keys are exact."""

    exact: list[float]
    approximate: list[float]
    window: int
    sinks: int


@dataclass(frozen=True)
class Estimated:
    """How estimated weights follow the exact ones, and the number of random features; None for others."""

    quantiles: Estimates
    features: int | None


Part = Groups | Spans | Steps | FarShare | Estimated


@dataclass(frozen=True)
class Layer:
    """The heads of a layer.

    Attributes:
        number: Number of the layer.
        name: Its name.
        mechanism: Name of its mechanism.
        settings: Mechanism and settings.
        kept: Share of the exact weight that goes to the same keys, of each head.
        captured: Exact weight on the keys that a head sees; None where it skips none.
        error: Relative error of its output.
        exact: Small pictures, [H, s, s].
        approximate: The same; None where attention is exact.
    """

    number: int
    name: str
    mechanism: str
    settings: str
    kept: list[float]
    captured: list[float | None]
    error: list[float]
    exact: Matrix
    approximate: Matrix | None


@dataclass(frozen=True)
class Head:
    """A head that is drawn large, and why; matrices are [n, m], the mean of a block of queries over blocks of keys."""

    layer: Layer
    number: int
    why: str
    exact: Matrix
    approximate: Matrix | None
    queries: Axis
    keys: Axis
    parts: Sequence[Part]

    @property
    def name(self) -> str:
        """`layer-3-head-2`, for files and links."""
        return f"layer-{self.layer.number}-head-{self.number}"


@dataclass(frozen=True)
class Alignment:
    """What a decoder attends to in its input while it writes each word, [words, blocks of keys], and over which heads."""

    exact: Matrix
    approximate: Matrix | None
    words: Sequence[str]
    keys: Axis
    heads: str


@dataclass(frozen=True)
class Look:
    """All that a page shows.

    Attributes:
        title: Its heading.
        command: The command as typed; empty from Python.
        about: The input, in words.
        text: The text, or what was written.
        written: Whether the text was written by the model.
        exact_side: What is called exact.
        approximate_side: Name of what is called approximate.
        layers: All layers.
        heads: Those drawn large.
        alignments: Of encoder-decoders.
        notes: What a reader has to know.
    """

    title: str
    command: str
    about: str
    text: str
    written: bool
    exact_side: str
    approximate_side: str
    layers: Sequence[Layer]
    heads: Sequence[Head]
    alignments: Sequence[Alignment]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def approximates(self) -> bool:
        """Whether any layer is not exact."""
        return any(layer.approximate is not None for layer in self.layers)

    @property
    def kept(self) -> float | None:
        """Mean share that the heads of layers that are not exact keep; None without such layers."""
        shares = [share for layer in self.layers if layer.approximate is not None for share in layer.kept]
        return sum(shares) / len(shares) if shares else None


def write(look: Look, folder: Path) -> list[str]:
    """Write `index.html` and its pictures, as SVG and PNG, into a folder.

    Returns:
        Names of the files, `index.html` first.
    """
    pictures: dict[str, dict[str, bytes]] = {}
    page = _page(look, pictures)
    write_whole(folder / "index.html", page)
    names = ["index.html"]
    for name, files in pictures.items():
        for suffix, content in files.items():
            write_whole(folder / f"{name}{suffix}", content)
            names.append(f"{name}{suffix}")
    return names


def _page(look: Look, pictures: dict[str, dict[str, bytes]]) -> str:
    """The page; its pictures are also added to `pictures`, as files."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda share: wording.percent(share)
    environment.filters["decimal"] = lambda value: "–" if value is None else f"{value:.3f}"
    environment.filters["tint"] = lambda share, colour: _tint(share, colour)

    # Shown on request, where a name may be cut.
    environment.filters["hint"] = lambda name: Markup(' title="{}"').format(name) if len(name) > _UNCUT else ""
    outlines: dict[str, str] = {}

    def picture(name: str, about: str, paint: Callable[[Axes], None], inches: tuple[float, float]) -> Markup:
        drawing, pictures[name] = draw_files(name, about, paint, inches)
        return share_outlines(drawing, outlines)

    _overview_files(look, pictures)
    return environment.get_template("look.html.j2").render(
        look=look,
        summary=_summary(look),
        heads=[_head(head, picture, pictures) for head in look.heads],
        alignments=[_alignment(one, number, picture) for number, one in enumerate(look.alignments)],
        layers=[_layer(layer) for layer in look.layers],
        # Filled by the drawings above. Safe as markup: only outlines.
        outlines=[(Markup(outline), name) for outline, name in outlines.items()],
        overviews=_overviews(look),
        large={(head.layer.number, head.number) for head in look.heads},
        most=max(len(layer.kept) for layer in look.layers),
        colours={"weight": WEIGHT, "less": LESS, "more": MORE},
    )


def _summary(look: Look) -> list[str]:
    """The result in sentences, the first one the most important."""
    if not look.approximates:
        heads = sum(len(layer.kept) for layer in look.layers)
        return [f"All {heads} heads of {len(look.layers)} layers are exact, so there is nothing to compare."]
    ranked = sorted(
        (share, layer.number, head)
        for layer in look.layers
        if layer.approximate is not None
        for head, share in enumerate(layer.kept)
    )
    least, most = ranked[0], ranked[-1]
    assert look.kept is not None
    sentences = [
        f"{wording.percent(look.kept)} of the weight of exact attention goes to the same keys, on average over {len(ranked)} heads."
    ]
    if len(ranked) > 1:
        sentences.append(
            f"From {wording.percent(least[0])} in layer {least[1]}, head {least[2]}, to {wording.percent(most[0])} in layer "
            f"{most[1]}, head {most[2]}."
        )
    exact = [layer.number for layer in look.layers if layer.approximate is None]
    if exact:
        sentences.append(f"Exact on this input: layer{'s'[: len(exact) > 1]} {wording.layer_ranges(exact)}.")
    return sentences


def _overviews(look: Look) -> list[dict[str, Any]]:
    """The tables of all heads: a number and a colour for each."""
    if not look.approximates:
        return []
    worst = max((error for layer in look.layers for error in layer.error), default=0.0)
    tables = [
        {
            "title": "Attention kept",
            "about": "share of the exact weight that goes to the same keys",
            "rows": [[(wording.percent(v), _tint(v, WEIGHT)) for v in layer.kept] for layer in look.layers],
        }
    ]
    if any(value is not None for layer in look.layers for value in layer.captured):
        tables.append(
            {
                "title": "Captured mass",
                "about": "exact weight on the keys that a head sees, of heads that skip keys",
                "rows": [
                    [("–", "") if v is None else (wording.percent(v), _tint(v, WEIGHT)) for v in layer.captured]
                    for layer in look.layers
                ],
            }
        )
    tables.append(
        {
            "title": "Error",
            "about": "of a head's output, relative to that of exact attention",
            "rows": [
                [(wording.decimal(v, 2), _tint(v / max(worst, 1e-9), LESS)) for v in layer.error]
                for layer in look.layers
            ],
        }
    )
    return tables


def _tint(share: float, colour: str) -> str:
    """A background that leaves its text legible: at most half of the colour."""
    return f"background: {colour}{round(128 * min(max(share, 0.0), 1.0)):02x}"


def _overview_files(look: Look, pictures: dict[str, dict[str, bytes]]) -> None:
    """The first table of all heads, and the errors, as pictures; without an approximation, the heads themselves."""
    heads, count = max(len(layer.kept) for layer in look.layers), len(look.layers)

    def grid(values: Sequence[Sequence[float]], words: Callable[[float], str], title: str, colours: Any) -> Any:
        def paint(axes: Axes) -> None:
            axes.grid(False)
            shown = np.full((count, heads), np.nan)
            for row, line in enumerate(values):
                shown[row, : len(line)] = line
            axes.pcolormesh(shown, cmap=colours, vmin=0, vmax=max(np.nanmax(shown), 1e-9), alpha=0.6)
            for (row, head), value in np.ndenumerate(shown):
                if not math.isnan(value):
                    axes.text(head + 0.5, row + 0.5, words(value), ha="center", va="center", fontsize=7, color=INK)
            axes.set_ylim(count, 0)
            axes.set_yticks(np.arange(count) + 0.5, [str(layer.number) for layer in look.layers])
            axes.set_xticks(np.arange(heads) + 0.5, [str(head) for head in range(heads)])
            axes.tick_params(length=0)
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            axes.set_title(title, fontsize=10, color=INK)

        return paint

    size = (max(3.2, 1.0 + 0.42 * heads), 1.2 + 0.27 * count)
    if not look.approximates:
        return
    of_error = LinearSegmentedColormap.from_list("errors", [f"{LESS}00", LESS])
    kept = grid(
        [layer.kept for layer in look.layers],
        lambda v: f"{100 * v:.0f}",
        "attention kept, % of the exact weight",
        _WEIGHTS,
    )
    error = grid([layer.error for layer in look.layers], lambda v: f"{v:.2f}", "relative error of the output", of_error)
    pictures["overview-kept"] = draw_files("overview-kept", "", kept, size)[1]
    pictures["overview-error"] = draw_files("overview-error", "", error, size)[1]


def _head(head: Head, picture: Any, pictures: dict[str, dict[str, bytes]]) -> dict[str, Any]:
    """A head that is drawn large, for the template."""
    shown: list[tuple[str, str, Matrix, bool]] = [("exact", "Exact", head.exact, False)]
    if head.approximate is not None:
        shown += [
            ("approximate", "Approximate", head.approximate, False),
            ("difference", "Difference", head.approximate - head.exact, True),
        ]
    most = max(float(np.max(matrix)) for _, _, matrix, signed in shown if not signed)
    place = f"layer {head.layer.number}, head {head.number}"
    maps = []
    for key, title, matrix, signed in shown:
        about = f"{title} attention of {place}: queries from top to bottom, keys from left to right, {head.queries}. "
        about += _strongest(matrix, head, signed)
        paint = _heat(matrix, head.queries, head.keys, float(np.abs(matrix).max()) if signed else most, signed=signed)
        maps.append({"title": title, "svg": picture(f"{head.name}-{key}", about, paint, (3.6, 3.2))})
    _line_files(head, pictures)
    return {
        "head": head,
        "maps": maps,
        "lines": _lines(head),
        "parts": [_part(part, number, head, picture, pictures) for number, part in enumerate(head.parts)],
    }


def _strongest(matrix: Matrix, head: Head, signed: bool) -> str:
    """The largest entry in words, for those who do not see it."""
    row, column = np.unravel_index(np.abs(matrix).argmax(), matrix.shape)
    query, key = head.queries.names()[row], head.keys.names()[column]
    value = float(matrix[row, column])
    text = f"{100 * value:+.0f}" if signed else f"{100 * value:.0f}"
    return f"The largest {'change' if signed else 'weight'} is {text} % from “{query}” to “{key}”."


def _short(label: str) -> str:
    return label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…"


def _heat(matrix: Matrix, rows: Axis, columns: Axis, most: float, *, signed: bool) -> Callable[[Axes], None]:
    """Paint a matrix of weights; colours follow the square root, so that faint ones are seen."""

    def paint(axes: Axes) -> None:
        axes.grid(False)
        limit = math.sqrt(max(most, 1e-6))
        values = np.sign(matrix) * np.sqrt(np.abs(matrix)) if signed else np.sqrt(np.maximum(matrix, 0.0))
        count = matrix.shape
        drawn = axes.imshow(
            values,
            cmap=_CHANGES if signed else _WEIGHTS,
            vmin=-limit if signed else 0,
            vmax=limit,
            extent=(0, count[1], count[0], 0),
            aspect="auto" if count[0] != count[1] else "equal",
            interpolation="none",
        )
        for axis, which in ((rows, "y"), (columns, "x")):
            names = axis.names()
            # Words of an alignment have a picture as high as they need.
            ticks = range(0, len(names), -(-len(names) // (_WORDS if axis.kind == "word" else _TICKS)))
            labels = [_short(names[tick]) for tick in ticks]
            places = [tick + 0.5 for tick in ticks]
            if which == "y":
                axes.set_yticks(places, labels)
            else:
                axes.set_xticks(places, labels, rotation=90)
        axes.tick_params(length=0, labelsize=7)
        bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.6, pad=0.02, aspect=24)
        bar.outline.set_visible(False)
        bar.ax.patch.set_visible(False)
        ends = (-limit, -limit / 2, 0, limit / 2, limit) if signed else (0, limit / 2, limit)
        bar.set_ticks(list(ends))
        bar.ax.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: _percents(math.copysign(100 * value * value, value)))
        )
        bar.ax.tick_params(length=0, labelsize=7)

    return paint


def _percents(value: float) -> str:
    """A tick of weights, in percent."""
    return f"{value:.0f} %" if abs(value) >= 10 or value == 0 else f"{value:.2g} %"


def _pairs(matrix: Matrix) -> list[list[tuple[int, float]]]:
    """The strongest keys of each query, and their weights."""
    found = []
    for row in matrix:
        strongest = np.argsort(-row, kind="stable")[:_LINES]
        found.append([(int(key), float(row[key])) for key in strongest if row[key] >= _FAINTEST])
    return found


def _strength(weight: float) -> int:
    return min(_STRENGTHS, 1 + int(math.sqrt(weight) * _STRENGTHS))


def _lines(head: Head) -> dict[str, Any]:
    """The view with lines: names, and for each side a group of paths for each query, by strength."""
    sides = []
    for matrix, towards_left in ((head.exact, True), (head.approximate, False)):
        if matrix is None:
            continue
        groups = []
        for query, keys in enumerate(_pairs(matrix)):
            by_strength: dict[int, list[str]] = {}
            for key, weight in keys:
                start, end = (100, 0) if towards_left else (0, 100)
                by_strength.setdefault(_strength(weight), []).append(f"M{start} {query}L{end} {key}")
            groups.append([(strength, "".join(paths)) for strength, paths in sorted(by_strength.items())])
        sides.append(groups)
    return {
        "query_names": head.queries.names(),
        "key_names": head.keys.names(),
        "sides": sides,
        "strengths": [(number, _opacity(number)) for number in range(1, _STRENGTHS + 1)],
    }


def _opacity(strength: int) -> float:
    return round((strength / _STRENGTHS) ** 1.5, 2)


def _line_files(head: Head, pictures: dict[str, dict[str, bytes]]) -> None:
    """The view with lines as files."""
    queries, keys = head.queries.names(), head.keys.names()

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        size = 7 if max(len(queries), len(keys)) <= 128 else 5
        for name, row in zip(queries, range(len(queries)), strict=True):
            axes.text(0, row, _short(name), ha="center", va="center", fontsize=size, color=INK)
        for matrix, side in ((head.exact, -1), (head.approximate, 1)):
            if matrix is None:
                continue
            for row, name in enumerate(keys):
                align = "right" if side < 0 else "left"
                axes.text(side * 1.32, row, _short(name), ha=align, va="center", fontsize=size, color=INK)
            lines, strengths = [], []
            for query, strongest in enumerate(_pairs(matrix)):
                lines += [((side * 0.3, query), (side * 1.28, key)) for key, _ in strongest]
                strengths += [_opacity(_strength(weight)) for _, weight in strongest]
            axes.add_collection(LineCollection(lines, colors=WEIGHT, linewidths=1.0, alpha=strengths or None))
            axes.text(side * 0.8, -1.6, "exact" if side < 0 else "approximate", ha="center", fontsize=9, color=INK)
        axes.set_xlim(-1.8, 1.8 if head.approximate is not None else 0.35)
        axes.set_ylim(max(len(queries), len(keys)) + 0.5, -2.5)

    height = min(max(3.0, 0.13 * max(len(queries), len(keys)) + 0.6), 40)
    pictures[f"{head.name}-lines"] = draw_files(f"{head.name}-lines", "", paint, (5.4, height))[1]


def _part(part: Part, number: int, head: Head, picture: Any, pictures: dict[str, dict[str, bytes]]) -> dict[str, Any]:
    """What a mechanism did: a title, sentences, a drawing, and lists of tokens."""
    name = f"{head.name}-inside-{number}"
    if isinstance(part, Groups):
        return _groups(part, name, head, picture)
    if isinstance(part, Spans):
        return _spans(part, name, picture)
    if isinstance(part, Steps):
        return _steps(part, name, head, pictures)
    if isinstance(part, FarShare):
        return _far(part, name, head, picture)
    return _estimated(part, name, picture)


def _groups(part: Groups, name: str, head: Head, picture: Any) -> dict[str, Any]:
    rounds = len(part.queries)
    counts = [max(max(one), *(max(keys) for keys in part.keys[at : at + 1])) + 1 if part.keys else max(one) + 1
              for at, one in enumerate(part.queries)]  # fmt: skip
    rasters = []
    for at, (one, count) in enumerate(zip(part.queries, counts, strict=True)):
        # Groups in the order of their first member, so that neighbours are near each other.
        order = {
            group: place for place, group in enumerate(dict.fromkeys([*one, *(part.keys[at] if part.keys else [])]))
        }
        rasters.append((one, part.keys[at] if part.keys else None, order, count))
    height = sum(len(order) for _, _, order, _ in rasters)

    def paint(axes: Axes) -> None:
        axes.grid(False)
        offset, ticks = 0, []
        for at, (one, keys, order, _) in enumerate(rasters):
            size = max(1.0, min(9.0, 700 / max(len(one), height)))
            axes.scatter(
                range(len(one)), [offset + order[group] for group in one], s=size, marker="s", color=WEIGHT, linewidths=0,
                label="query" if keys is not None and at == 0 else None,
            )  # fmt: skip
            if keys is not None:
                axes.scatter(
                    range(len(keys)), [offset + order[group] + 0.4 for group in keys], s=size, marker="s", color="#e8893a",
                    linewidths=0, label="key" if at == 0 else None,
                )  # fmt: skip
            ticks.append((offset + len(order) / 2, f"round {at + 1}"))
            offset += len(order) + 1
            if at < rounds - 1:
                axes.axhline(offset - 1, color=INK, linewidth=0.5, alpha=0.5)
        axes.set_ylim(offset, -1)
        if rounds > 1:
            axes.set_yticks(*zip(*ticks, strict=True))
        axes.tick_params(length=0, labelsize=7.5)
        axes.set_xlabel(f"{head.queries.kind} in its place in the input")
        axes.set_ylabel("" if rounds > 1 else part.name)

    sizes = sorted((part.queries[0].count(group) for group in set(part.queries[0])), reverse=True)
    used = len(sizes)
    text = f"{used} {part.name}s of queries{' in the first round' if rounds > 1 else ''}: the largest has {sizes[0]}, the median {sizes[used // 2]}."
    if part.name == "cluster":
        text += " All queries of a cluster share one row of weights, but for keys that they weigh themselves."
    else:
        text += f" A query sees the keys of its {part.name} in each of {rounds} rounds."
    return {
        "title": f"{part.name.capitalize()}s",
        "text": text,
        "svg": picture(name, f"Which {part.name} each {head.queries.kind} is in. {text}", paint, (5.4, 3.8)),
        "lists": _members(part, head),
        "image": None,
    }


def _members(part: Groups, head: Head) -> list[tuple[str, str]]:
    """The largest groups of the first round with their members."""
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(part.queries[0]):
        groups.setdefault(group, []).append(place)
    largest = sorted(groups.items(), key=lambda pair: -len(pair[1]))[:_LISTED]
    lists = []
    for group, places in largest:
        names = [head.queries.labels[place] for place in places[:_MEMBERS]]
        more = f" … {len(places) - _MEMBERS} more" if len(places) > _MEMBERS else ""
        lists.append((f"{part.name} {group}, {len(places)}", " · ".join(names) + more))
    return lists


def _spans(part: Spans, name: str, picture: Any) -> dict[str, Any]:
    def paint(axes: Axes) -> None:
        places = range(len(part.spans))
        colours = [WEIGHT if head == part.own else "#8fb8e6" for head in places]
        axes.bar(places, part.spans, color=colours)
        axes.set_xticks(list(places))
        axes.set_xlabel("head")
        axes.set_ylabel("span in tokens")

    text = (
        f"Head {part.own} sees {part.spans[part.own]:,.0f} tokens to each side, and {part.ramp:,} more with less and less weight. "
        f"The heads of this layer see {min(part.spans):,.0f} to {max(part.spans):,.0f}."
    )
    svg = picture(name, f"Span of each head of the layer. {text}", paint, (5.4, 2.8))
    return {"title": "Spans", "text": text, "svg": svg, "lists": [], "image": None}


def _steps(part: Steps, name: str, head: Head, pictures: dict[str, dict[str, bytes]]) -> dict[str, Any]:
    pictures[name] = steps_picture(head.layer.mechanism, "", [part.steps], causal=part.causal, suffixes=_SUFFIXES)
    count = len(part.steps)
    pairs = np.asarray(part.steps.any(0) if part.own is None else part.steps[part.own - 1])
    length = len(pairs)
    allowed = length * (length + 1) // 2 if part.causal else length * length
    which = (
        "its only step" if count == 1 else f"step {part.own} of {count}" if part.own else f"all {count} steps, merged"
    )
    text = f"This head takes {which}: {wording.percent(pairs.sum() / allowed, 1)} of the pairs of exact attention."
    return {
        "title": "Pattern",
        "text": text,
        "svg": None,
        "lists": [],
        # The drawing of `approx pattern` is on white.
        "image": base64.b64encode(pictures[name][".png" if length > 128 else ".svg"]).decode(),
        "image_kind": "image/png" if length > 128 else "image/svg+xml",
        "alt": f"Which query sees which key, in each step of the pattern. {text}",
    }


def _far(part: FarShare, name: str, head: Head, picture: Any) -> dict[str, Any]:
    def paint(axes: Axes) -> None:
        places = np.arange(len(part.exact)) * head.queries.block
        axes.plot(places, part.exact, color=INK, linewidth=1.4, label="exact attention")
        axes.plot(places, part.approximate, color=WEIGHT, linewidth=1.4, label=head.layer.mechanism)
        axes.set_ylim(min(0, *part.approximate) - 0.02, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        axes.set_xlabel(f"query, by its place among the {len(head.queries.labels):,} {head.queries.kind}s")
        axes.set_ylabel("weight on far keys")

    kept = [f"a window of {part.window:,}"] if part.window else []
    kept += [f"the first {part.sinks:,}"] if part.sinks else []
    near = " and ".join(kept) or "chosen tokens"
    exact, approximate = (sum(one) / len(one) for one in (part.exact, part.approximate))
    text = (
        f"Keys of {near} are weighed exactly; the far part estimates the others. Exact attention gives {wording.percent(exact)} of its "
        f"weight to far keys, and this mechanism {wording.percent(approximate)}."
    )
    svg = picture(name, f"Weight on far keys along the queries. {text}", paint, (5.4, 3.0))
    return {"title": "Window and far part", "text": text, "svg": svg, "lists": [], "image": None}


def _estimated(part: Estimated, name: str, picture: Any) -> dict[str, Any]:
    found = part.quantiles

    def paint(axes: Axes) -> None:
        least = 1e-8
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot([1e-6, 1], [1e-6, 1], color=INK, linewidth=1, linestyle=(0, (5, 3)), label="as exact attention")
        low, middle, high = (np.maximum(values, least) for values in (found.low, found.middle, found.high))
        axes.fill_between(found.exact, low, high, color=WEIGHT, alpha=0.2, linewidth=0, label="8 of 10 pairs")
        axes.plot(found.exact, middle, color=WEIGHT, linewidth=1.6, marker="o", markersize=3, label="median")
        axes.set_xlim(1e-6, 1)
        axes.set_ylim(1e-7, 1.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel("exact weight of a pair")
        axes.set_ylabel("weight that it gets")

    what = "the random features" if part.features is not None else "the estimate"
    text = (
        (f"{part.features} random features estimate the weights. " if part.features is not None else "")
        + f"The error of all weights together is {wording.percent(found.relative)} of their norm. On the dashed line {what} would be exact; "
        "where the median lies above it, faint pairs get too much, and where it lies below, strong pairs get too little."
    )
    svg = picture(name, f"Approximate weight of a pair by its exact weight. {text}", paint, (5.4, 4.0))
    title = "Error of the random features" if part.features is not None else "Estimated weights"
    return {"title": title, "text": text, "svg": svg, "lists": [], "image": None}


def _alignment(one: Alignment, number: int, picture: Any) -> dict[str, Any]:
    shown: list[tuple[str, str, Matrix, bool]] = [("exact", "Exact", one.exact, False)]
    if one.approximate is not None:
        shown += [
            ("approximate", "Approximate", one.approximate, False),
            ("difference", "Difference", one.approximate - one.exact, True),
        ]
    most = max(float(matrix.max()) for _, _, matrix, signed in shown if not signed)
    words = Axis(one.words, 1, "word")
    height = min(max(3.0, 1.4 + 0.17 * len(one.words)), 12)
    maps = []
    for key, title, matrix, signed in shown:
        about = f"{title} alignment: the {len(one.words)} words from top to bottom, {one.keys} from left to right."
        paint = _heat(matrix, words, one.keys, float(np.abs(matrix).max()) if signed else most, signed=signed)
        maps.append({"title": title, "svg": picture(f"alignment-{key}{number or ''}", about, paint, (4.0, height))})
    return {"maps": maps, "heads": one.heads, "words": " ".join(one.words)}


def _layer(layer: Layer) -> dict[str, Any]:
    """The small pictures of all heads of a layer."""
    heads = []
    for number in range(len(layer.kept)):
        exact = layer.exact[number]
        pictures = [("exact", _thumbnail(exact, float(exact.max()), False))]
        if layer.approximate is not None:
            approximate = layer.approximate[number]
            most = max(float(exact.max()), float(approximate.max()))
            change = approximate - exact
            pictures = [
                ("exact", _thumbnail(exact, most, False)),
                ("approximate", _thumbnail(approximate, most, False)),
                ("difference", _thumbnail(change, float(np.abs(change).max()), True)),
            ]
        heads.append({"number": number, "pictures": pictures})
    return {"layer": layer, "heads": heads}


def _thumbnail(matrix: Matrix, most: float, signed: bool) -> str:
    """A small picture as the text of a PNG, whose faint colours are transparent."""
    scaled = np.sign(matrix) * np.sqrt(np.minimum(np.abs(matrix) / max(most, 1e-9), 1.0))
    palette = _palette(signed)
    top = len(palette) - 1
    return png_text(np.rint((scaled + 1) * top / 2 if signed else np.maximum(scaled, 0.0) * top), palette)


@functools.cache
def _palette(signed: bool) -> NDArray[np.uint8]:
    """The colours of small pictures, [15 or 16, 4]: red, green, blue and how opaque."""
    return (_CHANGES if signed else _WEIGHTS)(np.linspace(0, 1, _SHADES - signed), bytes=True)
