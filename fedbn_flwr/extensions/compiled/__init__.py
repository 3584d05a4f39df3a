"""Compiled training passes; a GPU records them instead (`train.compile`, `BNClient(compile=True)`)."""

PARTS = {"passes": {"compiled": "passes:compiled_gradient"}}
