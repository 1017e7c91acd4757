"""How kernels are launched: the configuration that fits the card, and the arguments that most kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx_kernels.gpu.language import interpreted, triton


class Configuration(NamedTuple):
    """Tile sizes by the names of a kernel's constants, its warps per program, and the stages of its loops."""

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
    """Launch kernels with the configuration of this number, -1 for that of the smallest cards; None for each in turn.

    For tests, benchmarks and tables of what the compiler makes.
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
        kernel: A kernel made by `jit`.
        programs: The grid, or a function from the tile sizes to it.
        configurations: As for `first_that_fits`.
        arguments: Positional arguments of the kernel, a tensor first.
        tiled: From the tile sizes to further keyword arguments, which override tile sizes of the same name.
        constants: Keyword arguments of the kernel.

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
        # The compiler makes another kernel for other dtypes, other arguments that are None, and other constants, which
        # alone are annotated.
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

    It is found once for `what`, a kind and a device, and reused, so results repeat; nothing is timed.

    Args:
        run: Launches with one configuration and returns the result.
        configurations: At most four, the default first, the one that needs least last.
        what: Name of what is launched.
        device: The device to launch on.
        kind: All that the resources it needs depend on, such as dtype and head size.

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
    """Key of the configurations for [..., D] inputs: `narrow`, or `wide` for heads of more than 64; or as float32."""
    wide = max(x.shape[-1] for x in tensors) > 64
    if tensors[0].dtype == torch.float32:
        return "float32 wide" if wide else "float32"
    return "wide" if wide else "narrow"


def sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    """The constants for head size D and value size E, and the widths of tiles that hold them."""
    size, values = q.shape[3], v.shape[3]
    return {"D": size, "E": values, "WIDE_D": power(size), "WIDE_E": power(values)}


def power(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def precision(x: Tensor) -> str:
    """The precision of `tl.dot` for a dtype: all bits of float32, not the 10 that tensor cores keep.

    float16 has no more than 10 bits anyway.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32"


def strides(*tensors: Tensor | None) -> list[int]:
    """The first three strides of each tensor; zeros for None."""
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
