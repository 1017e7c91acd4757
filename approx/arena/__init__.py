"""Long Range Arena: small encoders trained from scratch, one for each mechanism and seed."""
