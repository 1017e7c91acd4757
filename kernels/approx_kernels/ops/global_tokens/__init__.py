"""Attention around tokens that see everything and are seen by everything."""
