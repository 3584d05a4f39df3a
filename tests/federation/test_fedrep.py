"""FedRep: the head trains before the body and stays on the client; against plain PyTorch in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import run
from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedRep, FixBN, GlobalMomentum, Secure
from tests.support.federations import Federations, last_model, near, replaced
from tests.support.localnorm import share

State = dict[str, torch.Tensor]
HEAD = ("4.weight", "4.bias")


def by_hand(fed: Any, rounds: int, head: tuple[str, ...], head_epochs: int) -> tuple[State, list[nn.Module]]:
    """The mean of the clients' last states, and the clients' models as the next round would load them."""
    models = [copy.deepcopy(fed.model).train() for _ in fed.data]
    counts = [data.num_examples for data in fed.data]
    mean: State = {}
    for _ in range(rounds):
        for model, data in zip(models, fed.data, strict=True):
            options = {key: fed.options[key] for key in ("lr", "momentum", "weight_decay")}
            for trains_head, epochs in ((True, head_epochs), (False, fed.options["epochs"])):
                # An optimiser for each part: it knows no parameters of the other one.
                part = [each for name, each in model.named_parameters() if (name in head) is trains_head]
                optimizer = torch.optim.SGD(part, **options)
                for inputs, labels in data.batches * epochs:
                    model.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
        mean = share(models, counts, head)
    return mean, models


@pytest.mark.parametrize(
    ("options", "head"),
    [({}, HEAD), ({"kept": ["1", "4"]}, ("1.weight", "1.bias", "1.running_mean", "1.running_var", *HEAD))],
)
def test_three_rounds_equal_the_method_by_hand(
    federation: Federations, options: dict[str, Any], head: tuple[str, ...]
) -> None:
    fed = federation((8, 12), dtype=torch.float64, lr=0.1, momentum=0.9, weight_decay=0.01, epochs=2)
    app, clients = replaced(fed)
    result = FedRep(head_epochs=3, **options).start(fed.grid(app), fed.arrays(), num_rounds=3)
    mean, models = by_hand(fed, 3, head, 3)
    near(unpack(result.arrays), mean, rtol=1e-10, atol=1e-12)
    for node, model in zip((1, 2), models, strict=True):
        near(model.state_dict(), clients[node].model.state_dict(), rtol=1e-10, atol=1e-12)


def test_after_a_round_all_parameters_train_again(federation: Federations) -> None:
    fed = federation((8, 12))
    app, clients = replaced(fed)
    FixBN(FedRep(head_epochs=1), freeze_round=0, freeze=["affine"]).start(fed.grid(app), fed.arrays(), num_rounds=2)
    for client in clients.values():
        assert all(parameter.requires_grad for parameter in client.model.parameters())
        assert client.model[1].weight.equal(fed.model[1].weight), "frozen in both parts"


def test_the_head_never_travels_without_an_average(federation: Federations) -> None:
    fed = federation((8, 12))
    grid = MeteredGrid(fed.grid())
    FedRep(head_epochs=1, global_kept="initial").start(grid, fed.arrays(), num_rounds=2)
    head = sum(fed.arrays()[key].numpy().size for key in HEAD)
    traffic = grid.take()
    total = sum(array.numpy().size for array in fed.arrays().values())
    assert traffic.elements_down_per_client == traffic.elements_up_per_client == total - head


def test_a_head_without_parameters_raises_an_error(federation: Federations) -> None:
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match="needs a head and a body with parameters that train"):
        FedRep(kept=["statistics"]).start(fed.grid(), fed.arrays(), num_rounds=1)


def test_others_are_around_it(federation: Federations) -> None:
    fed = federation((8, 12), momentum=0.9)
    plain, masked = (last_model(fed, each, 2) for each in (FedRep(head_epochs=1), Secure(FedRep(head_epochs=1))))
    near(plain, masked, rtol=1e-5, atol=1e-6)
    momentum = GlobalMomentum(FedRep(head_epochs=1))
    momentum.start(fed.grid(), fed.arrays(), num_rounds=2)
    assert momentum.memory.momentum.keys() == {"0.weight", "1.weight", "1.bias"}


@pytest.mark.slow
def test_clients_at_once_and_in_workers_equal_one_after_the_other(tmp_path: Path) -> None:
    models = []
    for name, engine in (("plain", {}), ("together", {"together": 5}), ("workers", {"workers": 2})):
        run(
            "quick", out=tmp_path / name, rounds=2, strategy={"name": "FedRep", "head_epochs": 1}, progress=False,
            data={"test_examples": 50}, engine={"workers": 0, "device": "cpu", **engine},
        )  # fmt: skip
        (file,) = (tmp_path / name).rglob("model.safetensors")
        models.append(file.read_bytes())
    assert models[0] == models[1] == models[2]
