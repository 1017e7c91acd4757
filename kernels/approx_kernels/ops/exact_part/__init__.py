"""Exact attention to some keys, joined with a cheap mechanism for the others."""
