"""What runs a ClientApp: our local engine, and Flower's own runtimes started safely."""

from .local import LocalGrid
from .polling import PollingGrid

__all__ = ["LocalGrid", "PollingGrid"]
