"""From a YAML file to finished runs."""
