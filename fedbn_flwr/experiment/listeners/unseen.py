"""Evaluates the clients that never train (`evaluate.unseen`), as newcomers that receive a model.

A newcomer has no batch norm of its own. With `mean` it receives the server's, which is the mean of the clients', also
where a strategy keeps batch norm on them (FedBN, SiloBN). With `batch` it then measures the statistics of its training
inputs, without labels, as AdaBN does (Li et al. 2016, https://arxiv.org/abs/1603.04779). With `own` it receives what
the strategy sends to a new client, whose other arrays are those of a newly built model. Strategies that keep nothing on
the clients give the same with `own` as with `mean`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedbn_flwr.client.evaluation import name_of
from fedbn_flwr.errors import LOG, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import record_of
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.reply import reason_of
from fedbn_flwr.norms.roles import split
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.strategies import evaluation_round

from ..settings import Settings
from .evaluate import ByClient, values_of
from .listener import FinishedRound, Listener, Running


def unseen_nodes(run: Settings, nodes: Mapping[int, int]) -> dict[int, int]:
    """The nodes of the clients that never train, by client."""
    if missing := [client for client in run.evaluate.unseen.clients if client not in nodes]:
        raise SettingsError(f"evaluate.unseen.clients has {missing[0]}, and the nodes' clients are {sorted(nodes)}")
    return {client: nodes[client] for client in run.evaluate.unseen.clients}


class Unseen(Listener):
    """Adds each newcomer's metrics on its own test examples, and their means over the newcomers."""

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        for way in running.run.evaluate.unseen.statistics if finished.is_evaluated else ():
            values = self._newcomers(running, finished, way)
            names = dict.fromkeys(name for metrics in values.values() for name in metrics)
            finished = finished.with_metrics(
                {
                    name: statistics.fmean(metrics[name] for metrics in values.values() if name in metrics)
                    for name in names
                },
                values,
            )
        return finished

    def _newcomers(self, running: Running, finished: FinishedRound, way: str) -> ByClient:
        """The metrics of each newcomer with statistics of this kind."""
        prepared = running.prepared
        given = ConfigRecord({**running.config})
        round = evaluation_round(prepared.rule, finished.number, finished.arrays, given, running.grid)
        config = {**round.config, protocol.ROUND: finished.number}
        config |= {protocol.REESTIMATE: True} if way == "batch" else {}
        arrays, kept = finished.arrays, prepared.rule.traits.local
        if way == "own" and kept:
            arrays = record_of(split(arrays, prepared.rule.traits.local_keys(arrays))[1])
            config[protocol.KEPT] = protocol.join(kept)
        replies = evaluated_by(running, running.federation.unseen.values(), arrays, config)
        clients = {node: client for client, node in running.federation.unseen.items()}
        for reply in replies:
            if reply.has_error():
                client = clients[reply.metadata.src_node_id]
                LOG.warning("round %d: client %d as a newcomer: %s", finished.number, client, reason_of(reply))
        names = dict.fromkeys((prepared.task.main, *prepared.task.reported, *map(name_of, prepared.metrics)))
        found = values_of(replies, "test_examples")
        return {client: dict(_chosen(values, names, f"unseen_{way}")) for client, values in found.items()}


def evaluated_by(running: Running, nodes: Iterable[int], arrays: ArrayRecord, config: Config) -> list[Message]:
    """The replies of these nodes, which evaluate the same model."""
    content = RecordDict({running.prepared.rule.base.arrayrecord_key: arrays, "config": ConfigRecord({**config})})
    messages = [Message(content, node, MessageType.EVALUATE) for node in nodes]
    return list(running.grid.send_and_receive(messages, timeout=running.run.engine.timeout))


def _chosen(values: Mapping[str, float], names: Iterable[str], whose: str) -> Iterator[tuple[str, float]]:
    """These metrics on the client's own test examples; on all if it has no share of its own."""
    for name in names:
        if (value := values.get(str(MetricKey(name, "own")), values.get(name))) is not None:
            yield str(MetricKey(name, whose)), value
