"""Stochastic gradient descent: the same bits as torch.optim's, without the import of PyTorch's compiler."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from fedbn_flwr.client.training import SGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("momentum", "weight_decay"), list(itertools.product([0.0, 0.9], [0.0, 0.01])))
def test_steps_are_those_of_torch(momentum: float, weight_decay: float, dtype: torch.dtype) -> None:
    """Also where a parameter has no gradient in some steps, and where momentum is set in the middle."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)
    twin = copy.deepcopy(ours)
    optimizer = SGD(dict(ours.named_parameters()), 0.1, momentum, weight_decay)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay, foreach=False)
    for number in range(6):
        inputs = torch.randn(8, 7, dtype=dtype)
        for model, each in ((ours, optimizer), (twin, theirs)):
            each.zero_grad()
            model(inputs).square().mean().backward()
            if number in (0, 3):
                model[0].bias.grad = None
            if number == 4 and momentum:
                value = torch.full((3,), 2.0, dtype=dtype)
                if isinstance(each, SGD):
                    each.buffers["2.bias"] = value
                else:
                    each.state[model[2].bias]["momentum_buffer"] = value
            each.step()
        for (name, a), b in zip(ours.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), (number, name)


def test_nothing_to_step_is_no_error() -> None:
    model = nn.Linear(2, 2)
    SGD(dict(model.named_parameters()), 0.1).step()
    SGD({}, 0.1).step()
