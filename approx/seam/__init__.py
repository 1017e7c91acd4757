"""The interface to transformers, copied into converted checkpoints: dispatch, cache, model class."""
