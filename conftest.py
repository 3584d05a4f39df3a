"""The fixtures of all tests, also of those beside the extensions."""

pytest_plugins = ["tests.support.fixtures"]
