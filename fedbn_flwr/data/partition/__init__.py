"""Partitions: which client trains on which examples."""
