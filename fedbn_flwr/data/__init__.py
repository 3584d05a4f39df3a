"""Data sets, partitions, and batches on the device."""
