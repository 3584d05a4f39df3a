"""Drives layer-wise rounds of several clients in one process, without messages or streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedbn_flwr.strategies.fedtan import algorithm_3  # type: ignore[import-untyped]

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import Exchange


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
