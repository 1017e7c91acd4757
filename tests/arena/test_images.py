"""Pictures follow the rules of Pathfinder, and CIFAR-10's binary files are read as they are laid out."""

import numpy as np
import pytest

from approx.arena.images import cifar, grating, maze
from approx.errors import ApproxError, Exit


def reached(curves, start):
    """Pixels that a flood fill reaches from a pixel, over sides and corners."""
    seen, queue = {start}, [start]
    for row, column in queue:
        for near in ((row + up, column + across) for up in (-1, 0, 1) for across in (-1, 0, 1)):
            if all(0 <= place < len(curves) for place in near) and curves[near] and near not in seen:
                seen.add(near)
                queue.append(near)
    return seen


@pytest.mark.parametrize(("side", "count"), [(32, 24), (128, 2)])
def test_the_label_says_whether_a_curve_connects_the_dots(side, count):
    for seed in range(count):
        made = maze(np.random.default_rng(seed), side, seed % 2)
        first, second = made.ends
        assert made.curves[first]
        assert made.curves[second]
        assert (second in reached(made.curves, first)) == bool(made.label) == bool(seed % 2)


def test_curves_are_dashed_dots_are_bright_and_both_classes_are_drawn_alike():
    apart, connected = (maze(np.random.default_rng(5), 32, label) for label in (0, 1))
    assert np.array_equal(apart.curves, connected.curves)
    # Gaps: a curve is longer than what is drawn of it.
    assert (connected.curves & (connected.pixels == 0)).sum() > 10
    for row, column in connected.ends:
        assert (connected.pixels[row - 1 : row + 2, column - 1 : column + 2] == 255).all()
    # Two long curves and some distractors.
    lengths, left = [], connected.curves.copy()
    while left.any():
        part = reached(left, tuple(int(place[0]) for place in np.nonzero(left)))
        lengths.append(len(part))
        for pixel in part:
            left[pixel] = False
    assert sorted(lengths)[-2:] == [22, 22]
    assert set(sorted(lengths)[:-2]) == {8}


def test_a_seed_draws_the_same_picture_again():
    for draw in (
        lambda seed: maze(np.random.default_rng(seed), 32, 1).pixels,
        lambda seed: grating(np.random.default_rng(seed), 16, 3),
    ):
        assert np.array_equal(draw(1), draw(1))
        assert not np.array_equal(draw(1), draw(2))


def test_stripes_differ_in_direction_and_width():
    plain = [np.mean([grating(np.random.default_rng(seed), 32, label) for seed in range(3)], 0) for label in range(10)]
    strongest = {
        tuple(int(place) for place in np.unravel_index(np.abs(np.fft.rfft2(one - one.mean())).argmax(), (32, 17)))
        for one in plain
    }
    assert len(strongest) == 10


def write_cifar(folder):
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        rows = np.zeros((2, 3073), np.uint8)
        rows[:, 0] = number, 9
        rows[:, 1:1025], rows[:, 1025:2049], rows[:, 2049:] = 100, 200, 50
        rows.tofile(folder / name)


def test_cifar_is_read_in_grey(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    rows = list(cifar(tmp_path, "train", 3))
    assert [(name, label) for name, _, label in rows] == [
        ("data_batch_1.bin-0", 0),
        ("data_batch_1.bin-1", 9),
        ("data_batch_2.bin-0", 1),
    ]
    assert set(np.unique(rows[0][1])) == {round(0.299 * 100 + 0.587 * 200 + 0.114 * 50)}
    assert len(list(cifar(tmp_path, "test", 10))) == 2


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ApproxError, match=r"data_batch_1\.bin cannot be read") as raised:
        list(cifar(tmp_path, "train", 3))
    assert raised.value.exit_code == Exit.UNAVAILABLE
    (tmp_path / "test_batch.bin").write_bytes(b"12")
    with pytest.raises(ApproxError, match=r"test_batch\.bin is damaged"):
        list(cifar(tmp_path, "test", 3))
