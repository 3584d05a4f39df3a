"""Drives layer-wise rounds of several clients in one process, without messages or streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from fedbn_flwr.strategies.fedtan import algorithm_3  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import Exchange, LayerwiseStep


def alone(contribution: Contribution) -> Agreement:
    """The agreement of a single client."""
    return algorithm_3([contribution], [1.0])


def run_cohort(works: Sequence[Callable[[Exchange], Any]], weights: Sequence[float]) -> tuple[list[Any], int]:
    """Each client's result, and the number of exchanges."""
    sessions = [Session(work, patience=60) for work in works]
    states = [session.advance() for session in sessions]
    exchanges = 0
    while all(states):
        exchanges += 1
        agreement = algorithm_3(states, weights)
        states = [session.advance(agreement) for session in sessions]
    return [session.result.result() for session in sessions], exchanges


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def cohort_gradients(
    model: nn.Module, batches: Sequence[tuple[Any, Tensor]], weights: Sequence[float], **options: bool
) -> tuple[list[nn.Module], dict[str, Tensor], int]:
    """Copies of the model after a step of each client, the weighted mean of their gradients, and the exchanges."""
    copies = [copy.deepcopy(model) for _ in batches]
    works = [
        lambda exchange, m=m, x=x, y=y: LayerwiseStep(exchange, **options)(m, x, y, F.cross_entropy)
        for m, (x, y) in zip(copies, batches, strict=True)
    ]
    _, exchanges = run_cohort(works, weights)
    shares, each = [weight / sum(weights) for weight in weights], [gradients(m) for m in copies]
    return copies, {key: sum(p * g[key] for p, g in zip(shares, each, strict=True)) for key in each[0]}, exchanges


def trained_on(model: nn.Module, inputs: Any, targets: Tensor) -> nn.Module:
    """A copy of the model after a pass over one batch, with its gradients."""
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(inputs), targets).backward()
    return twin
