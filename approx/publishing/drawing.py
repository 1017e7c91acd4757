"""Draw plots as SVG for the page, reproducible byte for byte.

Text is drawn as outlines of matplotlib's own font, ids are salted and no date is written. Lines and text take the
page's text colour, so that one drawing serves light and dark mode.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

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
    with matplotlib.rc_context():
        # A user's own matplotlibrc must not change the report.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": identity})
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        paint(axes)
        if entries := axes.get_legend_handles_labels()[0]:
            # The legend gets room of its own, so that it does not shrink the plot.
            lines = -(-len(entries) // _LEGEND_COLUMNS)
            figure.set_size_inches(inches[0], inches[1] + _LEGEND_LINE * max(lines - _LEGEND_FREE, 0))
            figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8.5)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _for_the_page(buffer.getvalue(), identity, description)


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
