"""Attention within buckets of locality-sensitive hashes."""
