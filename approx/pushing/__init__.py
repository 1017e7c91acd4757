"""Push a converted folder to a hub: preflight, model card, upload, and a comparison with what comes back."""
