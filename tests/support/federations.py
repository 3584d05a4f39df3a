"""Runs of a small federation (the fixture `federation`), and its models compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.client.layerwise import ParkedRounds
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.messages.arrays import unpack

Arrays = dict[str, np.ndarray]
Federations = Callable[..., Any]  # the fixture `federation`


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


def near(some: Mapping[str, Any], whole: Mapping[str, Any], rtol: float = 0.0, atol: float = 0.0) -> None:
    """Every value of `some` is that of `whole` but for rounding; without tolerances, it is the same."""
    for key, value in some.items():
        np.testing.assert_allclose(value, whole[key], rtol=rtol, atol=atol, err_msg=key)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Keys of arrays in which some value differs by more than any processor's rounding of float64."""
    return {key for key, value in one.items() if not np.allclose(value, other[key], rtol=0, atol=1e-9)}


def replaced(fed: Any) -> tuple[Any, dict[int, BNClient]]:
    """The federation's app with a new client for each message, which gets a copy of the last one's `Context.state`."""
    latest: dict[int, BNClient] = {}

    def make(context: Context) -> BNClient:
        context.state = RecordDict({key: copy.deepcopy(record) for key, record in context.state.items()})
        latest[context.node_id] = fed.make_client(context)
        return latest[context.node_id]

    return client_app(make), latest


def failing(fed: Any, fails: Callable[[int, Any], bool], error: BaseException) -> ClientApp:
    """The federation's app, whose client i cannot be made for a message where `fails(i, its config)`."""

    def make(context: Context, config: Any) -> BNClient:
        if fails(int(context.node_config["partition-id"]), config):
            raise error
        client: BNClient = fed.make_client(context)
        return client

    return client_app(make)


def with_fault(fed: Any, partition: int, fault: Callable[[BNClient], object]) -> ClientApp:
    """The federation's app, in which the model of one client calls `fault` between its first two batch norms."""

    def make(context: Context) -> BNClient:
        client: BNClient = fed.make_client(context)
        if context.node_config["partition-id"] == partition:
            client.model[2].register_forward_pre_hook(lambda *_: fault(client))
        return client

    return client_app(make)


def nodes_in_means(strategy: Any) -> list[list[int]]:
    """The nodes in the mean of each round of a strategy that has no `after_round`, as soon as the round is over."""
    found: list[list[int]] = []
    strategy.after_round = lambda round, replies, weights: found.append(
        [reply.message.metadata.src_node_id for reply in replies]
    )
    return found


# Of messages and their replies, to the replies that arrive.
Change = Callable[[list[Message], list[Message]], list[Message]]


class Changed(GridAround):
    """A grid whose replies are changed by a function of the messages and their replies."""

    def __init__(self, inner: Grid, change: Change) -> None:
        super().__init__(inner)
        self.change = change

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        return self.change(sent, list(super().send_and_receive(sent, timeout=timeout)))


def only(kind: str, change: Callable[[list[Message]], list[Message]]) -> Change:
    """Changes the replies to messages of one kind."""
    return lambda sent, replies: change(replies) if sent and sent[0].metadata.message_type == kind else replies


class Forgetful(ParkedRounds):
    """Parked rounds as if a new process received every message."""

    def take(self, *args: Any) -> None:
        self.clear()
