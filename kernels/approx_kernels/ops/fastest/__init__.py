"""The fastest exact attention of a machine, chosen among several ways."""
