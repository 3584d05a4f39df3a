"""What happens in a run after each round: evaluation, history, progress, checkpoints."""
