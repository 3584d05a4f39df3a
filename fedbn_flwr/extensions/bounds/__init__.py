"""Bounds on the influence of one client on a round: its weight, its update and its statistics (docs/robustness.md)."""

PARTS = {"bounds": {"Bounds": "strategy:Bounds", "from_settings": "strategy:from_settings"}}
