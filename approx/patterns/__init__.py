"""Sparse patterns as they are: which query sees which key, what that costs, and how far information gets."""

from approx.patterns.figures import figures
from approx.patterns.pattern import LONGEST, Pattern, find_pattern, pattern_names

__all__ = ["LONGEST", "Pattern", "figures", "find_pattern", "pattern_names"]
