"""Pictures of the arena: Pathfinder by its own rules, CIFAR-10 from its binary files, and a stand-in for it.

Source of Pathfinder: Linsley et al., 2018, "Learning long-range spatial dependencies with horizontal gated recurrent units",
NeurIPS, arXiv 1805.08315; as a sequence of pixels: Tay et al., 2021, arXiv 2011.04006.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit

# Lengths of a picture of 32 pixels; larger ones are scaled.
_SIDE = 32
_LONG, _SHORT, _DISTRACTORS = 22, 8, 5
_DASH, _GAP, _MARGIN = 2, 1, 2
# How fast a curve turns from pixel to pixel, and how fast that changes, in radians.
_TURN, _BEND = 0.28, 0.1
_TRIES = 60


@dataclass(frozen=True)
class Maze:
    """One picture of Pathfinder.

    Attributes:
        pixels: The picture, [side, side] uint8: dashed curves and two dots on black.
        curves: Where the curves are before they are dashed, [side, side] bool. No two of them touch.
        ends: Row and column of the two dots, each at an end of a long curve.
        label: 1 if one curve connects the dots, else 0.
    """

    pixels: NDArray[np.uint8]
    curves: NDArray[np.bool_]
    ends: tuple[tuple[int, int], tuple[int, int]]
    label: int


def maze(random: np.random.Generator, side: int, label: int) -> Maze:
    """Draw two long curves, short distractors, and two dots: at both ends of a long curve, or at one end of each.

    Both classes are drawn alike but for the place of the dots.

    Args:
        random: Source of all choices.
        side: Side of the picture in pixels, a multiple of 32.
        label: 1 for connected dots, 0 for others.
    """
    scale = side // _SIDE
    while True:
        taken = np.zeros((side, side), bool)
        curves: list[NDArray[np.int64]] = []
        for length in [_LONG, _LONG, *[_SHORT] * _DISTRACTORS]:
            found = _curve(random, taken, length * scale, scale)
            if found is not None:
                curves.append(found)
                _stamp(taken, found, _MARGIN * scale + _width(scale) - 1)
            elif length == _LONG:
                break
        # Distractors that found no room are left out; without two long curves there is no picture.
        if len(curves) >= 2 and len(curves[1]) == _LONG * scale:
            return _painted(random, curves, side, label)


def _painted(random: np.random.Generator, curves: list[NDArray[np.int64]], side: int, label: int) -> Maze:
    scale = side // _SIDE
    pixels, solid = np.zeros((side, side), np.uint8), np.zeros((side, side), bool)
    wide, dash, period = _width(scale), _DASH * scale, (_DASH + _GAP) * scale
    for curve in curves:
        _block(solid, curve, wide, True)
        for start in range(0, len(curve), period):
            _block(pixels, curve[start : start + dash], wide, int(random.integers(128, 256)))
    first, second = curves[0], curves[1]
    one, other = (int(end) for end in random.integers(0, 2, 2))
    ends = (first[0], first[-1]) if label else (first[-one], second[-other])
    for row, column in ends:
        _disc(pixels, int(row), int(column), 1.5 * scale)
    placed = [(int(row), int(column)) for row, column in ends]
    return Maze(pixels, solid, (placed[0], placed[1]), label)


def _curve(random: np.random.Generator, taken: NDArray[np.bool_], length: int, scale: int) -> NDArray[np.int64] | None:
    """A smooth curve of so many pixels, [length, 2], away from what is taken and from itself; None if none was found."""
    edge, apart, most = 1 + scale, _MARGIN * scale + _width(scale), _TURN / scale
    inside = range(edge, len(taken) - edge)
    # Plain lists: element by element, arrays are much slower.
    blocked = taken.tolist()
    for _ in range(_TRIES):
        y, x = random.uniform(edge, len(taken) - edge, 2).tolist()
        if blocked[int(y)][int(x)]:
            continue
        heading, turn = random.uniform(0, 2 * math.pi), 0.0
        cells: list[tuple[int, int]] = []
        for bend in random.normal(0, _BEND / scale, 3 * length).tolist():
            row, column = int(y), int(x)
            if not cells or (row, column) != cells[-1]:
                if row not in inside or column not in inside or blocked[row][column]:
                    break
                # The last pixels are near by nature.
                if any(abs(row - a) < apart and abs(column - b) < apart for a, b in cells[: -2 * apart]):
                    break
                cells.append((row, column))
                if len(cells) == length:
                    return np.array(cells)
            turn = min(max(turn + bend, -most), most)
            heading += turn
            y, x = y + math.sin(heading), x + math.cos(heading)
    return None


def _width(scale: int) -> int:
    return max(1, scale // 2)


def _stamp(taken: NDArray[np.bool_], curve: NDArray[np.int64], around: int) -> None:
    for row, column in curve:
        taken[max(row - around, 0) : row + around + 1, max(column - around, 0) : column + around + 1] = True


def _block(canvas: NDArray[Any], cells: NDArray[np.int64], wide: int, value: int | bool) -> None:
    for row, column in cells:
        canvas[row : row + wide, column : column + wide] = value


def _disc(pixels: NDArray[np.uint8], row: int, column: int, radius: float) -> None:
    rows, columns = np.ogrid[: len(pixels), : len(pixels)]
    pixels[(rows - row) ** 2 + (columns - column) ** 2 < radius**2] = 255


GRATINGS = tuple(f"{angle} degrees, {kind}" for kind in ("coarse", "fine") for angle in (0, 36, 72, 108, 144))
"""The classes of the stand-in for CIFAR-10."""


def grating(random: np.random.Generator, side: int, label: int) -> NDArray[np.uint8]:
    """A noisy striped picture, [side, side]; the class is the direction and the width of its stripes.

    Args:
        random: Source of phase, contrast and noise.
        side: Side in pixels.
        label: An index into `GRATINGS`.
    """
    angle, waves = math.pi * (label % 5) / 5, (3, 6)[label // 5]
    rows, columns = np.mgrid[:side, :side] / side
    wave = np.sin(
        2 * math.pi * waves * (rows * math.sin(angle) + columns * math.cos(angle)) + random.uniform(0, 2 * math.pi)
    )
    noisy = 128 + random.uniform(30, 60) * wave + random.normal(0, 30, (side, side))
    return np.clip(noisy, 0, 255).astype(np.uint8)


CIFAR_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_SIDE = 32
_CIFAR_ROW = 1 + 3 * CIFAR_SIDE**2
_CIFAR_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
# Shares of red, green and blue in luminance, in thousandths.
_LUMINANCE = np.array([299, 587, 114])


def cifar(data: Path, split: str, limit: int) -> Iterator[tuple[str, NDArray[np.uint8], int]]:
    """Name, grey picture [32, 32] and class of the first rows of CIFAR-10's binary files.

    Args:
        data: The folder `cifar-10-batches-bin`, or the one above it.
        split: `train` or `test`.
        limit: Most rows.

    Raises:
        ApproxError: if a file is missing or damaged.
    """
    folder = data / "cifar-10-batches-bin" if (data / "cifar-10-batches-bin").is_dir() else data
    for name in _CIFAR_FILES[split]:
        try:
            stored = np.fromfile(folder / name, np.uint8)
        except OSError as error:
            raise ApproxError(
                f"image: {folder / name} cannot be read: {error.strerror}. Give the folder cifar-10-batches-bin, with "
                "data_batch_1.bin to data_batch_5.bin and test_batch.bin.",
                Exit.UNAVAILABLE,
            ) from None
        if not stored.size or stored.size % _CIFAR_ROW or (labels := stored[::_CIFAR_ROW]).max() >= len(CIFAR_10):
            raise ApproxError(
                f"image: {folder / name} is damaged: it does not hold rows of {_CIFAR_ROW:,} bytes that begin with a class "
                "from 0 to 9. Download it again.",
                Exit.UNAVAILABLE,
            )
        for number, row in enumerate(stored.reshape(-1, _CIFAR_ROW)):
            if limit <= 0:
                return
            limit -= 1
            colours = row[1:].reshape(3, CIFAR_SIDE, CIFAR_SIDE)
            grey = (np.tensordot(_LUMINANCE, colours, 1) + 500) // 1000
            yield f"{name}-{number}", grey.astype(np.uint8), int(labels[number])
