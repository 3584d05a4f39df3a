"""The steps of a run after each round: evaluation, history, progress, checkpoint."""
