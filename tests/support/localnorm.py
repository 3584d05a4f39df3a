"""The rules that keep batch norm on the clients, written out in plain PyTorch: the twin of FedBN and SiloBN."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = dict[str, Tensor]


def by_hand(fed: Any, rounds: int, local: Collection[str]) -> tuple[State, list[nn.Module]]:
    """The mean of the clients' last states, and the clients' models as the next round would load them.

    Each round is one epoch of SGD per client; then the mean replaces all keys except `local`.
    """
    models = [copy.deepcopy(fed.model).train() for _ in fed.data]
    counts = [data.num_examples for data in fed.data]
    mean: State = {}
    for _ in range(rounds):
        for model, data in zip(models, fed.data, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=fed.options["lr"])
            for inputs, labels in data.batches:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        mean = share(models, counts, local)
    return mean, models


def loss_of(fed: Any, models: Sequence[nn.Module]) -> float:
    """The mean of the clients' losses, each by its model, in evaluation mode."""
    total = 0.0
    for model, data in zip(models, fed.data, strict=True):
        inputs, labels = (torch.cat([batch[i] for batch in data.batches]) for i in (0, 1))
        total += F.cross_entropy(model.eval()(inputs), labels, reduction="sum").item()
    return total / sum(data.num_examples for data in fed.data)


def share(models: Sequence[nn.Module], counts: Sequence[int], local: Collection[str]) -> State:
    """The mean of the models by their counts, which they load except for what is local."""
    states = [model.state_dict() for model in models]
    mean = {
        key: sum(n * state[key].double() for n, state in zip(counts, states, strict=True)) / sum(counts)
        for key in states[0]
    }
    shared = {key: value for key, value in mean.items() if key not in local and "num_batches" not in key}
    for model in models:
        model.load_state_dict(shared, strict=False)
    return mean
