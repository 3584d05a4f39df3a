"""Batch norm of series of different lengths, which a batch has padded to one length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MaskedBatchNorm1d(nn.BatchNorm1d):
    """nn.BatchNorm1d over the real positions of series [N, C, T]: `norm(series, mask)`.

    `mask` is bool [N, T], True at real positions. Statistics, running ones too, are those of the real positions of the
    batch, and the output at all other positions is zero. Without a mask the layer is nn.BatchNorm1d.
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return at_real_positions(super().forward, input, mask)


def real_values(input: Tensor, mask: Tensor | None = None) -> Tensor:
    """The values at the real positions [V, C] of series [N, C, T]; without a mask, `input`."""
    if mask is None:
        return input
    expected = [len(input), input.shape[-1]]
    if input.ndim != 3 or mask.dtype is not torch.bool or [*mask.shape] != expected:
        raise ValueError(
            f"the mask is {mask.dtype} {[*mask.shape]} of an input {[*input.shape]}; expected torch.bool [N, T], true "
            "at the real positions of an input [N, C, T]"
        )
    values = input.transpose(1, 2)[mask]
    if not len(values):
        raise ValueError("the mask of a batch has no real position")
    return values


def at_real_positions(function: Callable[[Tensor], Tensor], input: Tensor, mask: Tensor | None = None) -> Tensor:
    """`function` of the values at the real positions, at their places, and zeros elsewhere; without a mask, of all."""
    found = function(real_values(input, mask))
    if mask is None:
        return found
    places = found.new_zeros([*mask.shape, found.shape[1]])
    return places.index_put((mask,), found).transpose(1, 2)
