"""Search: measured time and measured damage of every layer under every candidate, and the best plan within a budget."""
