"""The nodes that a run begins with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.federation import check_nodes
from fedbn_flwr.experiment.run.launch import serve
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


@pytest.mark.slow
def test_a_node_that_stays_away_ends_the_run_after_a_time() -> None:
    with pytest.raises(RunFailed, match="the run cannot begin:\n  - node 2: Node Unavailable"):
        check_nodes(Restarting(1000), read(TEXT), CONFIG)


class Lost(GridAround):
    """A grid whose nodes lose their messages of round 2 for the first `times` times, all or only those given."""

    pull_interval = 0.0  # as that of Flower's simulation: replies are not polled for

    def __init__(self, times: int, nodes: Sequence[int] = (1, 2, 3)) -> None:
        super().__init__(LocalGrid(client_app(make_client), 3, run_config={"experiment": LOSING, "set": ""}))
        self.times, self.nodes = times, nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        config = messages[0].content.config_records["config"] if messages else {}
        if config.get(protocol.ROUND) != 2 or messages[0].metadata.message_type != MessageType.TRAIN or not self.times:
            return super().send_and_receive(messages, timeout=timeout)
        self.times -= 1
        lost = [message for message in messages if message.metadata.dst_node_id in self.nodes]
        kept = [message for message in messages if message not in lost]
        errors = [Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=each) for each in lost]
        return [*errors, *super().send_and_receive(kept, timeout=timeout)]


LOSING = (
    "{rounds: 3, clients: 3, model: {name: mlp}, train: {steps: 1}, evaluate: {clients: false}, "
    "strategy: {name: FedAvg, min_train_nodes: 2}, engine: {workers: 0, node_timeout: 2, device: cpu}}"
)


def trained(grid: Lost, out: Path) -> tuple[bytes, list[int]]:
    serve(grid, {"experiment": LOSING, "out": str(out)})
    (file,) = out.rglob("history.jsonl")
    lines = map(json.loads, file.read_text().splitlines())
    return file.with_name("model.safetensors").read_bytes(), [line["clients"] for line in lines]


@pytest.mark.parametrize(("nodes", "counts"), [((1, 2, 3), [3, 3, 3]), ((1, 3), [3, 3, 3]), ((3,), [3, 2, 3])])
def test_a_round_that_lost_too_many_nodes_is_repeated_when_they_are_back(
    nodes: Sequence[int], counts: list[int], tmp_path: Path
) -> None:
    """Two are enough: if one is lost, the round goes on without it."""
    model, found = trained(Lost(2, nodes), tmp_path / "lost")
    assert found == counts
    undisturbed, _ = trained(Lost(0), tmp_path / "undisturbed")
    assert (model == undisturbed) == (counts == [3, 3, 3])


@pytest.mark.slow
def test_a_round_whose_nodes_stay_away_ends_the_run_after_a_time(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"round 2: 0 of 3 clients sent a usable reply, 2 are needed"):
        trained(Lost(1000), tmp_path)


def test_a_run_that_waits_names_the_missing_client(flower_log: pytest.LogCaptureFixture) -> None:
    class Smaller(GridAround):
        def get_node_ids(self) -> list[int]:
            return [1, 3]

    grid = Smaller(LocalGrid(client_app(make_client), 3, run_config={"experiment": TEXT, "set": ""}))
    with pytest.raises(RunFailed, match="2 of 3 nodes are connected after 1 s; without client 1; in a simulation"):
        check_nodes(grid, read(TEXT), CONFIG)
    assert (
        flower_log.records[0]
        .getMessage()
        .startswith("waiting for nodes: 2 of 3 are connected, at most 1 s; without client 1; ")
    )
