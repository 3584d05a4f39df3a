"""Data sets, how clients share them, and batches on the device."""

from .batches import ClientBatches, TestBatches
from .images import Images, Source, Stream
from .partitions import BY_CLASS, partition, share_test
from .sources import DataSet, Groups, load

__all__ = [
    "BY_CLASS", "ClientBatches", "DataSet", "Groups", "Images", "Source", "Stream", "TestBatches", "load", "partition",
    "share_test",
]  # fmt: skip
