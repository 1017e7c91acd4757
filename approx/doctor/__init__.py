"""The health of an installation: what is there, what is missing, and what this machine computes fastest."""
