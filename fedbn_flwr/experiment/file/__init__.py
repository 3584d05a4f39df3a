"""Turn a file and its layers (defaults, catalogue, extends, run, sweep, size, command line) into runs."""
