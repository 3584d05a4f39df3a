"""Trains several clients at once in one process, where their networks are small, or on a GPU."""

PARTS = {"pools": {"together": "parked:CohortPool", "problem": "nested:problem"}}
