"""The first step of clients at once whose batch norms exchange (FedTAN).

The channels of all clients are side by side, so the arithmetic for one client (`fedbn_flwr.exchange.step`) serves all.
Batches of fewer examples are padded with zeros, which neither the moments nor the gradients include.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedbn_flwr.client.rule import Loss, Tensors
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep, StepExchanges, normalise
from fedbn_flwr.messages.aggregate import Arrays

from .stacked import batch_norm
from .trace import Network

Batches = Sequence[tuple[Tensor, Tensor]]  # one batch of each client
Ask = Callable[[Sequence[Contribution]], Agreement]  # exchanges the contributions of all clients


class CohortExchanges(StepExchanges):
    """The exchanges of clients with a batch each, which have their own `steps`; `ask_all` exchanges for all."""

    def __init__(self, steps: Sequence[LayerwiseStep], batches: Batches, ask_all: Ask) -> None:
        self.steps, self.batches, self._ask_all = steps, batches, ask_all
        self.sizes = [len(inputs) for inputs, _ in batches]
        super().__init__(steps[0], max(self.sizes))
        self._sizes = torch.tensor(self.sizes)
        places = torch.arange(self.batch).unsqueeze(1)
        # [examples, clients]: whether it is an example of the client; None if all are.
        self._real = None if self._sizes.eq(self.batch).all() else places < self._sizes

    def losses(self, network: Network, tensors: Tensors, loss_fn: Loss) -> Tensor:
        """Each client's loss; computes the gradients of the tensors that need one."""
        inputs, targets = zip(*self.batches, strict=True)
        self._names = {each.subject: each.name for each in network.operations}
        compute = network.computation(tensors, {nn.BatchNorm1d: self._layer})
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            outputs = compute(pad_sequence([*inputs], batch_first=True))
            losses = torch.stack([loss_fn(own[: len(y)], y) for own, y in zip(outputs, targets, strict=True)])
            losses.sum().backward()
        self.finish()
        return losses.detach()

    def _layer(self, module: nn.BatchNorm1d, tensors: Tensors, x: Tensor) -> Tensor:
        """x [clients, examples, channels, ...]"""
        if not module.training:
            return batch_norm(module, tensors, x)
        if self._real is not None:
            x = x * self._real.T.view(*x.shape[:2], *[1] * (x.ndim - 2))
        absent = dict.fromkeys(("weight", "bias", "running_mean", "running_var"))
        own = {"momentum": module.momentum, "eps": module.eps, "_check_input_dim": module._check_input_dim}
        flat = {name: tensor.flatten() for name, tensor in tensors.items()}
        layer: Any = SimpleNamespace(**{**absent, **own, **flat})  # what `normalise` reads and updates
        folded = x.transpose(0, 1)
        return normalise(self, self._names[module], layer, folded.flatten(1, 2)).view(folded.shape).transpose(0, 1)

    def mean(self, values: Tensor) -> Tensor:
        if self._real is None:
            return super().mean(values)
        real = self._of_channels(self._real, values.shape[1], 1).view(*values.shape[:2], *[1] * (values.ndim - 2))
        total = (values * real).sum([d for d in range(values.ndim) if d != 1])
        return total / (self.batch_size(total) * values[0, 0].numel())

    def batch_size(self, mean: Tensor) -> float | Tensor:
        return super().batch_size(mean) if self._real is None else self._of_channels(self._sizes, len(mean), 0).to(mean)

    def _of_channels(self, values: Tensor, channels: int, dim: int) -> Tensor:
        """Each client's value for each of its channels; `channels` is their number over all clients."""
        return values.repeat_interleave(channels // len(self.steps), dim)

    def ask(self, layer: str, kind: str, values: int, own: Arrays) -> Agreement:
        """Exchange the channels of all clients; `values` are those of a channel in `self.batch` examples."""
        rows = {name: value.reshape(len(self.steps), -1) for name, value in own.items()}
        agreement = self._ask_all(
            [
                Contribution(
                    layer, kind, {name: value[place] for name, value in rows.items()}, size,
                    values // self.batch * size, step.examples, step.partition,
                )
                for place, (step, size) in enumerate(zip(self.steps, self.sizes, strict=True))
            ]
        )  # fmt: skip
        tiled = {name: np.tile(value, len(self.steps)) for name, value in agreement.tensors.items()}
        return replace(agreement, tensors=tiled)
