"""Clusters of queries: hashes, and k-means on their bits."""
