"""Checks of the arguments common to all ops: a ValueError before anything reaches C or a GPU."""

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sums of positions and distances stay below 2^31.
MOST_TOKENS = 2**30
MOST = 2**31 - 1
_MOST_NUMBERS = 2**40


def check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Refuse any but q [B, H, L, D], k [B, G, S, D] and v [B, G, S, E], H a multiple of G, and a mask [B, S] bool or None."""
    check_tensor("q", q)
    if q.ndim != 4 or not q.numel():
        raise ValueError(f"q has shape {list(q.shape)}; expected [batch, heads, queries, head size], each at least 1.")
    batch, heads, _, size = q.shape
    check_part("k", k, q, batch, "heads", "keys", size)
    if heads % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads for the {heads} of q; expected a number that divides them.")
    check_part("v", v, q, *k.shape[:3], "value size")
    # Under autocast, rotary embeddings leave q and k in float32 but v in 16 bits.
    one_dtype = q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)
    if not one_dtype or any(each.dtype not in DTYPES for each in (q, k, v)):
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one of 16, 32 or 64 bits.")
    if max(q.shape[2], k.shape[2]) >= MOST_TOKENS:
        raise ValueError(f"There are {q.shape[2]} queries and {k.shape[2]} keys; expected fewer than 2^30.")
    if key_mask is not None:
        check_part("key_mask", key_mask, q, batch, k.shape[2], dtype=torch.bool)


def check_part(name: str, part: Tensor, q: Tensor, *shape: int | str, dtype: torch.dtype | None = None) -> None:
    """Refuse a further tensor of an op, such as random rows, that does not fit queries q, on whose device it must be.

    `shape` holds its sizes, and a word for any size of at least 1; a dtype of None stands for any floating one.
    """
    check_tensor(name, part)
    # Sizes may be symbolic, which are no integers.
    sizes = [max(actual, 1) if isinstance(size, str) else size for size, actual in zip(shape, part.shape, strict=False)]
    if list(part.shape) != sizes or len(sizes) != len(shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(part.shape)}; expected [{expected}] to fit q.")
    if part.dtype != dtype if dtype else not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}; expected {dtype or 'a floating dtype'}.")
    if part.device != q.device:
        raise ValueError(f"{name} is on {part.device}, q on {q.device}; expected one device. Move it there.")


def check_tensor(name: str, x: Any) -> None:
    """Refuse what is not a tensor of rows in memory, with a ValueError that names it, as all checks here do."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is of type {type(x).__name__}; expected a torch.Tensor.")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; expected torch.strided. Make it dense.")
    if x.numel() > _MOST_NUMBERS:
        raise ValueError(f"{name} has shape {list(x.shape)}: more numbers than any machine holds.")


def check_least(name: str, number: Any, least: int, most: int = MOST) -> None:
    """Refuse a number that is not a whole one from `least` to `most`."""
    if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
        raise ValueError(f"{name} is {_shown(number)}; expected a whole number.")
    if not least <= number <= most:
        limit = f"{least} or more" if number < least else f"{most} or less"
        raise ValueError(f"{name} is {_shown(number)}; expected {limit}.")


def check_form(scale: Any = 1.0, dropout: Any = 0.0, **flags: Any) -> None:
    """Refuse a scale that is not a finite number, a dropout that is not a probability, flags that are not booleans."""
    check_number("scale", scale)
    check_number("dropout", dropout)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout is {dropout}; expected a probability, from 0 to 1.")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is {_shown(flag)}; expected True or False.")


def check_number(name: str, number: Any) -> None:
    """Refuse what is not a finite number of float32."""
    real = isinstance(number, int | float | torch.SymInt | torch.SymFloat) and not isinstance(number, bool)
    if not (real and -3e38 < number < 3e38):
        raise ValueError(f"{name} is {_shown(number)}; expected a finite number.")


def check_word(name: str, word: Any, words: Sequence[str]) -> None:
    """Refuse what is not one of some words."""
    if not isinstance(word, str) or word not in words:
        raise ValueError(f"{name} is {_shown(word)}; expected one of {', '.join(words)}.")


def check_draw(seed: Any, **sizes: Any) -> None:
    """Refuse a seed that no generator takes, and sizes of numbers to draw that are not whole numbers above 0."""
    check_least("seed", seed, -(2**63), 2**64 - 1)
    for name, size in sizes.items():
        check_least(name, size, 1)
    if math.prod(sizes.values()) > _MOST_NUMBERS:
        raise ValueError(f"{' times '.join(map(str, sizes.values()))} numbers are more than any machine holds.")


def check_state(state: Any, q: Tensor, dtype: torch.dtype | None = None, **shapes: Sequence[int | str]) -> None:
    """Refuse a state of decoding without tensors of these names, sizes and dtype; None for any floating one."""
    for name, shape in shapes.items():
        if not isinstance(state, dict) or name not in state:
            raise ValueError(
                f"state is {_shown(state)}; expected the dictionary that the last call returned, with {name!r}."
            )
        check_part(f"state[{name!r}]", state[name], q, *shape, dtype=dtype)


def check_steps(steps: Any, most: int) -> None:
    """Refuse steps of a pattern, for heads in turn, that are not a list of numbers from 1 to `most` or None."""
    if not isinstance(steps, list | tuple) or not steps:
        raise ValueError(f"steps is {_shown(steps)}; expected a list with a step for each of some heads.")
    for step in steps:
        if step is None:
            continue
        check_least("a step", step, 1)
        if step > most:
            raise ValueError(f"a step is {step}; expected a number from 1 to {most}, or None for all of them.")


def checked_stride(stride: Callable[[int], Any], causal: bool, keys: int) -> Callable[[int], int]:
    """A stride that refuses its own results unless they are whole numbers above 0.

    If causal, it must be the same for 1 token as for `keys`, the most that it will be asked for.
    """
    if not callable(stride):
        raise ValueError(f"stride is {_shown(stride)}; expected a function from a number of tokens to a stride.")

    def checked(tokens: int) -> int:
        found = stride(tokens)
        check_least("stride", found, 1)
        return found

    if causal and checked(1) != checked(keys):
        raise ValueError(
            f"stride is {checked(1)} for 1 token and {checked(keys)} for {keys}; a causal pattern needs one stride, or "
            "earlier outputs would change as the sequence grows."
        )
    return checked


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else reprlib.repr(value)
