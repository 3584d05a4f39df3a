"""Reads an experiment from YAML and carries out its runs."""
