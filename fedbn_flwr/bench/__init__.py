"""`fedbn bench`: measures the overhead of federated training over a plain PyTorch loop with the same steps."""
