"""Exact softmax attention."""
