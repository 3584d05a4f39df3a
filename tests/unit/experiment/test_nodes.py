"""The nodes that a run begins with."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.federation import check_nodes
from fedbn_flwr.messages import protocol
from tests.support.experiments import read

TEXT = "{clients: 3, train: {steps: 1}, engine: {workers: 0, node_timeout: 1}}"
CONFIG = {protocol.TOKEN: "ab" * 16, protocol.ROUND: 0}


class Restarting(GridAround):
    """A grid whose node 2 is unavailable for the first `times` messages."""

    def __init__(self, times: int) -> None:
        super().__init__(LocalGrid(client_app(make_client), 3, run_config={"experiment": TEXT, "set": ""}))
        self.times = times
        self.asked: list[int] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.asked += [message.metadata.dst_node_id for message in messages]
        replies = []
        for message, reply in zip(messages, super().send_and_receive(messages, timeout=timeout), strict=True):
            if message.metadata.dst_node_id == 2 and self.times:
                self.times -= 1
                reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message)
            replies.append(reply)
        return replies


def test_a_node_that_restarts_when_a_run_begins_is_asked_again() -> None:
    grid = Restarting(2)
    assert check_nodes(grid, read(TEXT), CONFIG).nodes == {0: 1, 1: 2, 2: 3}
    assert grid.asked == [1, 2, 3, 2, 2]


def test_a_node_that_stays_away_ends_the_run_after_a_time() -> None:
    with pytest.raises(RunFailed, match="the run cannot begin:\n  - node 2: Node Unavailable"):
        check_nodes(Restarting(1000), read(TEXT), CONFIG)
