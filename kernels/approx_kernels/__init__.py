"""Attention operations, one folder each: a public op over a plain PyTorch specification."""
