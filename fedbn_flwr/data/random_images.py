"""Random images in the form of a data set, to try an experiment without its data; accuracies on them mean nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedbn_flwr import seeding
from fedbn_flwr.errors import DataError

from .catalogue import CATALOGUE, Entry
from .columns import read
from .dataset import DataSet
from .source import Source

COUNTS = {"train": 1_000, "test": 200}  # images, if their numbers are not given


def has_form(name: str, classes: int | None, channels: int | None, size: Any) -> bool:
    """Whether the form of the images is known: of a listed data set, or from the settings."""
    return name in CATALOGUE or None not in (classes, channels, size)


def random_images(source: Source, channels: int | None, examples: int | None, test_examples: int | None) -> DataSet:
    """Images of uniform noise with the classes, channels, size and domains of a data set.

    Classes and domains have equal numbers of images, up to one. Segmentation data have random masks.
    """
    name, entry = source.name, CATALOGUE.get(source.name)
    if entry is None and source.classes and channels:
        entry = Entry(name, source.classes, channels, size=None, domains=tuple(source.domains))
    size = source.pixels or ((entry.size, entry.size) if entry and entry.size else None)
    if entry is None or size is None:
        raise DataError(
            f"data.random is true, but the form of {name!r} is not known; give data.classes, data.channels and "
            "data.size"
        )
    if wrong := [domain for domain in source.domains if domain not in entry.domains]:
        known = ", ".join(entry.domains) or "none"
        raise DataError(f"data.domains has {wrong[0]!r}; the domains of {name!r} are {known}")
    domains = tuple(source.domains) or entry.domains
    counts = {"train": examples or COUNTS["train"], "test": test_examples or COUNTS["test"]}
    made: dict[str, Any] = {}
    for part, count in counts.items():
        # Not torch's generator, which takes twice as long.
        draw = np.random.default_rng(seeding.seed_for(0, f"random images, {part}"))
        pixels = draw.integers(0, 256, (count, entry.channels, *size), dtype=np.uint8)
        rows = np.arange(count)
        labels = rows // max(1, len(domains)) % entry.classes
        if entry.crop is not None:
            labels = draw.integers(0, entry.classes, (count, *size), dtype=np.uint8)
        of_domains = np.array(domains)[rows % len(domains)] if domains else None
        made[part] = {"inputs": pixels, "labels": labels} | ({} if of_domains is None else {"domains": of_domains})
    classes = entry.names or entry.keep or range(entry.classes)
    return read(Source(name, domains=domains, memory=source.memory), made, known=classes)
