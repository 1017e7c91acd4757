"""Pictures of patterns: complete and reproducible files, and the content of the steps."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread

from approx.errors import ApproxError, Exit
from approx.publishing.patterns import OWN, STEPS, flow_picture, steps_picture
from approx.publishing.plots import write_pictures

BOTH = (".svg", ".png")
LTR = np.zeros((2, 6, 6), bool)
LTR[0] = np.kron(np.eye(2), np.tril(np.ones((3, 3))))
LTR[1] = np.eye(6)
LTR[1][:, [2, 5]] = True


NOTHING, FUTURE, SEVERAL = "#e9edf2", "#f7f8fa", "#7b4fb5"


def drawn(length, count=1, seed=0):
    steps = np.random.default_rng(seed).random((count, length, length)) < 0.2
    steps[:, np.arange(length), np.arange(length)] = True
    return steps


@pytest.mark.parametrize(
    "draw",
    [
        lambda: steps_picture("$a & b<", "n", [LTR], causal=False, suffixes=BOTH),
        lambda: steps_picture("t", "", [drawn(1)], causal=True, suffixes=BOTH),
        lambda: steps_picture("t", "", [drawn(12, 4), drawn(600, 4)], causal=True, suffixes=BOTH),
        lambda: flow_picture("$a & b<", "n", LTR, causal=False, suffixes=BOTH),
        lambda: flow_picture("t", "", drawn(1), causal=True, suffixes=BOTH),
        lambda: flow_picture("t", "", drawn(20, 4), causal=False, node=3, suffixes=BOTH),
    ],
)
@pytest.mark.sample(1)
def test_a_picture_is_small_and_the_same_every_time(draw):
    files = draw()
    assert set(files) == {".svg", ".png"}
    assert files == draw()
    ElementTree.fromstring(files[".svg"])
    # The third picture is noise, which does not compress.
    assert len(files[".svg"]) < 400_000
    assert b"dc:date" not in files[".svg"]
    width, height = re.findall(rb'(?:width|height)="([\d.]+)pt"', files[".svg"])[:2]
    pixels = imread(io.BytesIO(files[".png"])).shape
    assert pixels[1] / pixels[0] == pytest.approx(float(width) / float(height), rel=0.02)


def test_colours_show_the_step_that_sees_a_pair():
    text = steps_picture("t", "", [LTR], causal=False, suffixes=BOTH)[".svg"].decode()
    for colour in (OWN, *STEPS[:2]):
        assert colour in text
    assert STEPS[2] not in text


def test_pictures_are_written_whole_or_not_at_all(tmp_path):
    pictures = {"flow": flow_picture("t", "", LTR, causal=False, suffixes=[".svg"])}
    written = write_pictures(pictures, tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["flow.svg"]
    assert written[0].read_bytes() == pictures["flow"][".svg"]
    (tmp_path / "file").touch()
    with pytest.raises(ApproxError, match="cannot be written") as caught:
        write_pictures(pictures, tmp_path / "file")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def cells(axes: Axes) -> list[list[str]]:
    """The colour of each cell of a grid, row by row from the top; all four quarters of a cell must have it."""
    length = round(axes.get_xlim()[1] + 0.5)
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, length - 0.5), (length - 0.5, -0.5))
    quarters = [(y - 0.25, y + 0.25) for y in range(length)]
    points = [(x, y) for pair in quarters for y in pair for other in quarters for x in other]
    colours = np.full(len(points), "", object)
    for patch in axes.patches:
        inside = patch.get_path().contains_points(points)
        assert not colours[inside].any()
        colours[inside] = to_hex(patch.get_facecolor())
    by_cell = colours.reshape(length, 2, length, 2)
    assert (by_cell == by_cell[:, :1, :, :1]).all()
    return by_cell[:, 0, :, 0].tolist()


def test_each_panel_shows_the_pairs_of_its_step_and_the_last_those_of_all(figures):
    steps_picture("title", "note", [LTR], causal=False, suffixes=BOTH)
    (figure,) = figures
    first, second, merged = figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["step 1, 6 tokens", "step 2, 6 tokens", "merged, 6 tokens"]
    one, two = STEPS[:2]
    assert cells(first)[:3] == [
        [OWN, *[NOTHING] * 5],
        [one, OWN, *[NOTHING] * 4],
        [one, one, OWN, *[NOTHING] * 3],
    ]
    assert cells(second)[0] == [OWN, NOTHING, two, NOTHING, NOTHING, two]
    assert cells(second)[5] == [NOTHING, NOTHING, two, NOTHING, NOTHING, OWN]
    assert cells(merged)[2] == [one, one, OWN, NOTHING, NOTHING, two]
    assert cells(merged)[5] == [NOTHING, NOTHING, two, one, one, OWN]
    for axes in figure.axes:
        (white,) = axes.collections
        ends = {tuple(map(tuple, line)) for line in white.get_segments()}  # type: ignore[attr-defined]  # they are lines
        between = [number - 0.5 for number in range(7)]
        across = {((-0.5, at), (5.5, at)) for at in between}
        assert ends == across | {((at, -0.5), (at, 5.5)) for at in between}
        assert (list(axes.get_xticks()), list(axes.get_yticks())) == ([0, 5], [0, 5])
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")


@pytest.mark.parametrize(
    ("count", "causal", "named"),
    [
        (1, False, {STEPS[0]: "seen", OWN: "the query's own position"}),
        (1, True, {STEPS[0]: "seen", OWN: "the query's own position", FUTURE: "the future"}),
        (2, False, {STEPS[0]: "step 1", STEPS[1]: "step 2", SEVERAL: "both", OWN: "the query's own position"}),
        (3, False, dict(zip(STEPS, ("step 1", "step 2", "step 3"), strict=False)) | {SEVERAL: "several"}),
    ],
)
def test_the_legend_names_the_colours_that_the_panels_have(figures, count, causal, named):
    steps = np.repeat(np.tril(np.ones((1, 6, 6), bool)), count, 0)
    steps_picture("t", "", [steps], causal=causal, suffixes=BOTH)
    (legend,) = figures[0].legends
    colours = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert dict(zip(colours, [text.get_text() for text in legend.get_texts()], strict=True)).items() >= named.items()
    assert (SEVERAL in colours) == (count > 1)
    assert {FUTURE, NOTHING} & {colour for row in cells(figures[0].axes[-1]) for colour in row} == {
        FUTURE if causal else NOTHING
    }


def test_lengths_of_a_pattern_are_rows_of_panels_and_of_one_step_they_share_a_row(figures):
    steps_picture("t", "", [drawn(5, 2), drawn(9, 2)], causal=False, suffixes=BOTH)
    steps_picture("t", "", [drawn(5), drawn(9)], causal=False, suffixes=BOTH)
    several, single = figures
    shapes = [figure.axes[0].get_subplotspec().get_gridspec().get_geometry() for figure in figures]  # type: ignore[union-attr]  # they are subplots
    assert shapes == [(2, 3), (1, 2)]
    assert [axes.get_title() for axes in single.axes] == ["5 tokens", "9 tokens"]
    assert [axes.get_title() for axes in several.axes[2:4]] == ["merged, 5 tokens", "step 1, 9 tokens"]
    # The size of a panel does not depend on their number.
    assert several.get_figwidth() - single.get_figwidth() == pytest.approx(2.75)
    assert several.get_figheight() - single.get_figheight() == pytest.approx(2.85)


def test_a_long_pattern_is_an_image_whose_points_are_as_strong_as_the_share_that_they_stand_for(figures):
    step = np.zeros((1, 600, 600), bool)
    step[0, :3, 3:6] = True
    step[0, 6, 9] = True
    step[0, 12, 12] = True
    steps_picture("t", "", [step], causal=False, suffixes=BOTH)
    steps_picture("t", "", [step.swapaxes(1, 2)], causal=True, suffixes=BOTH)
    free, causal = (np.asarray(figure.axes[0].images[0].get_array()) for figure in figures)
    assert figures[0].axes[0].images[0].get_extent() == [-0.5, 599.5, 599.5, -0.5]
    assert free.shape == (200, 200, 3)
    empty, one, diagonal = map(np.array, (to_rgb(NOTHING), to_rgb(STEPS[0]), to_rgb(OWN)))
    strength = (1 / 9) ** (1 / 3)
    # Half a step of an eight-bit colour is not visible.
    assert free[100, 50] == pytest.approx(empty, abs=1 / 510)
    assert free[0, 1] == pytest.approx(one)
    assert free[2, 3] == pytest.approx((1 - strength) * empty + strength * one)
    assert free[4, 4] == pytest.approx((1 - strength) * empty + strength * diagonal)
    assert causal[50, 100] == pytest.approx(np.array(to_rgb(FUTURE)), abs=1 / 510)
    assert causal[100, 50] == pytest.approx(empty, abs=1 / 510)
    assert causal[1, 0] == pytest.approx(one)
    # A point with pairs of two kinds is a mixture of their colours.
    step[0, 12, 13] = True
    steps_picture("t", "", [step], causal=False, suffixes=BOTH)
    strength = (2 / 9) ** (1 / 3)
    mixed = np.asarray(figures[2].axes[0].images[0].get_array())[4, 4]
    assert mixed == pytest.approx((1 - strength) * empty + strength * (one + diagonal) / 2)


@pytest.mark.parametrize(
    ("length", "shape"), [(48, None), (49, (49, 49, 3)), (256, (256, 256, 3)), (257, (129, 129, 3))]
)
def test_a_pattern_of_more_than_48_positions_is_an_image_of_at_most_256_points_a_side(figures, length, shape):
    steps_picture("t", "", [drawn(length)], causal=True, suffixes=BOTH)
    (axes,) = figures[0].axes
    assert [np.asarray(image.get_array()).shape for image in axes.images] == ([shape] if shape else [])
    assert list(axes.get_xticks()) == [0, length - 1]
    assert axes.get_title() == f"{length} tokens"
