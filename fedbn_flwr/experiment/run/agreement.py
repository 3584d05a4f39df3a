"""Mean and deviation of each column over all sites' data, on which the sites agree before the first round.

Each site sends sums (`data.moments`), and the server sends the moments of all with every message: clients store none,
so a node that restarts or joins late has them too. A resumed run reads them from model.json in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.data import Moments
from fedbn_flwr.data.moments import ROWS, Sums, moments_from, totals
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import fault
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import arrays_of
from fedbn_flwr.results.folder import RunFolder

from ..parts import Parts
from ..sections import refuse
from ..settings import strategy_name
from .cohort import Nodes, failures, refuse_nodes


def agree(grid: Grid, parts: Parts, nodes: Nodes, identity: Mapping[str, Any]) -> Moments:
    """The moments of the training examples of all clients; RunFailed names those whose sums are missing or wrong."""
    run, rule = parts.run, parts.rule
    name, hides = strategy_name(run.strategy), rule.lacks.get("inside")
    asks = "data.normalise is 'moments', for which each site sends the sums of its columns to the server,"
    instead = "use official, unit, or module:callable with known values"
    refuse(
        {
            f"{asks} but {name} {hides}; {instead}": hides is not None,
            f"{asks} but strategy.bounds limits the influence of one client, and that of its sums has no limit; "
            f"{instead}": rule.chain[-1].bounds is not None,
        }
    )
    clients = {node: client for client, node in nodes.ids.items()}
    content = RecordDict({"config": ConfigRecord(dict(identity))})
    questions = [Message(content, node, protocol.SUMS_QUERY) for node in clients]
    columns = parts.shape.channels if parts.shape.tokens is None else 0
    replies = list(grid.send_and_receive(questions, timeout=run.engine.timeout))
    found: list[Sums] = []
    problems = failures(run, len(clients), replies)
    for reply in filter(Message.has_content, replies):
        try:
            found.append(_sums_in(reply, columns))
        except MessageError as error:
            node = reply.metadata.src_node_id
            problems.append(f"node {node}: client {clients[node]}: {error}")
    refuse_nodes(problems)
    return moments_from(found)


def agreed_before(folder: RunFolder) -> Moments:
    """The moments with which the run of a folder began."""
    known = folder.model_description()["normalise"]
    if not isinstance(known, dict):
        raise SettingsError(f"{str(folder.path)!r} cannot be resumed: its model.json has no moments of all sites' data")
    return tuple(known["mean"]), tuple(known["std"])


def _sums_in(reply: Message, columns: int) -> Sums:
    """The sums of a site's reply; MessageError if they are not those of any values."""
    arrays = unpack(arrays_of(reply.content))
    if problem := fault(arrays, {"sums": np.zeros((ROWS, columns))}):
        raise MessageError(problem)
    sums: Sums = arrays["sums"]
    for place, column in enumerate(sums.T):
        count, total, square = totals(column)
        # By the inequality of Cauchy and Schwarz.
        if not 0 <= count == column[0] < 2**53 or square * count < total**2 or square > 0 == count:
            raise MessageError(f"its sums of column {place} are those of no values; expected those of its data")
    return sums
