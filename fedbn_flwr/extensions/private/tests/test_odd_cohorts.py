"""Legal but unusual: two rules that freeze different roles, a model with a shared parameter."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from fedbn_flwr.client.model_tensors import initial_arrays
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.strategies import FedAvg, FixBN, Private
from tests.federation.test_odd_cohorts import NO_EVALUATION, Changed, grid, net, trained


def test_rules_that_freeze_different_roles_freeze_both() -> None:
    on = Changed(grid(), "none", list)
    private = Private(
        FixBN(FedAvg(**NO_EVALUATION), freeze="affine", freeze_round=1), statistics="freeze", noise_seed=1
    )
    before = unpack(pack(initial_arrays(net())))
    after = trained(private, on, 2)
    asked = [m.content["config"]["fedbn.freeze"] for m in on.sent if m.metadata.message_type == "train"]
    assert asked == ["statistics"] * 2 + ["affine,statistics"] * 2
    assert np.array_equal(before["1.running_mean"], after["1.running_mean"])


def test_private_refuses_a_shared_parameter() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 2))
        model[2].weight = model[1].weight
        return model

    with pytest.raises(SettingsError, match=r"'1.weight' and '2.weight' have the same values"):
        trained(Private(FedAvg(**NO_EVALUATION)), grid(), model=tied)
