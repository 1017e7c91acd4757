"""Measurement: base and converted through the same door, and what their differences are worth."""
