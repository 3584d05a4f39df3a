"""Stochastic gradient descent, to the bit as torch.optim.SGD computes it.

Written here because the first optimiser of torch.optim in a process imports torch's compiler, 1.7 s in every worker
before its first step, and because a model's tensors are stepped together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn


class SGD:
    """w <- w - lr * b, where b <- momentum * b + g (b = g at first) and g is the gradient plus weight_decay * w.

    `buffers` holds each parameter's b by name, where it has one yet.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.parameters = dict(parameters)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.buffers: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        trained = {name: p for name, p in self.parameters.items() if p.grad is not None}
        if not trained:
            return
        weights: list[Tensor] = list(trained.values())
        steps = [p.grad for p in weights if p.grad is not None]
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, weights, alpha=self.weight_decay))
        if self.momentum:
            old = [name for name in trained if name in self.buffers]
            new = {name: step for name, step in zip(trained, steps, strict=True) if name not in self.buffers}
            if old:
                fresh = [step for name, step in zip(trained, steps, strict=True) if name in self.buffers]
                kept = [self.buffers[name] for name in old]
                torch._foreach_mul_(kept, self.momentum)
                torch._foreach_add_(kept, fresh)
            self.buffers.update({name: step.clone() for name, step in new.items()})
            steps = [self.buffers[name] for name in trained]
        torch._foreach_add_(weights, steps, alpha=-self.lr)

    def tensors(self) -> list[Tensor]:
        """The buffers, one for each parameter: zero where there was none yet, which steps as none would."""
        if not self.momentum:
            return []
        for name, parameter in self.parameters.items():
            if name not in self.buffers:
                self.buffers[name] = torch.zeros_like(parameter, requires_grad=False)
        return [self.buffers[name] for name in self.parameters]

    def kind(self) -> Hashable:
        return (SGD, self.lr, self.momentum, self.weight_decay, *(id(p) for p in self.parameters.values()))
