"""The results of docs/results/privacy.md, and its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "privacy"
BATCHES = (1, 8, 32, 128)


def noted(file: str) -> list[dict[str, Any]]:
    path = RESULTS / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(rows: Sequence[tuple[str, Tensor]], name: str) -> None:
    """A picture with a row of images [N, C, H, W] for each title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(len(images) for _, images in rows)
    size = (0.62 * columns + 1.9, 0.68 * len(rows))
    figure, places = pyplot.subplots(len(rows), columns, figsize=size, squeeze=False)
    for place in places.flat:
        place.axis("off")
    for (title, images), line in zip(rows, places, strict=True):
        line[0].text(-0.15, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
        for image, place in zip(images, line, strict=False):
            pixels = image.permute(1, 2, 0).clamp(0, 1)
            place.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
    figure.subplots_adjust(left=1.9 / size[0], right=1, top=1, bottom=0, wspace=0.05, hspace=0.05)
    figure.savefig(RESULTS / name, dpi=82)
