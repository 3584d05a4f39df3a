"""Mean and standard deviation of each feature or channel: sums of one part of the data, and the moments of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import Moments
from .examples import MASK, Values, main

_CHUNK = 1_024  # examples, of which a float64 copy is made
_CONSTANT = 1e-8  # a deviation of this part of the mean is rounding: float32 has 24 bits


@dataclass(frozen=True)
class Sums:
    """Of each feature or channel: how many values there are, their sum, and that of their squared distances to `shift`.

    Missing and padded values do not count. All are float64. Sums about one shift can be added.
    """

    count: Tensor
    total: Tensor
    squares: Tensor
    shift: Tensor


def sums_of(inputs: Values, shift: Tensor | None = None) -> Sums:
    """The sums over all examples, about each feature's own mean unless a shift is given; empty for tokens.

    Pixels of uint8 images count from 0 to 1.
    """
    values = main(inputs)
    mask = inputs.get(MASK) if isinstance(inputs, dict) else None
    if values.dtype is torch.uint8:
        return _of_pixels(values, shift)
    if not values.is_floating_point():
        return Sums(*torch.empty(4, 0, dtype=torch.float64))
    count, total, squares = torch.zeros(3, values.shape[1], dtype=torch.float64, device=values.device)
    masks = [None] * len(values) if mask is None else mask.split(_CHUNK)
    for some, real in zip(values.split(_CHUNK), masks, strict=False):
        known = _known(some, real)
        count += known.sum(1)
        total += _by_feature(some).where(known, 0).sum(1)
    about = total / count.clamp(min=1) if shift is None else shift.to(total)
    for some, real in zip(values.split(_CHUNK), masks, strict=False):
        squares += (_by_feature(some) - about[:, None]).where(_known(some, real), 0).square().sum(1)
    return Sums(*(each.cpu() for each in (count, total, squares, about)))


def _by_feature(values: Tensor) -> Tensor:
    """[features or channels, all else]"""
    return values.double().transpose(0, 1).flatten(1)


def _known(values: Tensor, mask: Tensor | None) -> Tensor:
    there = ~values.isnan()
    if mask is not None:
        there &= mask.view(len(mask), *[1] * (values.ndim - 2), -1)
    return there.transpose(0, 1).flatten(1)


def _of_pixels(images: Tensor, shift: Tensor | None) -> Sums:
    # Histograms are exact and need no float copy of the data.
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64, device=images.device)
    for some in images.split(_CHUNK):
        for count, channel in zip(counts, some.unbind(1), strict=True):
            count += torch.bincount(channel.reshape(-1), minlength=256)
    values, found = torch.arange(256, dtype=torch.float64) / 255, counts.cpu().double()
    count, total = found.sum(1), found @ values
    about = total / count if shift is None else shift
    return Sums(count, total, (found * (values - about[:, None]).square()).sum(1), about)


def moments_from(parts: Sequence[Sums]) -> Moments:
    """Mean and standard deviation of the union of the parts. A feature that is constant is not scaled."""
    count = torch.stack([part.count for part in parts]).sum(0)
    mean = torch.stack([part.total for part in parts]).sum(0) / count.clamp(min=1)
    squares = torch.zeros_like(mean)
    for part in parts:
        own = part.total / part.count.clamp(min=1)
        # About the part's mean, then about that of all.
        squares += part.squares - part.count * (own - part.shift).square() + part.count * (own - mean).square()
    deviation = (squares.clamp(min=0) / count.clamp(min=1)).sqrt()
    deviation = deviation.where(deviation > _CONSTANT * mean.abs(), 1.0)
    return tuple(mean.tolist()), tuple(deviation.tolist())
