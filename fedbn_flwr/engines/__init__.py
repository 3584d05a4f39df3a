"""Engines, which carry messages to clients: the local engine, real nodes, and Flower's simulation."""
