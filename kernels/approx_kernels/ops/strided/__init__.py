"""Attention to a window and to every l-th key."""
