"""Strides that nobody gave: what they are over so many tokens."""

import math

# The root of GPT-2's 1,024 positions: a causal stride that followed the length would change, while a sequence grows,
# what its first tokens have seen already.
CAUSAL_STRIDE = 32


def root_above(length: int) -> int:
    """The root of a number of tokens, rounded up."""
    return math.isqrt(length - 1) + 1


def root_below(length: int) -> int:
    """The root of a number of tokens, rounded down."""
    return math.isqrt(length)
