"""Planning: where a model's attention is, which layer gets which mechanism, and at what cost."""
