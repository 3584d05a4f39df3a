"""Normalisation layers: roles of their state, conversion, freezing, statistics."""
