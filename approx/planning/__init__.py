"""Planning: where attention lives in a model, and which layer gets which mechanism at what cost."""
