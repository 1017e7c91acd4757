"""Triton for GPUs: the language where it is installed, and the launches of its kernels."""
