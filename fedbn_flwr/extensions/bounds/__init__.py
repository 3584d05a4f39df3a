"""Bounds on the influence of one client on a round: its weight, its update and its statistics (docs/robustness.md)."""

PARTS = {"bounds": {"Bounds": "bounds:Bounds", "from_settings": "bounds:from_settings"}}
