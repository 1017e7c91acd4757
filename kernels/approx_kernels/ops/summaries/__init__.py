"""Attention to a window and to summaries of earlier stretches."""
