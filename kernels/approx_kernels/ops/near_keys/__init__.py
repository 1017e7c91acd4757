"""Exact attention to a window and chosen keys, and how estimates for all other keys join it."""
