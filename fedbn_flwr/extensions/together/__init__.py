"""Trains several clients at once in one process, where their networks are small."""

PARTS = {"pools": {"together": "nested:TogetherPool", "problem": "groups:problem"}}
