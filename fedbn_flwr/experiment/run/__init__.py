"""Carries runs out: the loop, resuming, runs side by side, a Ray cluster."""
