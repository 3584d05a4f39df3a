"""`fedbn bench`: the cost of federated training beside a plain PyTorch loop that makes the same steps."""
