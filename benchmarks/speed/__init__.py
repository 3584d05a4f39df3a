"""The speed of the local engine beside a bare PyTorch loop: `python -m benchmarks.speed`, from a checkout."""
