"""Attention of blocks of tokens to blocks of keys."""
