"""Pictures of what the attention of a model does, exact and approximate."""
