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

from flwr.app import ConfigRecord, MessageType

from fedbn_flwr.client.evaluation import name_of
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import record_of
from fedbn_flwr.messages.reply import number_problem
from fedbn_flwr.norms.roles import split
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.strategies import evaluation_round

from ..settings import Settings
from .evaluate import Evaluate, values_in
from .listener import ByClient, FinishedRound, Listener, Running


def unseen_nodes(run: Settings, nodes: Mapping[int, int]) -> dict[int, int]:
    """The nodes of the clients that never train, by client."""
    if missing := [client for client in run.evaluate.unseen.clients if client not in nodes]:
        raise SettingsError(f"evaluate.unseen.clients has {missing[0]}, and the nodes' clients are {sorted(nodes)}")
    return {client: nodes[client] for client in run.evaluate.unseen.clients}


class Unseen(Listener):
    """Adds each newcomer's metrics on its own test examples, and their means over the newcomers."""

    after = (Evaluate,)

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
        replies = running.ask(
            f"round {finished.number}, newcomers",
            MessageType.EVALUATE,
            lambda reply: number_problem(reply.metrics, protocol.NUM_EXAMPLES),
            arrays,
            config,
            nodes=running.federation.unseen,
        )
        names = dict.fromkeys((prepared.task.main, *prepared.task.reported, *map(name_of, prepared.metrics)))
        return {
            client: dict(_chosen(values_in(reply.metrics, "test_examples"), names, f"unseen_{way}"))
            for client, reply in replies.items()
        }


def _chosen(values: Mapping[str, float], names: Iterable[str], whose: str) -> Iterator[tuple[str, float]]:
    """These metrics on the client's own test examples; on all if it has no share of its own."""
    for name in names:
        if (value := values.get(str(MetricKey(name, "own")), values.get(name))) is not None:
            yield str(MetricKey(name, whose)), value
