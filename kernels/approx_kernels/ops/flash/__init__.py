"""Flash attention in Triton, with the patterns that it carries."""
