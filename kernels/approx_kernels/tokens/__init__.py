"""Shapes, padding, shared heads and stretches of tokens: pre- and postprocessing common to all ops."""
