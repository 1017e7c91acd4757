"""Measuring: open a base and its variants, and record their quality and speed."""
