"""Training passes by PyTorch's compiler (`train.compile`, `BNClient(compile=True)`)."""

PARTS = {"passes": {"compiled": "passes:compiled_loss"}}
