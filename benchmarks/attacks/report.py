"""The tables of docs/privacy.md, as Markdown, and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "privacy"
BATCHES = (1, 8, 32, 128)


def noted(file: str) -> list[dict[str, Any]]:
    path = RESULTS / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables() -> str:
    return "\n\n".join(
        [
            _table("identify.jsonl", lambda line: f"{line['auc']:.2f}, {100 * line['top1']:.0f} %"),
            _table("identify.jsonl", lambda line: f"{100 * line['solved']:.0f} % ({100 * line['chance']:.0f} %)"),
            _table("reconstruct.jsonl", lambda line: f"{line['psnr']:.1f}, {line['ssim']:.2f}"),
            _guesses(),
        ]
    )


def _table(file: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """A row for each network, model and thing seen; a column for each size of batch."""
    lines = noted(file)
    rows = sorted({(line["setting"], line["model"]) for line in lines})
    seen = list(dict.fromkeys(line["seen"] for line in lines))
    found = {(line["setting"], line["model"], line["seen"], line["batch"]): cell(line) for line in lines}
    text = ["| network | model | seen | " + " | ".join(map(str, BATCHES)) + " |", "|---" * 7 + "|"]
    for row in rows:
        for each in seen:
            cells = [found.get((*row, each, batch), "") for batch in BATCHES]
            if any(cells):
                text.append("| " + " | ".join([*row, each, *cells]) + " |")
    return "\n".join(text)


def _guesses() -> str:
    """PSNR and SSIM of guesses without an attack; they depend on the images only."""
    lines = {(line["setting"].split("/")[0], line["batch"]): line for line in noted("reconstruct.jsonl")}
    text = ["| data | guess | " + " | ".join(map(str, BATCHES)) + " |", "|---" * 6 + "|"]
    for data in dict.fromkeys(data for data, _ in lines):
        for guess in ("mean", "others", "nearest"):
            found = [lines.get((data, batch)) for batch in BATCHES]
            cells = [f"{line[f'{guess}_psnr']:.1f}, {line[f'{guess}_ssim']:.2f}" if line else "" for line in found]
            text.append("| " + " | ".join([data, guess, *cells]) + " |")
    return "\n".join(text)


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
