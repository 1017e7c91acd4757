"""The health of an installation: what works, what is missing, and which attention is fastest on this machine."""
