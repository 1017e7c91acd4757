"""The fastest exact attention on a machine, chosen among several implementations."""
