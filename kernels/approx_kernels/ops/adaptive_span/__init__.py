"""Attention within learned soft spans."""
