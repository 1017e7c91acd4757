"""Sparse patterns: which query sees which key, at what cost, and how information flows."""

from approx.patterns.figures import figures
from approx.patterns.pattern import LONGEST, Pattern, find_pattern, pattern_names

__all__ = ["LONGEST", "Pattern", "figures", "find_pattern", "pattern_names"]
