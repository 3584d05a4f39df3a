"""The nodes of a run, before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import metrics_in

from .settings import Settings


def check_nodes(grid: Grid, run: Settings, config: Mapping[str, Any]) -> dict[int, int]:
    """Check that one node holds each partition; `config` names the run, and its last round.

    Returns, for each partition whose node has a folder for its memory, the round that this is of.
    """
    nodes = wait_for_nodes(
        grid,
        run.clients,
        run.engine.node_timeout,
        f'in a simulation, give flwr run --federation-config "num-supernodes={run.clients} '
        'client-resources-num-cpus=1"; on machines of your own, start the missing SuperNodes',
    )
    content = RecordDict({"config": ConfigRecord({**config, protocol.READY: True})})
    questions = [Message(content, node, protocol.PARTITION_QUERY) for node in nodes]
    replies = list(grid.send_and_receive(questions, timeout=run.engine.timeout))
    holders: dict[int, list[int]] = {}
    folders: dict[int, int] = {}
    problems = []
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            problems.append(f"node {node}: {reply.error.reason}")
            continue
        answer = next(iter(metrics_in(reply.content).values()), MetricRecord())
        partition_id = int(answer.get(protocol.PARTITION, -1))  # type: ignore[arg-type]
        holders.setdefault(partition_id, []).append(node)
        if protocol.STATE_ROUND in answer:
            folders[partition_id] = int(answer[protocol.STATE_ROUND])  # type: ignore[arg-type]
    if (silent := len(nodes) - len(replies)) > 0:
        problems.append(f"{silent} nodes did not answer within {run.engine.timeout:g} s")
    for partition_id in range(run.clients):
        if len(held := holders.get(partition_id, [])) != 1 and not problems:
            problems.append(f"partition {partition_id} is held by {len(held)} nodes, expected one: {held}")
    if problems:
        listed = "".join(f"\n  - {' '.join(problem.split())}" for problem in sorted(problems))
        raise RunFailed(f"the run cannot begin:{listed}")
    return folders
