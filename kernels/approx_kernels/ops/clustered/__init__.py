"""Clustered attention, plain and improved, bidirectional and causal."""
