"""Measuring: open two models, and take the quality and speed of both through the same door into one record."""
