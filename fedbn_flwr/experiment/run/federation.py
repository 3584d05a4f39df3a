"""Asks the nodes of a run, before its first round, who they are and, for `data.normalise`, the sums of their data.

The server computes the mean and deviation of each column over all sites' data from the sums, and sends these moments
with every message, so that a node that restarts or joins late has them too. A resumed run reads them from model.json in
its folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.data import Moments
from fedbn_flwr.data.dataset import Schema, agreed_names
from fedbn_flwr.data.disclosed import blank_answer
from fedbn_flwr.data.moments import moments_from, totals
from fedbn_flwr.engines.capabilities import wait_for_nodes
from fedbn_flwr.errors import LOG, RunFailed, SettingsError, few, log_once
from fedbn_flwr.internals import ErrorCode
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.quote import one_line, shown
from fedbn_flwr.messages.reply import Reply, number_problem, partition_of
from fedbn_flwr.named import path_of
from fedbn_flwr.norms.variants import BatchRenorm
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.server.poll import Poll

from ..listeners.listener import Federation, Running
from ..parts import Parts
from ..prepare import check_moments
from ..settings import Settings, strategy_name

CANNOT_BEGIN = "the run cannot begin"
_LARGEST = int(np.finfo(np.float32).max)  # of the values of columns


def meet(running: Running, done: int) -> Running:
    """Ask the nodes who they are and, if the run needs them, agree with them on the moments of their data.

    A run that resumes after round `done` has agreed before, and weights in a run folder bring its moments.
    """
    asked = {protocol.EXCHANGE_MIN_BATCH: least} if (least := running.prepared.rule.traits.min_batch) else {}
    federation = check_nodes(running.grid, running.run, {**running.identity, protocol.ROUND: done, **asked})
    _check_columns(running.prepared, federation.columns)
    is_own = running.prepared.dataset is None or federation.own_data
    running = replace(running, federation=federation)
    if (given := run_of_weights(running.run)) is not None:
        return replace(running, agreed=agreed_in(given, running))
    if running.run.data.normalise == "moments" and is_own:
        return replace(running, agreed=running.folder.model_description().agreed if done else agree(running))
    return running


def run_of_weights(run: Settings) -> RunReader | None:
    """The run in whose folder the weights are that a run without rounds evaluates; None if they are elsewhere."""
    folder = RunReader(path_of(run.model.weights or "").parent)
    if run.rounds or run.model.weights is None or not (folder.path / "model.json").exists():
        return None
    if (summary := folder.summary()) is not None and summary.personal:
        log_once(f"{folder.path}: with {summary.label} each client has a model of its own; this is the global one")
    return folder


def agreed_in(folder: RunReader, running: Running) -> Moments | None:
    """The moments by which a run normalised; SettingsError if it was on other inputs or classes than the data have."""
    described, dataset = folder.model_description(), running.prepared.dataset
    schema = running.federation.schema if dataset is None else dataset.schema
    for key in ("inputs", "classes"):
        theirs, ours = [*getattr(described, key)], [*(schema.get(key) or ())]
        if theirs and ours and theirs != ours:
            raise SettingsError(f"{str(folder.path)!r} was trained on the {key} {theirs}, and the data have {ours}")
    return None if running.run.data.normalise == "own" else described.agreed


def _ask(grid: Grid, run: Settings, content: RecordDict) -> tuple[list[int], list[Message]]:
    """The nodes and their answers. Nodes that are unavailable are asked again until the nodes' timeout."""
    answers: dict[int, Message] = {}
    began = time.monotonic()

    def ask(nodes: Sequence[int]) -> str:
        """Ask those of the nodes that have not answered, and name the clients that none of the nodes serves."""
        questions = [Message(content, node, protocol.PARTITION_QUERY) for node in nodes if node not in answers]
        for reply in grid.send_and_receive(questions, timeout=run.engine.timeout):
            answers[reply.metadata.src_node_id] = reply
        known = [answers[node] for node in nodes if node in answers]
        here = {partition_of(reply.content) for reply in known if reply.has_content()}
        return few((f"client {client}" for client in range(run.clients) if not here & {client, None}), 8)

    while True:
        nodes = wait_for_nodes(
            grid,
            run.clients,
            run.engine.node_timeout,
            f'in a simulation, give flwr run --federation-config "num-supernodes={run.clients} '
            'client-resources-num-cpus=1"; on machines of your own, start the missing SuperNodes',
            ask,
            began=began,
        )
        absent = ask(nodes)
        away = [node for node in nodes if node in answers and is_away(answers[node])]
        if not away or time.monotonic() - began > run.engine.node_timeout:
            return nodes, [answers[node] for node in nodes if node in answers]
        LOG.warning("without %s: node %s is unavailable; asking again", absent, few(map(str, away), 8))
        for node in away:
            del answers[node]
        time.sleep(min(1.0, run.engine.node_timeout / 10))


def is_away(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE


def check_nodes(grid: Grid, run: Settings, config: Config) -> Federation:
    """Check that exactly one node holds each partition. `config` identifies the run and its last round."""
    nodes, replies = _ask(grid, run, RecordDict({"config": ConfigRecord({**config, protocol.READY: True})}))
    poll = Poll(asked=nodes, needed=len(nodes))
    poll.read(replies, records=None)
    poll.check(partial(_identity_problem, run.clients))
    poll.close(CANNOT_BEGIN)
    by_client: dict[int, int] = {}
    for node in poll.left:
        if (other := by_client.setdefault(poll.roster.client(node), node)) != node:
            refuse_nodes([f"{poll.roster.name(node)}: node {other} has this partition-id too; give each node its own"])
    if len(nodes) != run.clients:
        refuse_nodes([f"{len(nodes)} nodes are connected, expected {run.clients}"])
    answers = poll.answers()
    said = {client: reply.metrics for client, reply in answers.items()}
    return Federation(
        by_client,
        {client: answer[protocol.STATE_ROUND] for client, answer in said.items() if protocol.STATE_ROUND in answer},
        any(protocol.OWN_DATA in answer for answer in said.values()) or None in poll.partitions.values(),
        sum(answer.get(protocol.OWN_DATA, 0) for answer in said.values()),
        {client: columns for client, reply in answers.items() if (columns := _columns_in(reply))},
        unseen_nodes(run, by_client),
    )


def unseen_nodes(run: Settings, nodes: Mapping[int, int]) -> dict[int, int]:
    """The nodes of the clients that never train, by client."""
    if missing := [client for client in run.evaluate.unseen.clients if client not in nodes]:
        raise SettingsError(f"evaluate.unseen.clients has {missing[0]}, and the nodes' clients are {sorted(nodes)}")
    return {client: nodes[client] for client in run.evaluate.unseen.clients}


def _identity_problem(clients: int, reply: Reply) -> str | None:
    """Why an answer to the partition query cannot be used, or None."""
    if (number := partition_of(reply.message.content) or 0) >= clients:
        return f"its partition-id is {number}; expected 0 to {clients - 1}"
    if (own := reply.metrics.get(protocol.OWN_DATA, 0)) not in (0, 1):
        return f"its {protocol.OWN_DATA!r} is {shown(own)}; expected 0 or 1"
    for name, texts in _columns_in(reply).items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return f"its {shown(name)} are {shown(texts)}; expected names"
    return None


def _columns_in(reply: Reply) -> dict[str, Any]:
    return {**reply.message.content.config_records.get(protocol.COLUMNS, ConfigRecord())}


def _check_columns(parts: Parts, columns: Mapping[int, Schema]) -> None:
    """Check that sites have the same inputs, in one order, and the same classes; RunFailed names those that differ."""
    found = {f"client {client}": columns[client] for client in sorted(columns)}
    if parts.dataset is not None:
        found = {"the server": parts.dataset.schema, **found}
    problems: list[str] = []
    for key, setting in ((protocol.INPUTS, "data.inputs"), (protocol.CLASSES, "data.class_names")):
        named = {whose: names for whose, schema in found.items() if (names := agreed_names(schema)[key])}
        what = key.removeprefix(protocol.PREFIX)
        for whose in [*named][1:]:
            first, expected = next(iter(named.items()))
            if named[whose] != expected:
                problems.append(
                    f"{whose}: its data have the {what} {few(named[whose], 20)}, but {first} has {few(expected, 20)}; "
                    f"name them in {setting}, in one order for all"
                )
    refuse_nodes(problems)


def refuse_nodes(problems: Iterable[str]) -> None:
    """Raise RunFailed with the problems of nodes, if there are any."""
    if listed := "".join(f"\n  - {one_line(problem)}" for problem in sorted(problems)):
        raise RunFailed(f"{CANNOT_BEGIN}:{listed}")


# --- the moments of all sites' data ---


def agree(running: Running) -> Moments:
    """The moments of all clients' training examples; RunFailed names clients whose sums are missing or wrong."""
    run, parts = running.run, running.prepared
    check_moments(run, parts.rule)
    like = blank_answer(parts.shape, survey=False, scaled=bool(run.data.targets))
    answers = running.ask(CANNOT_BEGIN, protocol.SUMS_QUERY, partial(sums_problem, like), records=())
    sums = [reply.arrays["sums"] for reply in answers.values()]
    told = np.sum([each[0] for each in sums], axis=0)
    if untold := [name for name, count in zip(normalised_names(running), told, strict=False) if not count]:
        LOG.warning("no site tells the sums of %s, which isn't normalised (docs/privacy.md)", few(untold, 20))
    return moments_from(sums, told=True)


def normalised_names(running: Running) -> list[str]:
    """The names of the columns or channels that are normalised."""
    parts, columns = running.prepared, running.federation.schema.get("inputs", ())
    categories = parts.run.data.categories
    of_sites = [f"{name}={value}" if value else name for name in columns for value in categories.get(name, ("",))]
    names, number = [*(getattr(parts.dataset, "input_names", ()) or of_sites)], parts.shape.normalised
    return names if len(names) == number else [f"input {place}" for place in range(number)]  # of an array


def sums_problem(like: Arrays, reply: Reply) -> str | None:
    """Why an answer with the sums of columns has another form than `like`, or why no values have such sums, or None."""
    if problem := number_problem(reply.metrics, protocol.NUM_EXAMPLES) or arrays_problem(reply.arrays, like):
        return f"{problem}; its columns are the inputs or channels of the data, and targets"
    for place, column in enumerate(reply.arrays["sums"].T):
        count, total, square = totals(column)
        # By the inequality of Cauchy and Schwarz; sums of equal pixels, such as 14/255, are rounded to the bits sent.
        is_less = square * count * (2**96 + 1) < total**2 * 2**96
        if not 0 <= count == column[0] < 2**53 or is_less or not 0 <= square <= count * _LARGEST**2:
            return f"its sums of column {place} cannot be sums of any values; expected the sums of its data"
    return None


# --- the states of the clients of a resumed run ---


def restore_clients(running: Running, trained: Mapping[int, int]) -> None:
    """Restore the clients' states from the checkpoint, or check that the nodes have them in their state folders.

    `trained` has the last round in which each client trained.
    """
    contexts, stored = running.grid.contexts() or {}, running.federation.state_rounds
    is_saved = False
    for node, records in running.folder.checkpoint.clients(contexts):
        contexts[node].state, is_saved = records, True
    if is_saved or (needed := _needed_client_state(running.prepared)) is None:
        return
    lost = [f"client {client} has none" for client in trained if client not in stored]
    lost += [
        f"client {client} has the state of round {stored[client]}, but last trained in round {last}"
        for client, last in trained.items()
        if client in stored and stored[client] < last
    ]
    if lost:
        raise SettingsError(
            f"{str(running.folder.path)!r} cannot be resumed here: {strategy_name(running.run.strategy)} needs its "
            f"clients' state ({needed}), but {few(sorted(lost), 3, '; ')}. Resume it on the local "
            "engine if it began there, or give each node a folder before a run begins: --node-config "
            "\"state='/srv/fedbn-state'\""
        )


def _needed_client_state(prepared: Parts) -> str | None:
    """A description of the client state that training needs, or None."""
    if prepared.run.train.keep_momentum:
        return "their optimisers' state"
    norms = [module for module in prepared.model.modules() if isinstance(module, _BatchNorm)]
    if any(isinstance(norm, BatchRenorm) or norm.momentum is None for norm in norms):
        return "their batch counters"
    return " and ".join(prepared.rule.traits.client_memory) or None
