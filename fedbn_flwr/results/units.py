"""Predictions of targets that were scaled, in the units of the targets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client.losses import form_of, logits_of
from fedbn_flwr.data import Moments
from fedbn_flwr.errors import SettingsError


def in_units(model: nn.Module, units: Moments | None) -> AbstractContextManager[object]:
    """Until the end of the block, the model returns numbers in these units, if there are any (see `InUnits`)."""
    return nullcontext() if units is None else model.register_forward_hook(InUnits(units))


class InUnits(nn.Module):
    """Converts predictions of mean zero and deviation one to the units of the targets: a layer, or a forward hook."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self.mean, self.deviation = (nn.Buffer(torch.tensor(values, dtype=torch.float64)) for values in moments)

    def forward(self, *given: Any) -> Tensor:
        """Of outputs, or of the model, its inputs and its outputs."""
        values = logits_of(given[-1])
        if not isinstance(values, Tensor):
            raise SettingsError(f"data.targets is 'scale', which is for a tensor; the model returned {form_of(values)}")
        return values * self.deviation.to(values) + self.mean.to(values)
