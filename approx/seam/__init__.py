"""The meeting point with transformers, which travels with converted checkpoints: dispatch, cache, model class."""
