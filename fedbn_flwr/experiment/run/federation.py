"""Asks the nodes of a run, before its first round, who they are and, for `data.normalise`, the sums of their data.

The server computes the mean and deviation of each column over all sites' data from the sums, and sends these moments
with every message, so that a node that restarts or joins late has them too. A resumed run reads them from model.json in
its folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.data import Moments
from fedbn_flwr.data.dataset import Schema
from fedbn_flwr.data.moments import ROWS, moments_from, totals
from fedbn_flwr.engines.capabilities import wait_for_nodes
from fedbn_flwr.errors import LOG, MessageError, RunFailed, SettingsError, few
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import metrics_in, unpack
from fedbn_flwr.messages.limits import arrays_problem
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import arrays_of, partition_of, reason_of, sender_of
from fedbn_flwr.norms.variants import BatchRenorm

from ..listeners.listener import Federation, Running
from ..listeners.unseen import unseen_nodes
from ..parts import Parts
from ..prepare import check_moments
from ..settings import Settings, strategy_name


def meet(running: Running, done: int, *, agrees: bool = True) -> Running:
    """Ask the nodes who they are and, if the run needs them, agree with them on the moments of their data.

    A run that resumes after round `done` has agreed before, and a trained model has its moments (`agrees` is False).
    """
    asked = {protocol.EXCHANGE_MIN_BATCH: least} if (least := running.prepared.rule.traits.min_batch) else {}
    federation = check_nodes(running.grid, running.run, {**running.identity, protocol.ROUND: done, **asked})
    _check_columns(running.prepared, federation.columns)
    is_own = running.prepared.dataset is None or federation.own_data
    if agrees and running.run.data.normalise == "moments" and is_own:
        running.prepared.agreed = running.folder.agreed() if done else agree(replace(running, federation=federation))
    return replace(running, federation=federation)


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
        ask(nodes)
        away = [node for node in nodes if node in answers and is_away(answers[node])]
        if not away or time.monotonic() - began > run.engine.node_timeout:
            return nodes, [answers[node] for node in nodes if node in answers]
        LOG.warning("nodes %s are unavailable; asking them again", ", ".join(map(str, away)))
        for node in away:
            del answers[node]
        time.sleep(min(1.0, run.engine.node_timeout / 10))


def is_away(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE


def check_nodes(grid: Grid, run: Settings, config: Config) -> Federation:
    """Check that exactly one node holds each partition. `config` identifies the run and its last round."""
    nodes, replies = _ask(grid, run, RecordDict({"config": ConfigRecord({**config, protocol.READY: True})}))
    holders: dict[int | None, list[int]] = {}  # under None, the nodes with data of their own and no partition
    state_rounds: dict[int, int] = {}
    own_data, sites = False, 0
    columns: dict[int, Schema] = {}
    for reply in filter(Message.has_content, replies):
        node = reply.metadata.src_node_id
        answer = next(iter(metrics_in(reply.content).values()), MetricRecord())
        holders.setdefault(partition_of(reply.content), []).append(node)
        own_data |= protocol.OWN_DATA in answer
        sites += answer.get(protocol.OWN_DATA) == 1
        if isinstance(stored := answer.get(protocol.STATE_ROUND), int):
            state_rounds[sender_of(reply)] = stored
        if record := reply.content.config_records.get(protocol.COLUMNS):
            columns[sender_of(reply)] = {
                name: [*map(str, texts)] for name, texts in record.items() if isinstance(texts, list)
            }
    refuse_nodes(failures(run, len(nodes), replies) or _wrong_numbers(holders, run.clients))
    by_client = {sender_of(reply): reply.metadata.src_node_id for reply in replies}
    unseen = unseen_nodes(run, by_client)
    return Federation(by_client, state_rounds, own_data or None in holders, sites, columns, unseen)


def _check_columns(parts: Parts, columns: Mapping[int, Schema]) -> None:
    """Check that sites have the same inputs, in one order, and the same classes; RunFailed names those that differ."""
    found = {f"client {client}": columns[client] for client in sorted(columns)}
    if parts.dataset is not None:
        found = {"the server": parts.dataset.schema, **found}
    problems: list[str] = []
    for key, setting in (("inputs", "data.inputs"), ("classes", "data.class_names")):
        named = {
            whose: names
            for whose, schema in found.items()
            if (names := schema.get(key, [])) and (key == "classes" or _are_columns(schema))
        }
        for whose in [*named][1:]:
            first, expected = next(iter(named.items()))
            if named[whose] != expected:
                problems.append(
                    f"{whose}: its data have the {key} {few(named[whose], 20)}, but {first} has {few(expected, 20)}; "
                    f"name them in {setting}, in one order for all"
                )
    refuse_nodes(problems)
    parts.of_sites = columns[min(columns)] if columns else {}


def _are_columns(schema: Schema) -> bool:
    """Whether the inputs are columns of numbers or texts, instead of one array or image for each example."""
    kinds = schema.get("types", [])
    return len(kinds) > 1 or not any(kind == "array" or kind[:1].isupper() for kind in kinds)


def _wrong_numbers(holders: Mapping[int | None, list[int]], clients: int) -> list[str]:
    """The problems, unless each partition has one node or, without partitions, there is one node for each client."""
    unnumbered = holders.get(None, [])
    if holders.keys() == {None}:
        count = len(unnumbered)
        return [] if count == clients else [f"{count} nodes without a partition-id are connected, expected {clients}"]
    return [f"node {node} has no partition-id, but other nodes have one" for node in unnumbered] + [
        f"partition {partition} is held by {len(held)} nodes, expected one: {held}"
        for partition in range(clients)
        if len(held := holders.get(partition, [])) != 1
    ]


def failures(run: Settings, asked: int, replies: Sequence[Message]) -> list[str]:
    """The problems of the nodes that replied with an error, and of those asked that did not reply."""
    failed = [f"node {reply.metadata.src_node_id}: {reason_of(reply)}" for reply in replies if reply.has_error()]
    silent = asked - len(replies)
    return [*failed, f"{silent} nodes did not answer within {run.engine.timeout:g} s"] if silent > 0 else failed


def refuse_nodes(problems: Iterable[str]) -> None:
    """Raise RunFailed with the problems of nodes, if there are any."""
    if listed := "".join(f"\n  - {' '.join(problem.split())}" for problem in sorted(problems)):
        raise RunFailed(f"the run cannot begin:{listed}")


# --- the moments of all sites' data ---


def agree(running: Running) -> Moments:
    """The moments of all clients' training examples; RunFailed names clients whose sums are missing or wrong."""
    run, parts = running.run, running.prepared
    check_moments(run, parts.rule)
    columns = parts.shape.normalised + (parts.shape.classes if run.data.targets else 0)
    like = {"sums": np.zeros((ROWS, columns))}
    return moments_from([found["sums"] for found in ask_all(running, protocol.SUMS_QUERY, like).values()])


def ask_all(
    running: Running, query: str, like: Arrays, records: Mapping[str, ArrayRecord] = MappingProxyType({})
) -> dict[int, Arrays]:
    """The arrays that each client answers, in the form of these; RunFailed names those that refuse or err."""
    clients = {node: client for client, node in running.federation.nodes.items()}
    content = RecordDict({**records, "config": ConfigRecord({**running.config})})
    questions = [Message(content, node, query) for node in clients]
    replies = list(running.grid.send_and_receive(questions, timeout=running.run.engine.timeout))
    answers: dict[int, Arrays] = {}
    problems = failures(running.run, len(clients), replies)
    for reply in filter(Message.has_content, replies):
        node = reply.metadata.src_node_id
        try:
            answers[clients[node]] = _checked(reply, like)
        except MessageError as error:
            problems.append(f"node {node}: client {clients[node]}: {error}")
    refuse_nodes(problems)
    return dict(sorted(answers.items()))


def _checked(reply: Message, like: Arrays) -> Arrays:
    """The arrays in a client's reply; MessageError if they have another form, or no values can have these sums."""
    arrays = unpack(arrays_of(reply.content))
    if problem := arrays_problem(arrays, like):
        raise MessageError(f"{problem}; its columns are the inputs or channels of the data, and targets")
    for place, column in enumerate(arrays.get("sums", np.empty((0, 0))).T):
        count, total, square = totals(column)
        # By the inequality of Cauchy and Schwarz; sums of equal pixels, such as 14/255, are rounded to the bits sent.
        is_less = square * count * (2**96 + 1) < total**2 * 2**96
        if not 0 <= count == column[0] < 2**53 or is_less or square > 0 == count:
            raise MessageError(
                f"its sums of column {place} cannot be sums of any values; expected the sums of its data"
            )
    return arrays


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
