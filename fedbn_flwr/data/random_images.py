"""Random images in the form of a data set, to try an experiment without its data; accuracies on them mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr import seeding
from fedbn_flwr.errors import DataError

from . import Size
from .catalogue import CATALOGUE
from .dataset import DataSet, Groups
from .images import Images

TRAIN, TEST = 1_000, 200  # images, if their numbers are not given


def has_form(name: str, classes: int | None, channels: int | None, size: Any) -> bool:
    """Whether the form of the images is known: of a listed data set, or from the settings."""
    return name in CATALOGUE or None not in (classes, channels, size)


def random_images(
    name: str,
    *,
    images: int | None = None,
    test_images: int | None = None,
    classes: int | None = None,
    channels: int | None = None,
    size: int | Size | None = None,
    domains: Sequence[str] = (),
) -> DataSet:
    """Images of uniform noise with the classes, channels, size and domains of the data set `name`.

    Classes and domains have equal numbers of images, up to one. Segmentation data have random masks.
    """
    entry = CATALOGUE.get(name)
    if not has_form(name, classes, channels, size):
        raise DataError(
            f"data.random is true, but the form of {name!r} is not known; give data.classes, data.channels and "
            "data.size"
        )
    if entry is not None:
        classes, channels = entry.classes, entry.channels
        size = size or entry.size
        names = entry.names or entry.keep
        known = entry.domains
        if wrong := [domain for domain in domains if domain not in known]:
            raise DataError(f"data.domains has {wrong[0]!r}; the domains of {name!r} are {', '.join(known) or 'none'}")
    else:
        names, known = (), tuple(domains)
    if size is None:
        raise DataError(f"data.random is true, but the images of {name!r} have no fixed size; give data.size")
    assert classes is not None
    assert channels is not None
    shape = (channels, *((size, size) if isinstance(size, int) else size))
    used = tuple(domains) or known
    dense = entry is not None and entry.crop is not None
    parts, groups = {}, {}
    for part, count in (("train", images or TRAIN), ("test", test_images or TEST)):
        # Not torch's generator, which takes twice as long.
        draw = np.random.default_rng(seeding.seed_for(0, f"random images, {part}"))
        pixels = torch.from_numpy(draw.integers(0, 256, (count, *shape), dtype=np.uint8))
        masks = torch.from_numpy(draw.integers(0, classes, (count, *shape[1:]), dtype=np.uint8)) if dense else None
        rows = torch.arange(count)
        labels = torch.zeros(count, dtype=torch.int64) if dense else rows // max(1, len(used)) % classes
        parts[part] = Images(pixels, labels, masks)
        groups[part] = rows % max(1, len(used))
    return DataSet(
        name,
        parts["train"],
        parts["test"],
        names or tuple(map(str, range(classes))),
        Groups("domain", used, groups["train"], groups["test"]) if used else None,
    )
