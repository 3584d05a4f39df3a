"""Legal but unusual: two rules that freeze different roles, a model with a shared parameter."""

from __future__ import annotations

import pytest
from torch import nn

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.strategies import FedAvg, Private
from tests.federation.test_odd_cohorts import NO_EVALUATION, grid, trained


def test_private_refuses_a_shared_parameter() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 2))
        model[2].weight = model[1].weight
        return model

    with pytest.raises(SettingsError, match=r"'1.weight' and '2.weight' have the same values"):
        trained(Private(FedAvg(**NO_EVALUATION)), grid(), model=tied)
