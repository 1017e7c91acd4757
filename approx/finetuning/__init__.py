"""Fine-tuning that heals a converted model, and trains an exact one for comparison."""
