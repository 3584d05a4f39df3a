"""Trains several clients with small networks at once in one process."""

PARTS = {"pools": {"together": "parked:TogetherPool", "problem": "groups:problem"}}
