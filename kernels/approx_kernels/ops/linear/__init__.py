"""Linear attention, whole and token by token."""
