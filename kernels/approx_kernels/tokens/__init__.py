"""Shapes, padding, shared heads and stretches of tokens: what every op does before and after its own arithmetic."""
