"""Attention within a sliding window."""
