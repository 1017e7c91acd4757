"""Flash attention in Triton, and the patterns it supports."""
