"""Which implementation of an op runs here, and what was found out about this machine."""
