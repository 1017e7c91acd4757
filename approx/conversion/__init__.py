"""Conversion: open a checkpoint, plan, carry the plan out, write a folder that anyone can load."""
