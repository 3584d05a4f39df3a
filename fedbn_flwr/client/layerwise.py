"""The client's side of a layer-wise round: the round is parked between two messages.

The round runs in a thread of its own and is parked inside `exchange`. The next message may reach another process of the
node, so a parked round is only a cache: the client's state has what a replay needs, the model and all agreements so
far. Batches and random draws depend on round and client alone, so a replay computes the same numbers.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr import seeding
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import TIME_LIMIT, Agreement, Contribution, agreement_from_records
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import config_of, unpack
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import arrays_of, other_arrays

from .client import BNClient, Update
from .node_state import NodeState, run_of

MakeBNClient = Callable[[], BNClient]
Result = TypeVar("Result")
Sent = TypeVar("Sent")  # what a session sends to an exchange: the contribution of one client, or of several

# A record of the client's state that identifies its round; with "/0" the model, with "/1", "/2", ... the agreements,
# each with the config of its message.
LAYERWISE = "fedbn.layerwise"


_Tasks = queue.SimpleQueue[Callable[[], object]]  # a thread's queue; it runs one session after the other

# Threads that wait for a session. Each has OpenMP's threads, cuDNN's plans of convolutions and settings of PyTorch's
# compiler, which a new thread would have to make again.
_idle: list[_Tasks] = []


def _new_thread() -> _Tasks:
    tasks = _Tasks()

    def run() -> None:
        while True:
            tasks.get()()  # without a variable, which would keep the session's client in memory until the next one

    threading.Thread(target=run, daemon=True).start()
    return tasks


class Session(Generic[Sent, Result]):
    """Runs `work(exchange)` until its next exchange or its end, one piece at a time.

    Parameters
    ----------
    work
        The round; called once, in another thread.
    agreed
        Answers to the first exchanges, from an earlier session of the same round.
    patience
        Seconds that a parked round waits for its next message, more than an exchange may take.
    """

    _tasks: _Tasks  # the queue of the thread that runs it

    def __init__(
        self,
        work: Callable[[Callable[[Sent], Agreement]], Result],
        agreed: Sequence[Agreement] = (),
        *,
        patience: float = 2 * TIME_LIMIT,
    ) -> None:
        self._work, self._agreed = work, iter(agreed)
        self.step = len(agreed)  # the number of exchanges whose result it has
        self.result: Future[Result] = Future()  # what `work` returned, or its error
        self._answers: queue.SimpleQueue[Agreement | None] = queue.SimpleQueue()
        self._contributions: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._patience = patience

    def advance(self, answer: Agreement | None = None) -> Sent | None:
        """Run to the next exchange and return what it sends; None at the end, when `result` is set.

        Without an answer the session begins; with one, the agreement of all clients, it continues. `result` has what
        `work` returned, or its error.
        """
        # All threads share torch's global random generators, but the round and the caller have separate random streams:
        # the caller's state is saved before the round continues and sets its own.
        with seeding.preserve_rng():
            if answer is None:
                self._tasks = _idle.pop() if _idle else _new_thread()
                self._tasks.put(functools.partial(self._run, torch.get_num_threads()))
            else:
                self.step += 1
                self._answers.put(answer)
            if (contribution := self._contributions.get()) is None:
                _idle.append(self._tasks)
        return contribution

    def abandon(self) -> None:
        """End a parked round and free its memory."""
        # When the round ends, it resets the generators to their state when it began, which is not the caller's.
        with seeding.preserve_rng(), suppress(queue.Empty):
            self._answers.put(None)
            # None is the end, after which the thread is free; the user's code may go on instead.
            if self._contributions.get(timeout=self._patience) is None:
                _idle.append(self._tasks)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # each thread has its own setting
        try:
            self.result.set_result(self._work(self._exchange))
        except BaseException as error:
            self.result.set_exception(error)
        self._contributions.put(None)

    def _exchange(self, contribution: Sent) -> Agreement:
        if (known := next(self._agreed, None)) is not None:
            return known
        with seeding.preserve_rng(), suppress(queue.Empty):
            self._contributions.put(contribution)
            if (answer := self._answers.get(timeout=self._patience)) is not None:
                return answer
        # The user's code may catch other exceptions.
        raise SystemExit("the parked round received no more messages")


class ParkedRound(Session[Contribution, Update]):
    """A client's round, which begins with the agreements in the client's state.

    `round_id` is in the state too; `extras` are the records of arrays in the round's messages.
    """

    def __init__(
        self,
        client: BNClient,
        received: Arrays,
        config: Config,
        extras: dict[str, Arrays],
        agreed: Sequence[Agreement],
        round_id: str,
    ) -> None:
        super().__init__(functools.partial(client.train_round, received, config, extras), agreed)
        self.client, self.extras, self.round_id = client, extras, round_id


Place = tuple[str, int, int]  # where a round is parked: the training run, Flower's run and the node


class ParkedRounds(dict[Place, ParkedRound]):
    """The parked rounds of a process."""

    def take(self, place: Place, round_id: str = "", step: int = 0) -> ParkedRound | None:
        """Remove and return the node's parked round if it waits for the result of exchange `step`; end any other."""
        parked = self.pop(place, None)
        if parked is None or (parked.round_id == round_id and parked.step + 1 == step):
            return parked
        parked.abandon()
        return None

    def clear(self) -> None:
        """End all parked rounds, for instance to simulate the end of the process."""
        while self:
            self.popitem()[1].abandon()


parked_rounds = ParkedRounds()


def _forget_threads() -> None:
    """A forked process does not have these threads."""
    _idle.clear()
    dict.clear(parked_rounds)


os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _end() -> None:
    """End parked rounds, and wait for their threads: one that is inside PyTorch when Python ends aborts the process."""
    parked_rounds.clear()
    for tasks in _idle:
        waits = threading.Event()
        tasks.put(waits.set)
        waits.wait(1)


def train_by_messages(
    make: MakeBNClient, content: RecordDict, config: Config, context: Context
) -> Contribution | Update:
    """Begin a round (step 0) or continue it with the result of exchange `step`, up to the next exchange or the end."""
    step, run, extras = int(config[protocol.EXCHANGE_STEP]), run_of(config), other_arrays(content)
    NodeState(context.state, run)  # without arrays of another run
    agreement = agreement_from_records(content) if step else None
    if agreement is None:
        _forget(context)
        context.state[LAYERWISE] = ConfigRecord({"run": run or "", "number": secrets.token_hex(16)})
    context.state[f"{LAYERWISE}/{step}"] = arrays_of(content)
    context.state[f"{LAYERWISE}/{step}/config"] = config_of(content)
    place, round_id = _place(context)
    parked = parked_rounds.take(place, round_id, step)
    if parked is None:
        parked, agreement = _replay(make, context, config, extras, round_id), None
        if any(other.client.model is parked.client.model for other in parked_rounds.values()):
            raise MessageError(
                "another client is in the middle of a round with this very model; the clients of a layer-wise round "
                "train concurrently, so make_client must return clients with separate models"
            )
    else:
        parked.client.state.content = context.state
        parked.extras.update(extras)
    if (contribution := parked.advance(agreement)) is not None:
        parked_rounds[place] = parked
        return contribution
    update = parked.result.result()
    _forget(context)
    return update


def _place(context: Context) -> tuple[Place, str]:
    """Place and id of the round in the client's state."""
    if not isinstance(record := context.state.get(LAYERWISE), ConfigRecord):
        raise MessageError(
            "the client's state has no layer-wise round: the process that began it has ended, or its message 0, which "
            "contains the model, has not arrived"
        )
    return (str(record["run"]), context.run_id, context.node_id), str(record["number"])


def end_parked_rounds(client: object, config: Config, context: Context) -> None:
    """End the node's own round, without which the server went on, and rounds of an earlier run with this model."""
    _forget(context)
    place, model = (run_of(config) or "", context.run_id, context.node_id), vars(client).get("model")
    for other in [other for other, parked in parked_rounds.items() if other == place or parked.client.model is model]:
        parked_rounds.take(other)


def _forget(context: Context) -> None:
    """Delete the round in the client's state."""
    for key in [key for key in context.state if key.startswith(LAYERWISE)]:
        del context.state[key]


def _replay(
    make: MakeBNClient, context: Context, config: Config, extras: dict[str, Arrays], round_id: str
) -> ParkedRound:
    """A round that will replay what the client's state has of it."""
    steps = [f"{LAYERWISE}/{step}" for step in range(int(config[protocol.EXCHANGE_STEP]) + 1)]
    if missing := [step for step, key in enumerate(steps) if key not in context.state]:
        raise MessageError(f"the client's state does not have the result of exchange {missing[0]}")
    model, *agreed = [{"arrays": context.state[key], "config": context.state[f"{key}/config"]} for key in steps]
    agreements = [agreement_from_records(RecordDict(records)) for records in agreed]
    return ParkedRound(make(), unpack(arrays_of(model)), config, extras, agreements, round_id)
