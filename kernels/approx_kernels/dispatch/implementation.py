"""Which implementation of an op runs: the plain one that specifies it, one for CPUs, or one in Triton.

On CUDA `auto` takes kernels in Triton only where their check against the reference has passed; see `checked.py`. Who asks for
`triton` gets it without one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.compiler import is_compiling

from approx_kernels.dispatch.checked import doubt
from approx_kernels.runtime.observed import needs_pytorch

# Some ops have further ones, which their errors and docstrings name.
IMPLEMENTATIONS = ("auto", "plain", "reference", "cpu", "triton")
# What `plain` stands for, the first of these that an op has: PyTorch's own operations, without C or Triton of ours. It is the
# code of a slim converted folder.
IN_PYTORCH = ("fused", "tiles", "reference")
# Those in plain PyTorch: as an op is specified, and of long inputs a part at a time.
PLAIN = ("reference", "tiles")

_LOG = logging.getLogger(__name__)
_wanted = ["auto"]
_chosen: dict[str, str] = {}
_told: set[tuple[str, str]] = set()


def choose(op: str, impl: str, obstacles: Mapping[str, str | None], x: Tensor | None = None) -> str:
    """Say which implementation of an op runs, and keep it for `chosen`; the log warns once why it is not a faster one.

    Args:
        op: The name of the public function that is the op.
        impl: One of `IMPLEMENTATIONS` or of the op's own; `auto` takes what `implementation` asks for, otherwise the first that can run.
        obstacles: The implementations that the op has, the best for these inputs first, each with the reason why it cannot
            run on them, which also says what to do; None where it can.
        x: One of the inputs, for an op with kernels: where they have not passed their check on its device and in its dtype,
            `auto` takes the next implementation that can run.

    Returns:
        A key of `obstacles`.

    Raises:
        ValueError: if the one asked for is unknown, does not exist for this op, or cannot run. There is no falling back.
    """
    asked = _wanted[-1] if impl == "auto" else impl
    if asked not in IMPLEMENTATIONS and asked not in obstacles:
        raise ValueError(
            f"impl is {asked!r}; expected one of {', '.join(dict.fromkeys([*IMPLEMENTATIONS, *obstacles]))}."
        )
    unchecked = None
    if asked == "plain":
        asked = next((name for name in IN_PYTORCH if name in obstacles), asked)
    if asked == "auto":
        if x is not None and obstacles.get("triton", "") is None:
            unchecked = doubt(op, x)
        able = [name for name, why in obstacles.items() if why is None and not (unchecked and name == "triton")]
        found = able[0] if able else None
        if found is None:
            why = " ".join(filter(None, [*obstacles.values(), unchecked]))
            raise ValueError(f"No implementation of {op} can run: {why}")
    else:
        found = asked
        if asked not in obstacles:
            raise ValueError(f"{op} has no implementation {asked!r}; it has {', '.join(obstacles)}. Or ask for 'auto'.")
        if obstacles[asked] is not None:
            raise ValueError(f"The implementation {asked!r} of {op} cannot run: {obstacles[asked]}")
    if is_compiling():
        return found
    _chosen[op] = found
    best, why = next(iter(obstacles.items()))
    # What an observer sees is not what will run without it.
    if asked != "auto" or _LOG.disabled or needs_pytorch() is not None:
        return found
    if unchecked is not None and (op, unchecked) not in _told:
        _told.add((op, unchecked))
        _LOG.warning("%s runs in PyTorch, not in its Triton kernels: %s", op, unchecked)
    if found in PLAIN and why is not None and (op, why) not in _told:
        _told.add((op, why))
        # An obstacle is told to who asked for that one, too; here 'auto' was asked for.
        reason = why.removesuffix(" Ask for 'auto'.").replace(", or ask for 'auto'", "")
        _LOG.warning("%s runs in plain PyTorch, which is slower, for %r cannot run: %s", op, best, reason)
    return found


@contextmanager
def untold() -> Iterator[None]:
    """Let `choose` log nothing, where what runs is not what will run later."""
    _LOG.disabled, before = True, _LOG.disabled
    try:
        yield
    finally:
        _LOG.disabled = before


def chosen() -> dict[str, str]:
    """The implementation that each op ran last in this process, by the op's name; of the fastest exact attention the way."""
    return dict(_chosen)


def chosen_in(call: Callable[[], object]) -> dict[str, str]:
    """What `chosen` says of the ops that run in a call, and of no others."""
    before = chosen()
    forget()
    try:
        call()
        return chosen()
    finally:
        _chosen.update(before | _chosen)


def took(op: str, way: str) -> None:
    """Keep for `chosen` what an implementation, which chooses among ways of its own, took."""
    if not is_compiling():
        _chosen[op] = way


def forget() -> None:
    """Let `chosen` tell only of what runs from now on."""
    _chosen.clear()


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Ask for one implementation wherever an op is called with `auto`; the innermost wish counts.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {name!r}; expected one of {', '.join(IMPLEMENTATIONS)}.")
    _wanted.append(name)
    try:
        yield
    finally:
        _wanted.pop()
