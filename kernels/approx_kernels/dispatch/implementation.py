"""Choice of an op's implementation: the plain one that specifies it, one for CPUs, or one in Triton.

On CUDA `auto` uses Triton kernels only if their check against the reference has passed; see `checked.py`. An explicit
`triton` runs them without a check.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.compiler import is_compiling

from approx_kernels.dispatch.checked import doubt
from approx_kernels.runtime.pytorch import needs_pytorch

# Some ops have more, which their errors and docstrings name.
IMPLEMENTATIONS = ("auto", "plain", "reference", "cpu", "triton")
# `plain` is the first of these that an op has: only PyTorch's own operations, without our C or Triton, as in a
# converted folder.
IN_PYTORCH = ("fused", "tiles", "reference")
# Those in plain PyTorch: the specification of an op, and its tiled form for long inputs.
PLAIN = ("reference", "tiles")

_LOG = logging.getLogger(__name__)
_wanted = ["auto"]
_chosen: dict[str, str] = {}


def choose(op: str, impl: str, obstacles: Mapping[str, str | None], x: Tensor | None = None) -> str:
    """Choose the implementation of an op, and record it for `chosen`; log once why a faster one cannot run.

    Args:
        op: Name of the op's public function.
        impl: One of `IMPLEMENTATIONS` or of the op's own; `auto` takes the one set by `implementation`, or else the
            first that can run.
        obstacles: The op's implementations, the best for these inputs first, each with the reason why it cannot run on
            them and what to do; None if it can.
        x: One of the inputs, for an op with kernels: if they have not passed their check on its device and in its
            dtype, `auto` takes the next implementation that can run.

    Returns:
        A key of `obstacles`.

    Raises:
        ValueError: if the requested one is unknown, does not exist for this op, or cannot run; there is no fallback.
    """
    asked = _wanted[-1] if impl == "auto" else impl
    if not isinstance(asked, str) or (asked not in IMPLEMENTATIONS and asked not in obstacles):
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
        choice = able[0] if able else None
        if choice is None:
            why = " ".join(filter(None, [*obstacles.values(), unchecked]))
            raise ValueError(f"No implementation of {op} can run: {why}")
    else:
        choice = asked
        if asked not in obstacles:
            raise ValueError(f"{op} has no implementation {asked!r}; it has {', '.join(obstacles)}. Or ask for 'auto'.")
        if obstacles[asked] is not None:
            raise ValueError(f"The implementation {asked!r} of {op} cannot run: {obstacles[asked]}")
    if is_compiling():
        return choice
    _chosen[op] = choice
    best, why = next(iter(obstacles.items()))
    # Without the observer, another implementation will run.
    if asked != "auto" or _LOG.disabled or needs_pytorch() is not None:
        return choice
    if unchecked is not None:
        _warn_once("%s runs in PyTorch, not in its Triton kernels: %s", op, unchecked)
    if choice in PLAIN and why is not None:
        # Obstacles recommend 'auto', which is already in use here.
        reason = why.removesuffix(" Ask for 'auto'.").replace(", or ask for 'auto'", "")
        _warn_once("%s runs in plain PyTorch, which is slower, because %r cannot run: %s", op, best, reason)
    return choice


@functools.cache
def _warn_once(message: str, *parts: str) -> None:
    _LOG.warning(message, *parts)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of `choose`, for calls that differ from those of later use."""
    _LOG.disabled, before = True, _LOG.disabled
    try:
        yield
    finally:
        _LOG.disabled = before


def chosen() -> dict[str, str]:
    """The last implementation of each op in this process, by name; for the fastest exact attention, its way."""
    return dict(_chosen)


def chosen_in(call: Callable[[], object]) -> dict[str, str]:
    """`chosen`, for only the ops that run in a call."""
    before = chosen()
    forget()
    try:
        call()
        return chosen()
    finally:
        _chosen.update(before | _chosen)


def took(op: str, way: str) -> None:
    """Record for `chosen` which of its own ways an implementation took."""
    if not is_compiling():
        _chosen[op] = way


def forget() -> None:
    """Reset `chosen`."""
    _chosen.clear()


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Set the implementation of all ops called with `auto`; the innermost context wins.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {name!r}; expected one of {', '.join(IMPLEMENTATIONS)}.")
    _wanted.append(name)
    try:
        yield
    finally:
        _wanted.pop()
