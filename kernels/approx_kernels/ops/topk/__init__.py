"""Attention to the keys with the largest scores."""
