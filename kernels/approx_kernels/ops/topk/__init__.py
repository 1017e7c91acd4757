"""Attention to the keys of the largest scores."""
