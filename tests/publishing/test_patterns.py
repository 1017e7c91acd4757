"""Pictures of patterns: whole files, the same every time, with what they must show."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from approx.errors import ApproxError, Exit
from approx.publishing.patterns import OWN, STEPS, flow_picture, steps_picture
from approx.publishing.pictures import write_pictures

BOTH = (".svg", ".png")
LTR = np.zeros((2, 6, 6), bool)
LTR[0] = np.kron(np.eye(2), np.tril(np.ones((3, 3))))
LTR[1] = np.eye(6)
LTR[1][:, [2, 5]] = True


def drawn(length, count=1, seed=0):
    steps = np.random.default_rng(seed).random((count, length, length)) < 0.2
    steps[:, np.arange(length), np.arange(length)] = True
    return steps


def lit(files):
    """The nodes of a flow graph that are filled, row by row from the tokens up, left to right."""
    text = files[".svg"].decode()
    nodes = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: (#\w+)', text)
    rows = sorted({float(y) for _, y, _ in nodes}, reverse=True)
    return [[fill == OWN for x, fill in sorted((float(x), f) for x, y, f in nodes if float(y) == row)] for row in rows]


@pytest.mark.parametrize("draw", [
    lambda: steps_picture("$a & b<", "n", [LTR], causal=False, suffixes=BOTH),
    lambda: steps_picture("t", "", [drawn(1)], causal=True, suffixes=BOTH),
    lambda: steps_picture("t", "", [drawn(12, 4), drawn(600, 4)], causal=True, suffixes=BOTH),
    lambda: flow_picture("$a & b<", "n", LTR, causal=False, suffixes=BOTH),
    lambda: flow_picture("t", "", drawn(1), causal=True, suffixes=BOTH),
    lambda: flow_picture("t", "", drawn(20, 4), causal=False, node=3, suffixes=BOTH),
])  # fmt: skip
def test_a_picture_is_small_and_the_same_every_time(draw):
    files = draw()
    assert set(files) == {".svg", ".png"}
    assert files == draw()
    ElementTree.fromstring(files[".svg"])
    # Noise, of which the third picture is full, cannot be packed.
    assert len(files[".svg"]) < 400_000
    assert b"dc:date" not in files[".svg"]
    width, height = re.findall(rb'(?:width|height)="([\d.]+)pt"', files[".svg"])[:2]
    pixels = imread(io.BytesIO(files[".png"])).shape
    assert pixels[1] / pixels[0] == pytest.approx(float(width) / float(height), rel=0.02)


def test_the_colours_say_which_step_sees_a_pair():
    text = steps_picture("t", "", [LTR], causal=False, suffixes=BOTH)[".svg"].decode()
    for colour in (OWN, *STEPS[:2]):
        assert colour in text
    assert STEPS[2] not in text


def test_the_flow_lights_what_the_chosen_position_hears_of():
    assert lit(flow_picture("t", "", LTR, causal=False, node=0, suffixes=[".svg"])) == [
        [True, True, True, True, True, True],
        [True, False, True, False, False, True],
        [True, False, False, False, False, False],
    ]
    backwards = lit(flow_picture("t", "", LTR[::-1], causal=False, node=0, suffixes=[".svg"]))
    assert backwards[0] == [True, False, True, False, False, True]


def test_pictures_are_written_whole_or_not_at_all(tmp_path):
    pictures = {"flow": flow_picture("t", "", LTR, causal=False, suffixes=[".svg"])}
    written = write_pictures(pictures, tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["flow.svg"]
    assert written[0].read_bytes() == pictures["flow"][".svg"]
    (tmp_path / "file").touch()
    with pytest.raises(ApproxError, match="cannot be written") as caught:
        write_pictures(pictures, tmp_path / "file")
    assert caught.value.exit_code == Exit.UNAVAILABLE
