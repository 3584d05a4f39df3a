"""Normalisation layers: roles of their arrays, conversion, freezing, statistics."""
