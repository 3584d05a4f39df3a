"""The loop over the rounds of one run, on any grid: the local engine, Flower's simulation, a deployment.

In each round the strategy makes the messages, the grid sends them, the strategy makes the new model from the replies,
and the listeners measure and record the finished round. `node.make_client` makes the clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.client import evaluation
from fedbn_flwr.engines.capabilities import capabilities
from fedbn_flwr.engines.network import PollingGrid
from fedbn_flwr.engines.worker import return_freed_memory
from fedbn_flwr.errors import LOG, Diverged, RunFailed, few
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder.checkpoint import Snapshot
from fedbn_flwr.results.folder.summary import is_taken
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.strategies import broken_guarantees, restore

from ..listeners.dynamics import Dynamics
from ..listeners.evaluate import Choose, Evaluate, Unseen, renamed, values_in
from ..listeners.listener import FinishedRound, Listener, Running
from ..listeners.progress import Reporter
from ..listeners.recording import History, Saving, keep_promises
from ..listeners.track import Track
from ..parts import Parts, counts_of
from ..prepare import check_partition, workers_of
from .federation import is_away, meet, restore_clients
from .survey import Surveyor


def run_one(prepared: Parts, grid: Grid, folder: RunFolder, progress: Reporter, done: int) -> None:
    """Train one run from the round after `done` to its end; a run without rounds is evaluated as it begins."""
    prepared.release()  # workers are copies of this process, and would keep the memory of its model
    capabilities(grid).start()
    snapshot = folder.checkpoint.read() if done else None
    running = Running(
        prepared, MeteredGrid(grid), folder, {protocol.RUN: prepared.name, protocol.TOKEN: folder.token()}
    )
    choose = Choose(prepared, folder.history())
    finished = first_round(prepared, snapshot, choose.ended(done))
    listeners, begun = listeners_of(running, choose, progress), list[Listener]()
    with ExitStack() as stack:
        stack.push(lambda _, error, __: end(begun, running, error))
        for listener in listeners:
            listener.on_start(running, finished)
            begun.append(listener)
        running = meet(running, done)
        begin(running, finished, snapshot)
        if not running.run.rounds:
            finished = observed(running, replace(finished, is_evaluated=True, line={"round": 0}), listeners)
        while not finished.is_last:
            finished = observed(running, train_round(running, finished, listeners), listeners)
            if finished.stop and not finished.is_last:
                raise finished.stop
        if running.run.rounds and not finished.trained:
            raise RunFailed(f"no client trained in any of the {finished.number} rounds")


def first_round(prepared: Parts, snapshot: Snapshot | None, why: str) -> FinishedRound:
    """The round that training continues after; `why` it does not, in words."""
    arrays = pack(initial_arrays(prepared.model)) if snapshot is None else arrays_in(snapshot.model)["arrays"]
    done = 0 if snapshot is None else snapshot.round
    return FinishedRound(
        done,
        arrays=arrays,
        model=arrays,
        is_last=done == prepared.run.rounds or bool(why),
        trained={} if snapshot is None else dict(snapshot.trained),
        stopped=why,
        checkpoint_round=done,
    )


def begin(running: Running, finished: FinishedRound, snapshot: Snapshot | None) -> None:
    """Write what is known once the nodes have answered, and begin the strategy or restore it and its clients."""
    run, prepared, base, nodes = running.run, running.prepared, running.prepared.rule.base, running.federation.nodes
    running.grid.hidden = running.federation.unseen.values()
    if isinstance(running.grid.inner, PollingGrid):  # `flwr supernode list` shows only the nodes' ids
        print(", ".join(f"client {client} is node {node}" for client, node in sorted(nodes.items())), flush=True)
        running.grid.inner.name = lambda node: base.roster.name(node)
    running.folder.write("model.json", prepared.description(running.agreed, running.federation.schema), indent=2)
    if prepared.dataset is not None and not running.federation.own_data:
        if prepared.own_data:  # else it was checked before the first run
            check_partition(prepared)
        running.folder.write("partition.json", counts_of(run, prepared.dataset, prepared.partition).model_dump())
    base.reply_timeout, base.folder = run.engine.timeout, running.folder.path / "strategy"
    prepared.rule.begin(run.rounds, finished.arrays)
    if snapshot is not None and snapshot.strategy is not None:
        restore_clients(running, snapshot.trained)
        restore(prepared.rule, snapshot.strategy)
        running.grid.take()  # the interrupted session counted these messages
    # Their names stand in messages before they have answered in a round.
    base.roster.learn({node: client for client, node in nodes.items() if client != node})
    keep_promises(prepared.rule, running.folder, finished.number)
    prepared.release()  # it is built again for the first evaluation
    return_freed_memory()


def observed(running: Running, finished: FinishedRound, listeners: Sequence[Listener]) -> FinishedRound:
    """The round with what the listeners add."""
    for listener in listeners:
        finished = listener.on_round(running, finished)
    return finished


def end(begun: Sequence[Listener], running: Running, error: BaseException | None) -> None:
    """End all listeners in their order, even if one fails, for instance because the disk is full."""
    with ExitStack() as ends:
        for listener in reversed(begun):
            ends.callback(listener.on_end, running, error)


def listeners_of(running: Running, choose: Choose, progress: Reporter) -> list[Listener]:
    """The listeners of a run, each after those whose results it needs."""
    run = running.run
    found = [progress, History(), Saving(), *(Track(entry, running.folder) for entry in run.track)]
    if run.evaluate.survey:
        return in_order([Surveyor(), *found])
    dynamics = [Dynamics()] if run.evaluate.dynamics else []
    unseen = [Unseen()] if run.evaluate.unseen.clients else []
    return in_order([*dynamics, Evaluate(running.prepared, threads=workers_of(run)), *unseen, choose, *found])


def in_order(listeners: Sequence[Listener]) -> list[Listener]:
    graph = {each: [other for other in listeners if isinstance(other, each.after)] for each in listeners}
    return [*TopologicalSorter(graph).static_order()]


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
    used = rule.base.training.answers()
    numbers = {key: value for key, value in (metrics or {}).items() if not isinstance(value, list)}
    in_history = partial(_in_history, running.prepared)
    of_clients = {} if "inside" in broken_guarantees(rule) else used
    is_last = number == run.rounds
    return FinishedRound(
        number,
        arrays=arrays,
        model=arrays,
        is_evaluated=is_last or number % run.evaluate.every == 0,
        is_last=is_last,
        trained={**before.trained, **dict.fromkeys(used, number)},
        replies=used if run.evaluate.dynamics else {},
        line={"round": number, "clients": len(used), **renamed(numbers, in_history)},
        clients={client: values_in(reply.metrics, "examples", in_history) for client, reply in of_clients.items()},
        checkpoint_round=before.checkpoint_round,
    )


def send(running: Running, messages: Sequence[Message]) -> list[Message]:
    """The replies to the messages of a round.

    If too few nodes are left, those that were lost get their messages again once they are back, for
    `engine.node_timeout`. If the round's messages are equal, a node that was not asked may replace a lost one.
    """
    run, base, grid = running.run, running.prepared.rule.base, running.grid
    needed, began = min(base.min_train_nodes, len(messages)), math.inf
    asked = {message.metadata.dst_node_id: message for message in messages}
    replies = gate(grid.send_and_receive(messages, timeout=run.engine.timeout))
    while lost := {reply.metadata.src_node_id for reply in replies if is_away(reply)}:
        began, again = min(began, time.monotonic()), list[Message]()
        if sum(map(Message.has_content, replies)) >= needed:
            break
        LOG.warning(
            "%s: lost; waiting for %d of %d clients", few(map(base.roster.name, sorted(lost)), 8), needed, len(messages)
        )
        any_node = messages[:1] if all({**one.content} == {**messages[0].content} for one in messages[1:]) else ()
        while not again and time.monotonic() - began <= run.engine.node_timeout:
            time.sleep(min(1.0, run.engine.node_timeout / 10))
            here = {*grid.get_node_ids()}
            back = {node: asked[node] for node in sorted(lost & here)}
            back = back or {node: one for one in any_node for node in sorted(here - asked.keys())[: len(lost)]}
            again = [Message(one.content, node, one.metadata.message_type) for node, one in back.items()]
        if not again:
            break
        asked |= {one.metadata.dst_node_id: one for one in again}
        base.training.asked = [*asked]
        kept = [reply for reply in replies if reply.metadata.src_node_id not in back]
        replies = gate([*kept, *grid.send_and_receive(again, timeout=run.engine.timeout)])
    return replies


def _in_history(prepared: Parts, key: str) -> str:
    """The name of a training metric in the history, where evaluation has taken some names."""
    name = key.replace("-", "_")
    of_evaluation = is_taken(name, prepared.task) or name in map(evaluation.name_of, prepared.metrics)
    return str(MetricKey(name, "train")) if of_evaluation and MetricKey.parse(name).whose != "train" else name
