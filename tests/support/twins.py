"""Training written out in plain PyTorch, with which strategies are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = dict[str, Tensor]
OF_SGD = ("lr", "momentum", "weight_decay")


def sgd(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    *,
    only: Collection[str] | None = None,
    **options: Any,
) -> State:
    """The model's state after a step on each batch, of all parameters or `only` some of them."""
    part = [parameter for name, parameter in model.named_parameters() if only is None or name in only]
    optimizer = torch.optim.SGD(part, **options)
    for inputs, targets in batches:
        model.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def union(fed: Any) -> tuple[Tensor, Tensor]:
    """The first batches of all clients of a federation as one."""
    inputs, targets = (torch.cat(parts) for parts in zip(*(data.batches[0] for data in fed.data), strict=True))
    return inputs, targets


def by_hand(fed: Any, rounds: int, local: Collection[str], head_epochs: int = 0) -> tuple[State, list[nn.Module]]:
    """The mean of the clients' last states, and the clients' models as the next round would load them.

    In each round a client trains, with `head_epochs` the parameters in `local` before the others; then the mean
    replaces all keys except `local`.
    """
    models = [copy.deepcopy(fed.model).train() for _ in fed.data]
    options = {key: value for key, value in fed.options.items() if key in OF_SGD}
    body = [name for name, _ in fed.model.named_parameters() if not head_epochs or name not in local]
    mean: State = {}
    for _ in range(rounds):
        for model, data in zip(models, fed.data, strict=True):
            if head_epochs:
                sgd(model, data.batches * head_epochs, only=local, **options)
            sgd(model, data.batches * fed.options.get("epochs", 1), only=body, **options)
        mean = share(models, [data.num_examples for data in fed.data], local)
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
