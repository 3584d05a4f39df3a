"""The loop over the rounds of one run, on any grid: the local engine, Flower's simulation, a deployment.

In each round the strategy makes the messages, the grid sends them, the strategy makes the new model from the replies,
and the listeners measure and record the finished round. `node.make_client` makes the clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.client import evaluation
from fedbn_flwr.engines.capabilities import capabilities
from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.engines.worker import return_freed_memory
from fedbn_flwr.errors import LOG, Diverged, RunFailed, few
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder.summary import is_taken
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.strategies import broken_guarantees, restore

from ..listeners.dynamics import Dynamics
from ..listeners.evaluate import Choose, Evaluate, renamed, values_of
from ..listeners.listener import FinishedRound, Listener, Running
from ..listeners.progress import Reporter
from ..listeners.recording import History, Saving, keep_promises
from ..listeners.track import Track
from ..listeners.unseen import Unseen
from ..parts import Parts, counts_of
from ..prepare import check_partition
from .federation import is_away, meet, restore_clients
from .side_by_side import workers_of


def run_one(prepared: Parts, grid: Grid, folder: RunFolder, progress: Reporter, done: int) -> None:
    """Train one run from the round after `done` to its end."""
    run, rule = prepared.run, prepared.rule
    prepared.release()  # workers are copies of this process, and would keep the memory of its model
    capabilities(grid).start()
    snapshot = folder.checkpoint.read() if done else None
    ledger = MeteredGrid(grid, progress.report)
    running = Running(prepared, ledger, folder, {protocol.RUN: prepared.name, protocol.TOKEN: folder.token()})
    arrays = pack(initial_arrays(prepared.model)) if snapshot is None else arrays_in(snapshot.model)["arrays"]
    trained = {} if snapshot is None else dict(snapshot.trained)
    choose = Choose(prepared, folder.history())
    why = choose.ended(done)
    finished = FinishedRound(
        done,
        arrays=arrays,
        model=arrays,
        is_last=done == run.rounds or bool(why),
        trained=trained,
        stopped=why,
        checkpoint_round=done,
    )
    del arrays  # later rounds have others, and need the memory
    listeners = listeners_of(running, choose, progress)
    begun: list[Listener] = []
    with ExitStack() as stack:
        stack.push(lambda _, error, __: end(begun, running, error))
        for listener in listeners:
            listener.on_start(running, finished)
            begun.append(listener)
        running = meet(running, done)
        ledger.hidden = running.federation.unseen.values()
        if isinstance(grid, PollingGrid):  # for a look-up: `flwr supernode list` shows only the nodes' ids
            nodes = sorted(running.federation.nodes.items())
            progress.message(", ".join(f"client {client} is node {node}" for client, node in nodes))
        folder.write("model.json", prepared.model_description, indent=2)
        if prepared.dataset is not None and not running.federation.own_data:
            check_partition(prepared)
            folder.write("partition.json", asdict(counts_of(run, prepared.dataset, prepared.partition)))
        rule.base.reply_timeout = run.engine.timeout
        rule.begin(run.rounds, finished.arrays)
        if snapshot is not None and snapshot.strategy is not None:
            restore_clients(running, snapshot.trained)
            restore(rule, snapshot.strategy)
            ledger.take()  # the interrupted session counted these messages
        keep_promises(rule, folder, done)
        prepared.release()  # it is built again for the first evaluation
        return_freed_memory()
        while not finished.is_last:
            finished = train_round(running, finished, listeners)
            for listener in listeners:
                finished = listener.on_round(running, finished)
            if finished.stop and not finished.is_last:
                raise finished.stop
        if not finished.trained:
            raise RunFailed(f"no client trained in any of the {finished.number} rounds")


def end(begun: Sequence[Listener], running: Running, error: BaseException | None) -> None:
    """End all listeners in their order, even if one fails, for instance because the disk is full."""
    with ExitStack() as ends:
        for listener in reversed(begun):
            ends.callback(listener.on_end, running, error)


def listeners_of(running: Running, choose: Choose, progress: Reporter) -> list[Listener]:
    """The listeners in their order: they measure a round, choose the best one, then show and record it."""
    run = running.run
    dynamics = [Dynamics()] if run.evaluate.dynamics else []
    trackers = [Track(entry, running.folder) for entry in run.track]
    evaluate = Evaluate(running.prepared, threads=workers_of(run))
    unseen = [Unseen()] if run.evaluate.unseen.clients else []
    return [*dynamics, evaluate, *unseen, choose, progress, History(), Saving(), *trackers]


def train_round(running: Running, before: FinishedRound, listeners: Sequence[Listener] = ()) -> FinishedRound:
    """Train the round after `before`."""
    run, rule, number = running.run, running.prepared.rule, before.number + 1
    config = ConfigRecord({**running.config, protocol.CHECKPOINT_ROUND: before.checkpoint_round})
    switched = any(number >= (link.memory.switch_round or math.inf) for link in rule.chain)
    if (factor := run.train.schedule.switch) is not None and switched:
        config[protocol.LR_FACTOR] = factor
    messages = list(rule.configure_train(number, before.arrays, config, running.grid))
    for listener in listeners:
        listener.on_messages(running)
    replies = send(running, messages)
    try:
        new, metrics = rule.aggregate_train(number, replies)
    except Diverged as error:
        raise Diverged(f"{error}{running.prepared.advice_on_targets()}") from None
    arrays = before.arrays if new is None else new
    used = [reply for reply in replies if reply.has_content() and reply.metadata.src_node_id in rule.base.training.used]
    trained = [rule.base.roster.client(reply.metadata.src_node_id) for reply in used]
    numbers = {key: value for key, value in (metrics or {}).items() if not isinstance(value, list)}
    in_history = partial(_in_history, running.prepared)
    is_last = number == run.rounds
    return FinishedRound(
        number,
        arrays=arrays,
        model=arrays,
        is_evaluated=is_last or number % run.evaluate.every == 0,
        is_last=is_last,
        trained={**before.trained, **dict.fromkeys(trained, number)},
        replies=used if run.evaluate.dynamics else (),
        line={"round": number, "clients": len(trained), **renamed(numbers, in_history)},
        clients={} if "inside" in broken_guarantees(rule) else values_of(used, "examples", in_history),
        checkpoint_round=before.checkpoint_round,
    )


def send(running: Running, messages: Sequence[Message]) -> list[Message]:
    """The replies to the messages of a round.

    If too few nodes are left, the lost ones get their messages again once they are back, for `engine.node_timeout`.
    """
    run, base, grid = running.run, running.prepared.rule.base, running.grid
    needed, began = min(base.min_train_nodes, len(messages)), math.inf
    replies = gate(grid.send_and_receive(messages, timeout=run.engine.timeout))
    while lost := {reply.metadata.src_node_id for reply in replies if is_away(reply)}:
        began = min(began, time.monotonic())
        kept = [reply for reply in replies if not is_away(reply)]
        if len(kept) >= needed or time.monotonic() - began > run.engine.node_timeout:
            break
        LOG.warning("%s: lost; sending the messages of the round again", few(map(base.roster.name, sorted(lost)), 8))
        time.sleep(min(1.0, run.engine.node_timeout / 10))
        base.connected(grid, needed)
        again = [Message(one.content, one.metadata.dst_node_id, one.metadata.message_type) for one in messages]
        again = [one for one in again if one.metadata.dst_node_id in lost]
        replies = gate([*kept, *grid.send_and_receive(again, timeout=run.engine.timeout)])
    return replies


def _in_history(prepared: Parts, key: str) -> str:
    """The name of a training metric in the history, where evaluation has taken some names."""
    name = key.replace("-", "_")
    of_evaluation = is_taken(name, prepared.task) or name in map(evaluation.name_of, prepared.metrics)
    return str(MetricKey(name, "train")) if of_evaluation and MetricKey.parse(name).whose != "train" else name
