"""Networks that people write: frozen parts, buffers that are assigned, samplers, clients without a context."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import FedBN
from tests.support.federations import Federations, last_model, same
from tests.support.fixtures import small_net

Batches = list[tuple[Tensor, Tensor]]


def batches(count: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 4, generator=generator).double() + 2, torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


class FrozenBack(nn.Module):
    """Its batch norm always uses the running statistics, as in the usual code for fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 3)

    def train(self, mode: bool = True) -> FrozenBack:
        super().train(mode)
        self.back.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.back(inputs))
        return logits


class WithoutReturn(FrozenBack):
    """Its `train` returns nothing, as that of many published networks; PyTorch's `eval` returns what it does."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


class Running(nn.Module):
    """A normaliser that assigns its statistics instead of changing them in place."""

    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * inputs.mean(0)
        logits: Tensor = self.head(inputs - self.running_mean)
        return logits


def trained(model: nn.Module, data: Batches, lr: float = 0.1) -> dict[str, Tensor]:
    """The twin: PyTorch's own loop."""
    model = copy.deepcopy(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def check_rounds(client: BNClient, twin: nn.Module, data: Batches) -> None:
    state = {key: value.numpy().copy() for key, value in twin.state_dict().items()}
    for number in (1, 2):
        expected = trained(twin, data)
        twin.load_state_dict(expected)
        state |= client.train_round(state, {"server-round": number}).arrays
        assert client.evaluate_round(state, {"server-round": number})["loss"] > 0
        for key, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(state[key].copy()), value, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("make", [FrozenBack, WithoutReturn, Running])
@pytest.mark.parametrize("shared", [False, True])
def test_a_round_is_that_of_a_plain_loop(make: type[nn.Module], shared: bool) -> None:
    model, data = make().double(), batches()
    twin = copy.deepcopy(model)
    tensors = ModelTensors(model) if shared else model
    check_rounds(BNClient(tensors, data, data, lr=0.1), twin, data)
    if issubclass(make, FrozenBack):
        statistics = BNClient(model, data).statistics_round({}, {"server-round": 1}).arrays
        assert np.abs(statistics["back.1.running_mean"]).sum() > 0
        assert model.state_dict()["back.1.running_mean"].abs().sum() == 0
    else:
        assert model.state_dict()["running_mean"].abs().sum() > 0


def test_a_model_that_its_owner_moved_keeps_its_new_tensors() -> None:
    model, data = Running(), [(inputs.float(), targets) for inputs, targets in batches()]
    client = BNClient(model, data, data)
    model.double()
    doubled = batches()
    client.train_data = client.eval_data = doubled
    state = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    client.train_round(state, {"server-round": 1})
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "subset", "whole"])
def test_a_sampler_gives_the_number_of_examples(kind: str) -> None:
    data = TensorDataset(torch.zeros(30, 4), torch.zeros(30, dtype=torch.int64))
    loader: DataLoader[Any] = {
        "sampler": DataLoader(data, 4, sampler=SubsetRandomSampler(range(7))),
        "batch sampler": DataLoader(
            data, batch_sampler=BatchSampler(SubsetRandomSampler(range(7)), 4, drop_last=False)
        ),
        "subset": DataLoader(torch.utils.data.Subset(data, range(7)), 4, shuffle=True),
        "whole": DataLoader(data, 4, drop_last=True),
    }[kind]
    assert BNClient(Running(), loader).num_examples == (30 if kind == "whole" else 7)


def test_a_batch_sampler_of_unknown_size_is_refused_unless_the_loader_has_the_number() -> None:
    data = TensorDataset(torch.zeros(30, 4), torch.zeros(30, dtype=torch.int64))
    loader = DataLoader(data, batch_sampler=[[0, 1], [2]])
    with pytest.raises(TypeError, match="its batch_sampler, if any, needs a `sampler` with a length"):
        _ = BNClient(Running(), loader).num_examples
    ready: Any = DataLoader([(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))] * 3, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the number of examples in train_data, a DataLoader, is unknown"):
        _ = BNClient(Running(), ready).num_examples  # its length is that of batches
    loader.num_examples = 3  # type: ignore[attr-defined]
    assert BNClient(Running(), loader).num_examples == 3


def test_client_app_gives_a_client_without_context_that_of_its_node(federation: Federations) -> None:
    """Otherwise FedBN's batch norm would be forgotten, and all clients would draw as client 0."""
    fed = federation(model=lambda: nn.Sequential(small_net(), nn.Dropout(0.3)), lr=0.1)

    def make(context: Context) -> BNClient:
        return BNClient(copy.deepcopy(fed.model), fed.data[int(context.node_config["partition-id"])], lr=0.1)

    with_context, without = (FedBN(fraction_evaluate=0.0) for _ in range(2))
    assert same(last_model(fed, with_context, 3), last_model(fed, without, 3, fed.grid(client_app(make))))
