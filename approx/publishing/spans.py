"""Learned attention spans in a report: a table over variants, and a picture of the span of each head."""

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from approx.evaluation.record_model import Layer, Variant
from approx.publishing import wording
from approx.publishing.drawing import INK, draw

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
    held = [(variant.name, [layer for layer in variant.layers if layer.spans]) for variant in variants]
    return [(name, layers) for name, layers in held if layers]
