"""Measurement: score and time base and converted models alike, and test their differences."""
