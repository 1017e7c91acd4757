"""Attention by random features."""
