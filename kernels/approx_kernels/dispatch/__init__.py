"""Choice of an op's implementation, and findings about this machine."""
