"""The configuration of a launch, and its device, with fake kernels that report missing resources."""

from contextlib import contextmanager

import pytest
import torch

from approx_kernels.gpu import launch as launching
from approx_kernels.gpu.launch import configuration, cut, first_that_fits, launch

triton = pytest.importorskip("triton")

CARD, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
WIDE, NARROW = cut(8, 3, BM=128), cut(4, 2, BM=64)


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Compiled, not interpreted; the devices that are the current one, the innermost last."""
    current = []

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(launching, "interpreted", lambda: False)
    monkeypatch.setattr(launching, "_fitting", {})
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A small card")
    return current


class Launch:
    """A launch of tiles of at most so many rows, and the tiles that were tried."""

    def __init__(self, rows):
        self.rows, self.tried = rows, []

    def __call__(self, cut):
        self.tried.append(cut.tiles["BM"])
        if cut.tiles["BM"] > self.rows:
            raise triton.OutOfResources(200_000, 100_000, "shared memory")
        return cut


def test_falls_back_to_a_smaller_tile_and_remembers_it():
    launch = Launch(64)
    assert [first_that_fits(launch, (WIDE, NARROW), "sums", CARD) for _ in range(2)] == [NARROW, NARROW]
    assert launch.tried == [128, 64, 64]
    # Other launches, or other devices, may fit.
    first_that_fits(launch, (WIDE, NARROW), "products", CARD)
    first_that_fits(launch, (WIDE, NARROW), "sums", OTHER)
    assert launch.tried[3:] == [128, 64, 128, 64]


def test_tries_no_other_tile_after_one_that_fits():
    launch = Launch(128)
    assert first_that_fits(launch, (WIDE, NARROW), "sums", CARD) == WIDE
    assert launch.tried == [128]


def test_names_the_missing_resource_if_no_tile_fits():
    with pytest.raises(ValueError, match=r"A small card cannot hold .* of sums: .*shared memory.* impl='reference'"):
        first_that_fits(Launch(32), (WIDE, NARROW), "sums", CARD)


def test_other_errors_are_not_retried():
    def launch(cut):
        raise RuntimeError("an illegal address")

    with pytest.raises(RuntimeError, match="an illegal address"):
        first_that_fits(launch, (WIDE, NARROW), "sums", CARD)


def test_launches_on_the_device_of_the_tensors(guarded):
    seen = []

    def launch(cut):
        seen.append((cut.tiles["BM"], *guarded))

    first_that_fits(launch, (WIDE, NARROW), "sums", OTHER)
    for number in (-1, None):
        with configuration(number):
            first_that_fits(launch, (WIDE, NARROW), "sums", OTHER)
    assert seen == [(128, OTHER), (64, OTHER), (128, OTHER), (64, OTHER)]


class Kernel:
    """What `jit` makes, of tiles of at most 64 rows of float32; and the launches that took place."""

    def __init__(self):
        self.launched = []
        self.__name__ = "sums_kernel"

    def fn(self, X, rows, E: int, BM: int): ...

    def __getitem__(self, grid):
        def run(x, **sizes):
            self.launched.append((grid, sizes))
            if x.dtype == torch.float32 and sizes["BM"] > 64:
                raise triton.OutOfResources(200_000, 100_000, "shared memory")

        return run


def test_a_grid_and_constants_follow_the_tile_and_win_over_it():
    kernel, x = Kernel(), torch.ones(100, 8, dtype=torch.float16)
    launch(
        kernel,
        lambda tiles: (-(-100 // tiles["BM"]), 2),
        (WIDE, NARROW),
        x,
        E=8,
        tiled=lambda tiles: {"rows": 2 * tiles["BM"], "BM": 32},
    )
    assert kernel.launched == [((1, 2), {"E": 8, "BM": 32, "num_warps": 8, "num_stages": 3, "rows": 256})]


def test_remembers_fitting_tiles_by_dtype_and_constants():
    kernel, x = Kernel(), torch.ones(100, 8)

    def tried(x, **sizes):
        kernel.launched.clear()
        launch(kernel, (1,), (WIDE, NARROW), x, **sizes)
        return [sizes["BM"] for _, sizes in kernel.launched]

    assert tried(x, E=8, rows=1) == [128, 64]
    assert tried(x, E=8, rows=2) == [64]
    assert tried(x.half(), E=8, rows=1) == [128]
    assert tried(x, E=16, rows=1) == [128, 64]
