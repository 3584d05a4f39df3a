"""Messages to clients: `client_app` serves a BNClient, or any NumPyClient, to message-based strategies.

app = client_app(make_client)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedbn_flwr.errors import FedbnError, MessageError
from fedbn_flwr.exchange.frames import Frame
from fedbn_flwr.exchange.session import Session
from fedbn_flwr.exchange.step import Answer, Exchange, Pending
from fedbn_flwr.exchange.stream_client import ExchangeAddress, ExchangeStream
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, pack, unpack

from .client import BNClient, Config, Update
from .node_state import NodeState
from .state_folder import remembered, return_to

MakeClient = Callable[[Context], NumPyClient] | Callable[[Context, Config], NumPyClient]
Make = Callable[[], NumPyClient]


class ClientFailed(FedbnError, RuntimeError):
    """What a client answers when it could not do as asked."""


def client_app(make_client: MakeClient) -> ClientApp:
    """A ClientApp that serves `make_client(context)` to message-based strategies, Flower's and ours.

    `make_client` is called for each message and returns a BNClient or any other NumPyClient; one with two
    parameters is given the message's config as well. Whatever goes wrong becomes Flower's error reply, which
    names the partition and what failed.
    """
    app = ClientApp()
    takes_config = len(inspect.signature(make_client).parameters) > 1

    def answer(what: str, handle: Handler, message: Message, context: Context) -> Message:
        def make() -> NumPyClient:
            if not takes_config:
                return make_client(context)  # type: ignore[call-arg]
            return make_client(context, _config(message))  # type: ignore[call-arg]

        try:
            with remembered(message, _config(message), context):
                return Message(handle(make, message, context), reply_to=message)
        except (Exception, SystemExit) as error:  # sys.exit() in a handler would take Flower's process along
            who = context.node_config.get("partition-id", f"node {context.node_id}")
            raise ClientFailed(f"client {who} could not {what}: {type(error).__name__}: {error}") from error

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = _config(message)
        if protocol.COHORT_STEP in config:
            return answer("train", _layerwise, message, context)
        _abandon(context)
        return answer("train", _directly if protocol.DIRECT in config else _train, message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer("evaluate", _evaluate, message, context)

    @app.query(protocol.COHORT_QUERY.split(".")[1])
    def cohort(message: Message, context: Context) -> Message:
        return answer("take part in a layer-wise step", _layerwise, message, context)

    @app.query(protocol.STATISTICS_QUERY.split(".")[1])
    def statistics(message: Message, context: Context) -> Message:
        return answer("tell its statistics", _statistics, message, context)

    @app.query(protocol.PARTITION_QUERY.split(".")[1])
    def partition(message: Message, context: Context) -> Message:
        return answer("tell its partition", _partition, message, context)

    return app


# --- one handler per kind of message -----------------------------------------

Handler = Callable[[Make, Message, Context], RecordDict]


def _train(make: Make, message: Message, context: Context) -> RecordDict:
    client, record, config = make(), _arrays(message), _config(message)
    if isinstance(client, BNClient):
        return _reply(client.train_round(unpack(record), config, _extras(message, record)))
    # NumPyClient knows positions, not names: the reply takes the names of the message.
    protocol.check_known(config, protocol.OF_RUN)
    values, num_examples, extra = client.fit([a.numpy() for a in record.values()], _plain(config))
    if len(values) != len(record):
        raise MessageError(f"fit() returned {len(values)} arrays for the {len(record)} it was given")
    arrays = dict(zip(record, values, strict=True))
    return _reply(Update(arrays, {protocol.NUM_EXAMPLES: num_examples, **extra} | _place(context), {}))


def _evaluate(make: Make, message: Message, context: Context) -> RecordDict:
    client, record, config = make(), _arrays(message), _config(message)
    if isinstance(client, BNClient):
        metrics = client.evaluate_round(unpack(record), config)
    else:
        loss, num_examples, extra = client.evaluate([a.numpy() for a in record.values()], _plain(config))
        metrics = {"loss": loss, protocol.NUM_EXAMPLES: num_examples, **extra}
    return RecordDict({"metrics": _numbers(metrics)})


def _partition(make: Make, message: Message, context: Context) -> RecordDict:
    config = _config(message)
    if config.get(protocol.READY):
        make()  # what is wrong with a site shows before anybody trains
    return RecordDict({"metrics": _numbers(_place(context) | return_to(config, context))})


def _place(context: Context) -> dict[str, Any]:
    """The node's partition, where it has one: node ids are random, and replies are put in an order."""
    partition = context.node_config.get("partition-id")
    return {} if partition is None else {protocol.PARTITION: int(partition)}


def _statistics(make: Make, message: Message, context: Context) -> RecordDict:
    client = make()
    if not isinstance(client, BNClient):
        raise MessageError(f"{type(client).__name__} cannot tell statistics of its data; a BNClient can")
    return _reply(client.statistics_round(unpack(_arrays(message)), _config(message)))


# --- layer-wise rounds -------------------------------------------------------


@dataclass
class _Parked:
    """A round that waits in this process for the answer to exchange `step` + 1."""

    token: tuple[str | None, int]  # run and round
    step: int
    client: BNClient
    session: Session
    extras: dict[str, Arrays]


# By run and node. Only a cache: a node's next message may come to another process, which replays the round.
_parked: dict[tuple[int, int], _Parked] = {}


def _abandon(context: Context) -> None:
    """Let go of a round that still waits here: the server has gone on without its end."""
    if (parked := _parked.pop((context.run_id, context.node_id), None)) is not None:
        parked.session.abandon()


def _layerwise(make: Make, message: Message, context: Context) -> RecordDict:
    """Begin a round (step 0), or go on with the answer to exchange `step`, up to the next exchange or the end."""
    record, config = _arrays(message), _config(message)
    told = _plain(config)
    step, run = int(told[protocol.COHORT_STEP]), protocol.run_of(told)
    token = (run, int(told.get(protocol.ROUND, 1)))
    state = NodeState(context.state, run)
    # What a replay needs; the batch and all draws are functions of round and client.
    images = int(told.get(protocol.COHORT_BATCH, 0))
    state.save(f"cohort.{step}", {**unpack(record), "images": np.asarray(images)})
    key = (context.run_id, context.node_id)
    parked = _parked.pop(key, None)
    if step and parked is not None and (parked.token, parked.step) == (token, step - 1):
        parked.client.records = context.state
        parked.extras.update(_extras(message, record))
        outcome = parked.session.advance(_answer(state, step))
    else:
        if parked is not None:
            parked.session.abandon()
        parked = _begin(make, state, config, _extras(message, record), token, step)
        outcome = parked.session.advance()
    if isinstance(outcome, Pending):
        parked.step = step
        _parked[key] = parked
        reply = _reply(_brought(outcome, parked.client))
        reply["config"] = ConfigRecord({"what": outcome.what})
        return reply
    for number in range(step + 1):
        state.forget(f"cohort.{number}")
    return _reply(outcome)


def _begin(
    make: Make,
    state: NodeState,
    config: ConfigRecord,
    extras: dict[str, Arrays],
    token: tuple[str | None, int],
    step: int,
) -> _Parked:
    client = _layerwise_client(make)
    arrays = dict(state.load("cohort.0"))
    if not arrays:
        raise MessageError(f"message {step} of round {token[1]} came to a node that was never sent the model")
    arrays.pop("images")

    def work(exchange: Exchange) -> Update:
        return client.train_round(arrays, config, extras, exchange)

    agreed = [_answer(state, number) for number in range(1, step + 1)]
    return _Parked(token, step, client, Session(work, agreed), extras)


def _directly(make: Make, message: Message, context: Context) -> RecordDict:
    """A whole round, with its exchanges on a stream of our own to the server."""
    record, config = _arrays(message), _config(message)
    # Connected first, so that the others soon know of whatever goes wrong here.
    with ExchangeStream(ExchangeAddress.from_config(config)) as line:
        client = _layerwise_client(make)

        def exchange(pending: Pending) -> Answer:
            brought = _brought(pending, client)
            return line.exchange(Frame(pending.what, brought.arrays, brought.metrics))

        update = client.train_round(unpack(record), _plain(config), _extras(message, record), exchange)
    return _reply(update)


def _layerwise_client(make: Make) -> BNClient:
    client = make()
    if not isinstance(client, BNClient):
        raise MessageError(f"{type(client).__name__} cannot take part in a layer-wise step; a BNClient can")
    return client


def _brought(pending: Pending, client: BNClient) -> Update:
    """What a client brings to an exchange, whichever way it travels."""
    metrics = {
        protocol.EXCHANGES_LEFT: pending.left,
        protocol.BATCH_EXAMPLES: pending.images,
        protocol.NUM_EXAMPLES: client.num_examples,
    }
    arrays = {name: tensor.cpu().numpy() for name, tensor in pending.tensors.items()}
    return Update(arrays, metrics | client.identity, {})


def _answer(state: NodeState, step: int) -> Answer:
    arrays = dict(state.load(f"cohort.{step}"))
    if not arrays:
        raise MessageError(f"the answer to exchange {step} never came to this node")
    images = int(arrays.pop("images"))
    return Answer({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, images)


# --- records -----------------------------------------------------------------


def _arrays(message: Message) -> ArrayRecord:
    """The model's arrays; a lone record may have any name, as Flower's strategies allow."""
    records = arrays_in(message.content)
    if "arrays" in records:
        return records["arrays"]
    if len(records) != 1:
        raise MessageError(f"expected an ArrayRecord 'arrays' in the message, found {list(records) or 'none'}")
    return next(iter(records.values()))


def _config(message: Message) -> ConfigRecord:
    return next(iter(configs_in(message.content).values()), ConfigRecord())


def _extras(message: Message, record: ArrayRecord) -> dict[str, Arrays]:
    return {name: unpack(other) for name, other in arrays_in(message.content).items() if other is not record}


def _reply(update: Update) -> RecordDict:
    extras = {name: pack(arrays) for name, arrays in update.extras.items()}
    return RecordDict({"arrays": pack(update.arrays), "metrics": _numbers(update.metrics), **extras})


def _plain(config: ConfigRecord) -> dict[str, Any]:
    return {key: config[key] for key in config}


def _numbers(metrics: Mapping[str, Any]) -> MetricRecord:
    """Plain numbers: a MetricRecord takes neither booleans nor NumPy's scalars."""
    plain = MetricRecord()
    for key, value in metrics.items():
        if isinstance(value, bool | np.bool_ | int | np.integer):
            plain[key] = int(value)
        elif isinstance(value, float | np.floating):
            plain[key] = float(value)
    return plain
