"""Checkpoints: open and check anything, local or on a hub, and write folders that are complete or absent."""
