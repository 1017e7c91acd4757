"""Checkpoints: open and check them, local or on the hub, and write folders that are complete or absent."""
