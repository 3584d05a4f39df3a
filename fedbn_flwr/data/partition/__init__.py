"""Partitions: which client trains on which images."""
