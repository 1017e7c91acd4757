"""How kernels are launched: which configuration a card holds, and what most kernels are told of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.gpu.language import interpreted, triton


class Configuration(NamedTuple):
    """How a kernel is cut: tile sizes by the names of its constants, warps of a program, stages of its loops."""

    tiles: Mapping[str, int]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The keywords of a launch."""
        return {**self.tiles, "num_warps": self.warps, "num_stages": self.stages}


# The configuration that fitted last, by what was launched and where.
_fitting: dict[tuple[Any, ...], int] = {}
_wanted: list[int | None] = []


def cut(warps: int, stages: int, **tiles: int) -> Configuration:
    """A configuration of these tile sizes."""
    return Configuration(tiles, warps, stages)


@contextmanager
def configuration(number: int | None) -> Iterator[None]:
    """Launch kernels with that one of their configurations, -1 the one for the smallest cards; with None with each in turn.

    For those who test them, time them, or read them off the compiler.
    """
    _wanted.append(number)
    try:
        yield
    finally:
        _wanted.pop()


def launch(
    kernel: Any,
    programs: Callable[[Mapping[str, int]], tuple[int, ...]] | tuple[int, ...],
    configurations: Sequence[Configuration],
    *arguments: Any,
    tiled: Callable[[Mapping[str, int]], Mapping[str, int]] | None = None,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of its first argument, with the first configuration that fits.

    Args:
        kernel: What `jit` made.
        programs: The grid, or a function from the tile sizes to it.
        configurations: As for `first_that_fits`.
        arguments: Of the kernel, in its order, a tensor first.
        tiled: From the tile sizes to other arguments by name, which win over tile sizes of their name.
        constants: The rest by name.

    Raises:
        ValueError: if no configuration fits.
    """

    def run(chosen: Configuration) -> None:
        tiles = chosen.tiles
        grid = programs(tiles) if callable(programs) else programs
        options = chosen.options if tiled is None else {**chosen.options, **tiled(tiles)}
        kernel[grid](*arguments, **constants, **options)

    first, kind = arguments[0], ()
    if len(configurations) > 1:
        # What makes the compiler make another kernel: dtype, what is None, and constants, which alone are annotated.
        kind = first.dtype, *map(type, arguments), *map(constants.get, kernel.fn.__annotations__)
    first_that_fits(run, configurations, kernel.__name__, first.device, kind)


def first_that_fits(
    run: Callable[[Configuration], Any],
    configurations: Sequence[Configuration],
    what: str,
    device: torch.device,
    kind: tuple[Any, ...] = (),
) -> Any:
    """Run with the first configuration that the card has registers and shared memory for.

    It is found once for `what`, a kind and a device and taken again, so results repeat; nothing is timed.

    Args:
        run: Launches with one configuration, and gives back what becomes the result.
        configurations: At most four, the default first, the one that asks for the least last.
        what: What is launched.
        device: Where.
        kind: All that its needs depend on, such as dtype and head size.

    Raises:
        ValueError: if not even the last one fits.
    """
    key, lack = (what, kind, device), ""
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if _wanted:
            chosen = configurations if _wanted[-1] is None else [configurations[_wanted[-1]]]
            return [run(each) for each in chosen][-1]
        if interpreted():
            return run(configurations[0])
        for number in range(_fitting.get(key, 0), len(configurations)):
            try:
                out = run(configurations[number])
            except triton.OutOfResources as error:
                lack = str(error)
                continue
            _fitting[key] = number
            return out
    name = torch.cuda.get_device_name(device)
    raise ValueError(f"{name} cannot hold the smallest tile of {what}: {lack} Ask for impl='reference'.")


def kind(*tensors: Tensor) -> str:
    """Which configurations [..., D] inputs take: `narrow`, or `wide` with heads of more than 64; of float32 those named so."""
    wide = max(x.shape[-1] for x in tensors) > 64
    if tensors[0].dtype == torch.float32:
        return "float32 wide" if wide else "float32"
    return "wide" if wide else "narrow"


def sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    """The constants of heads of D and values of E numbers, and the widths of tiles that hold them."""
    size, values = q.shape[3], v.shape[3]
    return {"D": size, "E": values, "WIDE_D": power(size), "WIDE_E": power(values)}


def power(size: int, least: int = 1) -> int:
    """The power of two that holds so many numbers, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def precision(x: Tensor) -> str:
    """How products of such numbers are computed: float32 is what was asked for, not the tensor cores' 10 bits of it.

    Those are all that a float16 has.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32"


def strides(*tensors: Tensor | None) -> list[int]:
    """The first three of each; zeros for None."""
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
