"""Push a converted folder to a hub: preflight, model card, upload, and a comparison of the downloaded copy."""
