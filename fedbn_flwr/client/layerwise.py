"""A client's end of a layer-wise round: by messages, parked from one to the next, or over a stream.

Each message may reach another process of the node. A parked round is therefore only a cache: the node's state has
what a replay needs, the model and all agreements so far; the batch and all draws are functions of round and client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import Contribution, agreement_from_records
from fedbn_flwr.exchange.session import Session
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.exchange.stream_client import ExchangeAddress, ExchangeStream
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, unpack

from .client import BNClient
from .node_state import NodeState, run_of
from .rules import Update

MakeClient = Callable[[], BNClient]


@dataclass
class _Parked:
    """A round that waits in this process for the answer to exchange `step` + 1."""

    token: tuple[str | None, int]  # run and round
    step: int
    client: BNClient
    session: Session
    extras: dict[str, Arrays]


class ParkedRounds(dict[tuple[int, int], _Parked]):
    """The rounds that wait in one process, by run and node."""

    def take(self, context: Context, token: tuple[str | None, int], step: int) -> _Parked | None:
        """The node's parked round if it waits for the answer to exchange `step`; any other ends here."""
        parked = self.pop((context.run_id, context.node_id), None)
        if parked is None or (step and (parked.token, parked.step) == (token, step - 1)):
            return parked
        parked.session.abandon()
        return None

    def park(self, context: Context, parked: _Parked) -> None:
        self[context.run_id, context.node_id] = parked

    def clear(self) -> None:
        """End all rounds, as if the process had ended."""
        for parked in self.values():
            parked.session.abandon()
        super().clear()


parked_rounds = ParkedRounds()


def train_by_messages(
    make: MakeClient, content: RecordDict, config: Mapping[str, Any], extras: dict[str, Arrays], context: Context
) -> Contribution | Update:
    """Begin a round (step 0), or continue with the answer to exchange `step`, up to the next exchange or the end."""
    step, run = int(config[protocol.COHORT_STEP]), run_of(config)
    token = (run, int(config.get(protocol.ROUND, 1)))
    state = NodeState(context.state, run)
    state.save_records(_name(step), _exchanged(content, config))
    parked = parked_rounds.take(context, token, step)
    outcome: Contribution | Update
    if parked is not None:
        parked.client.records = context.state
        parked.extras.update(extras)
        outcome = parked.session.advance(agreement_from_records(state.load_records(_name(step))))
    else:
        parked = _replay(make, state, config, extras, token, step)
        outcome = parked.session.advance()
    if isinstance(outcome, Contribution):
        parked.step = step
        parked_rounds.park(context, parked)
    else:
        for number in range(step + 1):
            state.forget(_name(number))
    return outcome


def abandon_parked(context: Context) -> None:
    """End a node's round that still waits in this process: the server has continued without it."""
    parked_rounds.take(context, (None, 0), 0)


def train_over_stream(
    make: MakeClient, arrays: Arrays, config: Mapping[str, Any], extras: Mapping[str, Arrays]
) -> Update:
    """A whole round, with its exchanges on a stream to the server."""
    # Connected first, so that the others soon know of any error here.
    with ExchangeStream(ExchangeAddress.from_config(config)) as stream:
        return make().train_round(arrays, config, extras, stream.exchange)


def _replay(
    make: MakeClient,
    state: NodeState,
    config: Mapping[str, Any],
    extras: dict[str, Arrays],
    token: tuple[str | None, int],
    step: int,
) -> _Parked:
    client = make()
    first = arrays_in(state.load_records(_name(0)))
    if "arrays" not in first:
        raise MessageError(f"message {step} of round {token[1]} reached a node that was never sent the model")
    arrays = unpack(first["arrays"])

    def work(exchange: Exchange) -> Update:
        return client.train_round(arrays, config, extras, exchange)

    agreed = []
    for number in range(1, step + 1):
        if not (records := state.load_records(_name(number))):
            raise MessageError(f"the answer to exchange {number} never reached this node")
        agreed.append(agreement_from_records(records))
    return _Parked(token, step, client, Session(work, agreed), extras)


def _exchanged(content: RecordDict, config: Mapping[str, Any]) -> RecordDict:
    """The model, or an agreement, without a message's other records."""
    arrays = arrays_in(content)
    if "arrays" not in arrays:
        raise MessageError(f"expected an ArrayRecord 'arrays' in the message, found {list(arrays) or 'none'}")
    images = int(config.get(protocol.COHORT_BATCH, 0))
    return RecordDict({"arrays": arrays["arrays"], "config": ConfigRecord({protocol.COHORT_BATCH: images})})


def _name(step: int) -> str:
    return f"exchange.{step}"
