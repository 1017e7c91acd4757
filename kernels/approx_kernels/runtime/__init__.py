"""Operators of PyTorch, who observes them, and where things are kept."""
