"""PyTorch operators, their observers, and files on disk."""
