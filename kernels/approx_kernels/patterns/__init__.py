"""The sparse patterns as dense masks: the specification of the ops, and what plots and figures are made from."""

from approx_kernels.patterns.reference import pattern_mask

__all__ = ["pattern_mask"]
