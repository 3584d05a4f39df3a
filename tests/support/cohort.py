"""Drives layer-wise rounds of several clients in one process, without messages: the arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr.exchange.session import Session
from fedbn_flwr.exchange.step import Answer, Exchange, Pending
from fedbn_flwr.messages.aggregate import normalised, pooled_moments


def agree(pending: Sequence[Pending], weights: Sequence[float]) -> Answer:
    """What the server answers to one exchange."""
    arrays = [{key: value.numpy() for key, value in each.tensors.items()} for each in pending]
    images = sum(each.images for each in pending)
    if pending[0].what == "moments":
        mean, var = pooled_moments([a["mean"] for a in arrays], [a["var"] for a in arrays], weights)
        return Answer({"mean": torch.from_numpy(mean), "var": torch.from_numpy(var)}, images)
    shares = normalised(weights)
    means = {key: np.asarray(sum(p * a[key] for p, a in zip(shares, arrays, strict=True))) for key in arrays[0]}
    return Answer({key: torch.from_numpy(mean) for key, mean in means.items()}, images)


def run_cohort(works: Sequence[Callable[[Exchange], Any]], weights: Sequence[float]) -> tuple[list[Any], int]:
    """Each client's result, and the number of exchanges."""
    sessions = [Session(work, patience=60) for work in works]
    states = [session.advance() for session in sessions]
    exchanges = 0
    while isinstance(states[0], Pending):
        exchanges += 1
        answer = agree(states, weights)
        states = [session.advance(answer) for session in sessions]
    return states, exchanges
