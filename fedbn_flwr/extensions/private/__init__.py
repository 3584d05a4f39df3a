"""Differential privacy of clients."""

PARTS = {"strategies": {"Private": "strategy:Private"}}
