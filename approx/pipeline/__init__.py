"""The pipeline: all stages from one recipe, and sweeps over many."""
