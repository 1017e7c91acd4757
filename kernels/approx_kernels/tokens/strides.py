"""Default strides, as functions of the number of tokens."""

import math
from bisect import bisect_right
from collections.abc import Callable

# The square root of GPT-2's 1,024 positions. A causal stride that depends on the length would change what earlier tokens
# saw as the sequence grows.
CAUSAL_STRIDE = 32


def root_above(length: int) -> int:
    """The square root of a number of tokens, rounded up."""
    return math.isqrt(length - 1) + 1


def root_below(length: int) -> int:
    """The square root of a number of tokens, rounded down."""
    return math.isqrt(length)


def same_stride(stride: Callable[[int], int], most: int) -> Callable[[int], int] | None:
    """A function from a number of tokens to the largest one up to `most` with the same stride; None if all have the same."""
    if stride(1) == stride(most):
        return None
    return lambda length: bisect_right(range(most + 1), stride(length), lo=1, key=stride) - 1
