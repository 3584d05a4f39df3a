"""Runs of a small federation (the fixture `federation`), and its models compared."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.client.layerwise import ParkedRounds
from fedbn_flwr.messages.arrays import unpack

Arrays = dict[str, np.ndarray]


def models_of(fed: Any, strategy: Any, rounds: int, app: ClientApp | None = None, grid: Any = None) -> list[Arrays]:
    """The global model before the first round and after each."""
    models: list[Arrays] = []

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        models.append(dict(unpack(arrays)))

    strategy.start(grid or fed.grid(app), fed.arrays(), num_rounds=rounds, evaluate_fn=keep)
    assert len(models) == rounds + 1
    return models


def last_model(fed: Any, strategy: Any, rounds: int, grid: Any = None) -> Arrays:
    return models_of(fed, strategy, rounds, grid=grid)[-1]


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def replaced(fed: Any) -> tuple[Any, dict[int, BNClient]]:
    """The federation's app with a new client for each message, which gets a copy of the last one's `Context.state`."""
    latest: dict[int, BNClient] = {}

    def make(context: Context) -> BNClient:
        context.state = RecordDict({key: copy.deepcopy(record) for key, record in context.state.items()})
        latest[context.node_id] = fed.make_client(context)
        return latest[context.node_id]

    return client_app(make), latest


def nodes_in_means(strategy: Any) -> list[list[int]]:
    """The nodes in the mean of each round of a strategy that has no `after_round`, as soon as the round is over."""
    found: list[list[int]] = []
    strategy.after_round = lambda round, replies, weights: found.append(
        [reply.message.metadata.src_node_id for reply in replies]
    )
    return found


class Forgetful(ParkedRounds):
    """Parked rounds as if a new process received every message."""

    def take(self, *args: Any) -> None:
        self.clear()
