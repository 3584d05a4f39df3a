"""Attacks on the statistics that clients send; docs/privacy.md has their results."""
