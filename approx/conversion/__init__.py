"""Conversion: carry a plan out on a model, check the result, and write it."""
