"""FedProx: the server asks for the proximal term, and clients compute it; and the twin of rules without batch norm."""

from __future__ import annotations

import copy

import flwr.serverapp.strategy as flower
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.strategies import FedAvg, FedProx
from tests.support.federations import Federations, last_model, near, same
from tests.support.twins import sgd, union


def test_mu_of_zero_is_fedavg(federation: Federations) -> None:
    fed = federation((4, 8), lr=0.1, momentum=0.9)
    plain = last_model(fed, FedAvg(fraction_evaluate=0.0), 3)
    assert same(last_model(fed, FedProx(fraction_evaluate=0.0, proximal_mu=0.0), 3), plain)
    assert not same(last_model(fed, FedProx(fraction_evaluate=0.0, proximal_mu=0.5), 3), plain)


def test_a_round_equals_sgd_on_the_loss_with_the_term(federation: Federations) -> None:
    """The twin writes mu/2 ||w - w_t||^2 into the loss and lets autograd find the gradient."""
    fed = federation((6, 6), model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), dtype=torch.float64, lr=0.1)
    ends = []
    for data in fed.data:
        model = copy.deepcopy(fed.model)

        def loss(outputs: Tensor, targets: Tensor, model: nn.Module = model) -> Tensor:
            pairs = zip(model.parameters(), fed.model.parameters(), strict=True)
            return F.cross_entropy(outputs, targets) + 0.7 / 2 * sum(((w - at) ** 2).sum() for w, at in pairs)

        ends.append(sgd(model, data.batches, loss, lr=0.1))
    ours = last_model(fed, FedProx(fraction_evaluate=0.0, proximal_mu=0.7), 1)
    near(ours, {key: (ends[0][key] + ends[1][key]) / 2 for key in ours}, rtol=1e-12, atol=1e-13)


def test_flowers_own_fedprox_asks_our_client_for_the_same(federation: Federations) -> None:
    fed = federation((6, 6), dtype=torch.float64, lr=0.1)
    ours = last_model(fed, FedProx(fraction_evaluate=0.0, proximal_mu=0.4), 3)
    theirs = last_model(fed, flower.FedProx(fraction_evaluate=0.0, proximal_mu=0.4), 3)
    near(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_group_norm_with_one_local_step_is_centralised_sgd(federation: Federations, momentum: float) -> None:
    """Without batch statistics the mean of the clients' gradients is the gradient of the union of their batches."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )  # fmt: skip

    fed = federation((5, 5, 5), batches=1, model=net, dtype=torch.float64, lr=0.1, steps=1, momentum=momentum,
                     keep_momentum=True)  # fmt: skip
    expected = sgd(copy.deepcopy(fed.model), [union(fed)] * 10, lr=0.1, momentum=momentum)
    near(expected, last_model(fed, FedAvg(fraction_evaluate=0.0), 10), rtol=1e-10, atol=1e-12)
