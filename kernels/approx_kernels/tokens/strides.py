"""Strides that nobody gave: what they are over so many tokens."""

import math
from bisect import bisect_right
from collections.abc import Callable

# The root of GPT-2's 1,024 positions: a causal stride that followed the length would change, while a sequence grows,
# what its first tokens have seen already.
CAUSAL_STRIDE = 32


def root_above(length: int) -> int:
    """The root of a number of tokens, rounded up."""
    return math.isqrt(length - 1) + 1


def root_below(length: int) -> int:
    """The root of a number of tokens, rounded down."""
    return math.isqrt(length)


def same_stride(stride: Callable[[int], int], most: int) -> Callable[[int], int] | None:
    """From a number of tokens to the largest up to `most` that has the same stride; None where all have the same."""
    if stride(1) == stride(most):
        return None
    return lambda length: bisect_right(range(most + 1), stride(length), lo=1, key=stride) - 1
