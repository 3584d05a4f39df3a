"""FedRep: the head trains before the body and stays on the client; against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.strategies import FedRep, FixBN, GlobalMomentum, Secure
from tests.support.federations import Federations, last_model, near, replaced


def test_after_a_round_all_parameters_train_again(federation: Federations) -> None:
    fed = federation((8, 12))
    app, clients = replaced(fed)
    FixBN(FedRep(head_epochs=1), freeze_round=0, freeze=["affine"]).start(fed.grid(app), fed.arrays(), num_rounds=2)
    for client in clients.values():
        assert all(parameter.requires_grad for parameter in client.model.parameters())
        assert client.model[1].weight.equal(fed.model[1].weight), "frozen in both parts"


def test_a_head_without_parameters_raises_an_error(federation: Federations) -> None:
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match="needs a head and a body with parameters that train"):
        FedRep(kept=["statistics"]).start(fed.grid(), fed.arrays(), num_rounds=1)


def test_others_are_around_it(federation: Federations) -> None:
    fed = federation((8, 12), dtype=torch.float64, momentum=0.9)
    plain, masked = (last_model(fed, each, 2) for each in (FedRep(head_epochs=1), Secure(FedRep(head_epochs=1))))
    near(plain, masked, atol=1e-6)  # Secure's step is 6e-8
    momentum = GlobalMomentum(FedRep(head_epochs=1))
    momentum.start(fed.grid(), fed.arrays(), num_rounds=2)
    assert momentum.memory.momentum.keys() == {"0.weight", "1.weight", "1.bias"}
