"""Softmax attention of blocks of queries to lists of keys."""
