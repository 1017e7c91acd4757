"""Attention to a window and to every so many keys."""
