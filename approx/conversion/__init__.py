"""Conversion: apply a plan to a model, check the result, and write it."""
