"""`python -m benchmarks.rivals`: the same rounds in this library, pfl-research, fedjax and a bare PyTorch loop."""
