"""The interface to transformers, copied into converted checkpoints: dispatch, cache, model class."""

# It takes the place of what `dispatch` registers.
from approx.seam import windows as windows
