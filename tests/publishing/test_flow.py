"""The information-flow graph of a pattern: nodes, edges and labels."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray

from approx.publishing.patterns import OWN, PALE, STEPS, flow_picture

BOTH = (".svg", ".png")
LTR = np.zeros((2, 6, 6), bool)
LTR[0] = np.kron(np.eye(2), np.tril(np.ones((3, 3))))
LTR[1] = np.eye(6)
LTR[1][:, [2, 5]] = True


def lit(files):
    """Which nodes of a flow graph are filled, row by row from the tokens up, left to right."""
    text = files[".svg"].decode()
    nodes = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: (#\w+)', text)
    rows = sorted({float(y) for _, y, _ in nodes}, reverse=True)
    return [[fill == OWN for x, fill in sorted((float(x), f) for x, y, f in nodes if float(y) == row)] for row in rows]


def edges(figure: Figure) -> dict[str, set[tuple[tuple[float, float], tuple[float, float]]]]:
    """The edges of a flow graph by colour, each from a key up to a query."""
    by_colour: dict[str, set[tuple[tuple[float, float], tuple[float, float]]]] = {}
    for lines in figure.axes[0].collections:
        colour = to_hex(lines.get_edgecolor()[0])  # type: ignore[index]  # an array of colours
        segments: list[NDArray[np.float64]] = lines.get_segments()  # type: ignore[attr-defined]  # they are lines
        by_colour.setdefault(colour, set()).update(((k, low), (q, high)) for (k, low), (q, high) in segments)
    return by_colour


def texts(figure: Figure) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.get_position() for text in figure.axes[0].texts}


def test_the_flow_highlights_the_sources_of_the_chosen_position():
    assert lit(flow_picture("t", "", LTR, causal=False, node=0, suffixes=[".svg"])) == [
        [True, True, True, True, True, True],
        [True, False, True, False, False, True],
        [True, False, False, False, False, False],
    ]
    backwards = lit(flow_picture("t", "", LTR[::-1], causal=False, node=0, suffixes=[".svg"]))
    assert backwards[0] == [True, False, True, False, False, True]


def test_the_flow_has_an_edge_for_each_pair_and_highlighted_ones_have_the_colour_of_their_step(figures):
    flow_picture("t", "", LTR, causal=False, node=0, suffixes=BOTH)
    by_colour = edges(figures[0])
    every = {
        ((float(key), float(level)), (float(query), float(level + 1)))
        for level, step in enumerate(LTR)
        for query, key in np.argwhere(step)
    }
    second = {((float(key), 1.0), (0.0, 2.0)) for key in (0, 2, 5)}
    # Into the positions 0, 2 and 5, which position 0 receives from in the second step.
    first = {((float(key), 0.0), (float(query), 1.0)) for query in (0, 2, 5) for key in np.flatnonzero(LTR[0][query])}
    assert by_colour[STEPS[1]] == second
    assert by_colour[STEPS[0]] == first
    assert set().union(*by_colour.values()) == every
    assert by_colour[PALE] == every - first - second
    said = texts(figures[0])
    assert said["step 1"] == (-0.7, 0.5)
    assert said["step 2"] == (-0.7, 1.5)
    assert said["tokens"] == (-0.7, 0)
    assert [said[str(position)] for position in range(6)] == [(position, -0.12) for position in range(6)]
    assert said["position 0 receives from all 6"] == (0, 2.14)


def test_a_pattern_of_one_step_flows_through_two_layers_of_it(figures):
    flow_picture("t", "", LTR[:1], causal=True, suffixes=BOTH)
    flow_picture("t", "", LTR[:1], causal=False, suffixes=BOTH)
    last, middle = map(texts, figures)
    assert last["position 5 receives from 3 of the 6"][0] == 5
    assert middle["position 3 receives from 1 of the 6"][0] == 3
    assert last["layer 1"] == (-0.7, 0.5)
    assert last["layer 2"] == (-0.7, 1.5)
    assert set(edges(figures[0])) == {STEPS[0], PALE}


@pytest.mark.parametrize(
    ("node", "side"), [(0, "left"), (2, "left"), (3, "center"), (6, "center"), (7, "right"), (9, "right")]
)
def test_labels_stay_within_the_picture(figures, node, side):
    flow_picture("t", "", np.eye(10, dtype=bool)[None], causal=False, node=node, suffixes=BOTH)
    (said,) = (text for text in figures[0].axes[0].texts if "receives" in text.get_text())
    assert said.get_horizontalalignment() == side


def test_few_edges_are_thick_and_many_are_thin(figures):
    for length in (6, 7, 20):
        flow_picture("t", "", np.ones((1, length, length), bool), causal=False, suffixes=BOTH)
    lit = [figure.axes[0].collections[1].get_linewidths()[0] for figure in figures]  # type: ignore[index]  # a list
    assert lit == pytest.approx([1.5, 60 / 49, 0.8])


def test_a_flow_is_as_wide_as_its_positions_need_within_bounds(figures):
    for length, count in ((3, 1), (20, 1), (40, 3)):
        flow_picture("t", "", np.ones((count, length, length), bool), causal=False, suffixes=BOTH)
    assert [figure.get_size_inches().tolist() for figure in figures] == [
        pytest.approx([4.0, 4.6]),
        pytest.approx([10.0, 4.6]),
        pytest.approx([12.0, 6.35]),
    ]


def test_title_and_note_are_wrapped_without_overlap(figures):
    title, note = " ".join(["word"] * 20), " ".join(["note"] * 30)
    flow_picture(title, note, np.ones((1, 3, 3), bool), causal=False, suffixes=BOTH)
    flow_picture(title, "", np.ones((1, 3, 3), bool), causal=False, suffixes=BOTH)
    noted, plain = figures
    # At 10 and 14 characters an inch, of which there are 4.
    heading, below = noted.get_suptitle(), noted.texts[-1].get_text()
    assert below.split() == note.split()
    assert max(map(len, below.splitlines())) <= 56 < 2 * max(map(len, below.splitlines()))
    assert heading.split() == title.split()
    assert max(map(len, plain.get_suptitle().splitlines())) <= 40
    assert len(heading.splitlines()) == len(plain.get_suptitle().splitlines()) + len(below.splitlines())
    noted.draw_without_rendering()
    box = noted.texts[-1].get_window_extent()
    assert noted.axes[0].get_window_extent().y1 <= box.y0 < box.y1 < noted.bbox.height
    # The note is a separate text.
    assert len(plain.texts) == len(noted.texts) - 1
