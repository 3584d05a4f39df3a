"""A client's part of a layer-wise round: by messages, where the round is parked between two messages, or by a stream.

Each message may reach another process of the node. A parked round is therefore only a cache: the client's state
contains the data for a replay, which are the model and all agreements so far. The batch and all random draws are
functions of round and client.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import Agreement, Contribution, agreement_from_records
from fedbn_flwr.exchange.session import Session
from fedbn_flwr.exchange.step import Exchange
from fedbn_flwr.exchange.stream_client import ExchangeAddress, ExchangeStream
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, filled, unpack
from fedbn_flwr.messages.gate import sent_model

from .client import BNClient
from .node_state import NodeState, run_of
from .rules import Update

MakeClient = Callable[[], BNClient]

_EXCHANGES = "exchanges"  # the round's model and agreements, in the client's state


@dataclass
class _Parked:
    """A round that waits in this process for the result of exchange `step` + 1."""

    token: tuple[str | None, int]  # run and round
    step: int
    client: BNClient
    session: Session
    extras: dict[str, Arrays]
    context: Context  # of the last message


class ParkedRounds(dict[tuple[int, int], _Parked]):
    """The parked rounds of a process, by run and node."""

    def take(self, context: Context, token: tuple[str | None, int], step: int) -> _Parked | None:
        """Remove and return the node's parked round if it waits for the result of exchange `step`; end any other."""
        parked = self.pop((context.run_id, context.node_id), None)
        if parked is None or (step and (parked.token, parked.step) == (token, step - 1)):
            return parked
        parked.session.abandon()
        return None

    def park(self, context: Context, parked: _Parked) -> None:
        self[context.run_id, context.node_id] = parked

    def clear(self) -> None:
        """End all parked rounds, for instance to simulate the end of the process."""
        for parked in self.values():
            parked.session.abandon()
        super().clear()


parked_rounds = ParkedRounds()
# A thread that still waits inside PyTorch when Python ends would abort the process.
atexit.register(parked_rounds.clear)


def train_by_messages(
    make: MakeClient, content: RecordDict, config: Mapping[str, Any], extras: dict[str, Arrays], context: Context
) -> Contribution | Update:
    """Begin a round (step 0) or continue it with the result of exchange `step`, up to the next exchange or the end."""
    step, run = int(config[protocol.COHORT_STEP]), run_of(config)
    token = (run, int(config.get(protocol.ROUND, 1)))
    state = NodeState(context.state, run)
    exchanged = _exchanged(content, config)
    state.save_records(_name(step), exchanged)
    parked = parked_rounds.take(context, token, step)
    outcome: Contribution | Update
    if parked is not None:
        parked.client.state.records, parked.context = context.state, context
        parked.extras.update(extras)
        outcome = parked.session.advance(agreement_from_records(exchanged))
    else:
        parked = _replay(make, state, config, extras, token, step, context)
        outcome = parked.session.advance()
    if isinstance(outcome, Contribution):
        parked.step = step
        parked_rounds.park(context, parked)
    else:
        state.forget(_EXCHANGES)
    return outcome


def continue_parked(context: Context, agreement: Agreement) -> Contribution:
    """Continue the node's round, which is parked in this process, up to its next exchange.

    The state does not get the agreement: the engine knows that the round is here, so no other process replays it.
    """
    parked = parked_rounds.get((context.run_id, context.node_id))
    if parked is None or parked.context is not context:
        raise MessageError(
            "its round is no longer parked in this process, for instance because another grid has served a node of "
            "the same number; give the strategy direct=False if the rounds of two grids take turns in one process"
        )
    del parked_rounds[context.run_id, context.node_id]
    outcome = parked.session.advance(agreement)
    if not isinstance(outcome, Contribution):
        raise MessageError("its round has ended, and the server expects another exchange")
    parked.step += 1
    parked_rounds.park(context, parked)
    return outcome


def model_of_round(content: RecordDict, config: Mapping[str, Any], context: Context) -> Arrays:
    """The model that a round begins with: only message 0 of a layer-wise round contains it."""
    if int(config.get(protocol.COHORT_STEP, 0)):
        content = NodeState(context.state, run_of(config)).load_records(_name(0))
    return unpack(sent_model(content)) if arrays_in(content) else {}


def abandon_parked(context: Context) -> None:
    """End the node's parked round in this process: the server has continued without the client."""
    parked_rounds.take(context, (None, 0), 0)


def train_over_stream(
    make: MakeClient, arrays: Arrays, config: Mapping[str, Any], extras: Mapping[str, Arrays]
) -> Update:
    """A whole round, whose exchanges use a stream to the server."""
    # Connect before the client is created, so that the server and the other clients learn of an error there at once.
    with ExchangeStream(ExchangeAddress.from_config(config)) as stream:
        return make().train_round(arrays, config, extras, stream.exchange)


def _replay(
    make: MakeClient,
    state: NodeState,
    config: Mapping[str, Any],
    extras: dict[str, Arrays],
    token: tuple[str | None, int],
    step: int,
    context: Context,
) -> _Parked:
    client = make()
    first = arrays_in(state.load_records(_name(0)))
    if "arrays" not in first:
        raise MessageError(
            f"message {step} of layer-wise round {token[1]} cannot be handled: the client's state does not have the "
            "model of this round, which message 0 contains"
        )
    arrays = unpack(first["arrays"])

    def work(exchange: Exchange) -> Update:
        return client.train_round(arrays, config, extras, exchange)

    agreements = []
    for number in range(1, step + 1):
        if not (records := state.load_records(_name(number))):
            raise MessageError(f"the client's state does not have the result of exchange {number}")
        agreements.append(agreement_from_records(records))
    return _Parked(token, step, client, Session(work, agreements), extras, context)


def _exchanged(content: RecordDict, config: Mapping[str, Any]) -> RecordDict:
    """The message's model or agreement, without its other records."""
    arrays = arrays_in(content)
    if "arrays" not in arrays:
        raise MessageError(f"expected an ArrayRecord 'arrays', found {len(arrays)} ArrayRecords: {list(arrays)}")
    images = int(config.get(protocol.COHORT_BATCH, 0))
    batch = filled(ConfigRecord(), {protocol.COHORT_BATCH: images})
    return filled(RecordDict(), {"arrays": arrays["arrays"], "config": batch})


def _name(step: int) -> str:
    return f"{_EXCHANGES}/{step}"
