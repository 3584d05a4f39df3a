"""A loaded round that waits until the rounds of other clients are loaded too, to be trained along with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from fedbn_flwr.client.training import Trained, Training, train
from fedbn_flwr.errors import log_once
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.named import in_a_line


@dataclass(eq=False)
class Waiting(ABC):
    """A round that has a copy of the values of its network, which other clients may use meanwhile."""

    training: Training
    trained: Trained | None = field(default=None, init=False)  # along with others; None if it must train alone

    def forget(self) -> None:
        """Forget what was computed along with others."""
        self.trained = None

    @abstractmethod
    def restore(self) -> None:
        """Give the network the values that the round has reached: trained, or those that it begins with."""

    def finished(self) -> Trained:
        """The result, with the values in the network."""
        self.restore()
        return train(self.training) if self.trained is None else self.trained


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*chain(model.parameters(), model.buffers())]


@torch.no_grad()
def fill(model: nn.Module, values: list[Tensor]) -> None:
    """Copy these values into the model's parameters and buffers."""
    if values:
        torch._foreach_copy_(tensors_of(model), values)


AskAll = Callable[[Mapping[Waiting, Contribution]], Agreement]  # exchanges the contributions of all rounds


def leave_alone(waiting: Iterable[Waiting], error: Exception) -> None:
    """Let these train alone. One client's data may be the cause of the error: then only that client fails."""
    log_once(f"training several clients at once has failed, so each trains alone: {in_a_line(error)}")
    for each in waiting:
        each.forget()
