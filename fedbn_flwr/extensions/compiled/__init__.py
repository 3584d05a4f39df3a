"""Compiled training passes, on a GPU recorded ones (`train.compile`, `BNClient(compile=True)`)."""

PARTS = {"passes": {"compiled": "passes:compiled_gradient"}}
