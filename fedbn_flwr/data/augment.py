"""Random augmentations: functions of a batch, images and targets, and a generator.

torchvision's transforms work image by image; these process a batch on its device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbn_flwr.batch import Value

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a resized crop: share of the image's area, and aspect ratio


def random_resized_crop(images: Tensor, targets: Value, generator: torch.Generator) -> tuple[Tensor, Value]:
    """Cut each image to a random box, and enlarge it to its size."""
    draw = torch.rand((4, len(images), 10), generator=generator, dtype=torch.float64)
    return crop_and_resize(images, resized_crop_boxes(draw, *images.shape[2:])), targets


def random_cut(images: Tensor, targets: Tensor, generator: torch.Generator, *, side: int) -> tuple[Tensor, Tensor]:
    """Cut each image, and its mask, to a random square of `side` pixels."""
    draw = torch.rand((2, len(images), 1), generator=generator, dtype=torch.float64)
    height, width = images.shape[2:]
    top = (draw[0, :, 0] * (height - side + 1)).floor().int().tolist()
    left = (draw[1, :, 0] * (width - side + 1)).floor().int().tolist()

    def cut(values: Tensor) -> Tensor:
        corners = zip(values, top, left, strict=True)
        return torch.stack([image[..., y : y + side, x : x + side] for image, y, x in corners])

    return cut(images), cut(targets)


def resized_crop_boxes(
    draw: Tensor, height: int, width: int, scale: tuple[float, float] = SCALE, ratio: tuple[float, float] = RATIO
) -> Tensor:
    """Boxes [count, 4] distributed as in torchvision's RandomResizedCrop, from uniform draws [4, count, tries].

    The first try that fits into the image is used; if none fits, the largest box in the centre.
    """
    area = height * width * (scale[0] + draw[0] * (scale[1] - scale[0]))
    shape = torch.exp(math.log(ratio[0]) + draw[1] * (math.log(ratio[1]) - math.log(ratio[0])))
    wide, tall = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    first = fits.int().argmax(1, keepdim=True)
    wide, tall, across, down = (values.gather(1, first)[:, 0] for values in (wide, tall, draw[2], draw[3]))
    # Uniform over all positions inside the image.
    left, top = (across * (width - wide + 1)).floor(), (down * (height - tall + 1)).floor()
    widest = min(width, round(height * ratio[1]))
    tallest = min(height, round(width / ratio[0]))
    whole = torch.tensor([(height - tallest) // 2, (width - widest) // 2, tallest, widest], dtype=draw.dtype)
    return torch.where(fits.any(1, keepdim=True), torch.stack([top, left, tall, wide], 1), whole)


def crop_and_resize(images: Tensor, boxes: Tensor) -> Tensor:
    """Cut each image [N, C, H, W] to its box and enlarge it (bilinear) to its size."""
    height, width = images.shape[2:]
    top, left, tall, wide = boxes.float().unbind(1)

    def places(start: Tensor, length: Tensor, count: int) -> Tensor:
        """The source coordinate of each output pixel, never outside the box: [N, count], -1 to 1."""
        steps = torch.arange(count, dtype=torch.float32) + 0.5
        inside = (steps * (length[:, None] / count) - 0.5).clamp(min=0)
        return (2 * (start[:, None] + inside.minimum(length[:, None] - 1.0)) + 1) / count - 1

    rows = places(top, tall, height).to(images.device, non_blocking=True)
    columns = places(left, wide, width).to(images.device, non_blocking=True)
    grid = torch.stack(
        [columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)], dim=3
    )  # [N, H, W, (x, y)]
    resized = torch.nn.functional.grid_sample(
        images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return resized if images.is_floating_point() else resized.round_().to(images.dtype)


def random_crop(images: Tensor, targets: Value, generator: torch.Generator, *, pad: int) -> tuple[Tensor, Value]:
    """Pad each image with zeros and cut it back to its size at a random position."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
    corner = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator).to(images.device, non_blocking=True)
    rows = corner[0] + torch.arange(height, device=images.device)  # [N, H]
    columns = corner[1] + torch.arange(width, device=images.device)  # [N, W]
    which = torch.arange(count, device=images.device)[:, None, None]
    # Indexing moves the channels last: [N, H, W, C].
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous(), targets


def random_flip(images: Tensor, targets: Value, generator: torch.Generator) -> tuple[Tensor, Value]:
    """Mirror each image left to right with probability 1/2, and its mask."""
    flipped = (torch.rand(len(images), generator=generator) < 0.5).to(images.device, non_blocking=True)
    if isinstance(targets, Tensor) and targets.ndim > 1 and not targets.is_floating_point():  # classes of pixels
        targets = torch.where(flipped.view(-1, 1, 1), targets.flip(-1), targets)
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images), targets


def random_rotate(
    images: Tensor, targets: Value, generator: torch.Generator, *, most: float = 30.0
) -> tuple[Tensor, Value]:
    """Rotate each image about its centre by up to `most` degrees in either direction; empty corners are zero.

    Each pixel takes the value of the nearest one, the default of torchvision's RandomRotation.
    """
    # Counter-clockwise, in radians: [N].
    angle = torch.deg2rad((2 * torch.rand(len(images), generator=generator, dtype=torch.float64) - 1) * most)
    height, width = images.shape[-2:]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    y = (torch.arange(height, dtype=torch.float64) - (height - 1) / 2)[:, None]
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    # The source column and row of each output pixel: [N, H, W].
    column = (cos * x - sin * y + (width - 1) / 2).round().long()
    row = (sin * x + cos * y + (height - 1) / 2).round().long()
    inside = ((column >= 0) & (column < width) & (row >= 0) & (row < height))[:, None]
    place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)[:, None]
    inside, place = (values.to(images.device, non_blocking=True) for values in (inside, place))
    rotated = images.flatten(2).gather(2, place.expand(-1, images.shape[1], -1)).view_as(images)
    return rotated * inside, targets
