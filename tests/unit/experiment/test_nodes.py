"""The nodes that a run begins with."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.engines import capabilities
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run import federation, loop
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


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the server asked to sleep; its clock shows them as passed at once."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    for module in (capabilities, federation, loop):
        monkeypatch.setattr(module, "time", clock)
    return slept


def test_a_node_that_restarts_when_a_run_begins_is_asked_again() -> None:
    grid = Restarting(2)
    assert check_nodes(grid, read(TEXT), CONFIG).nodes == {0: 1, 1: 2, 2: 3}
    assert grid.asked == [1, 2, 3, 2, 2]


def test_a_node_that_stays_away_ends_the_run_after_a_time() -> None:
    with pytest.raises(RunFailed, match=r"the run cannot begin: 2 of 3 clients .*\n  - node 2: Node Unavailable"):
        check_nodes(Restarting(1000), read(TEXT), CONFIG)


class Lost(GridAround):
    """A grid whose nodes are lost in a round and, after a number of looks at those that are connected, are back."""

    pull_interval = 0.0  # as that of Flower's simulation: replies are not polled for

    def __init__(self, looks: Mapping[int, int], absent: Collection[int] = (), at: int = 2) -> None:
        super().__init__(LocalGrid(client_app(make_client), 3, run_config={"experiment": LOSING, "set": ""}))
        self.looks, self.absent = dict(looks), absent  # by node; those that are not connected when the round begins
        self.at, self.round, self.sent = at, 0, list[list[int]]()  # the nodes that the round's messages were sent to

    def get_node_ids(self) -> list[int]:
        here = [*super().get_node_ids()]
        if self.round == self.at - 1:
            return [node for node in here if node not in self.absent]
        self.looks = {node: looks - 1 for node, looks in self.looks.items()} if self.round == self.at else self.looks
        return [node for node in here if self.round != self.at or self.looks.get(node, 0) <= 0]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        config = messages[0].content.config_records["config"] if messages else {}
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            self.round = config[protocol.ROUND]
        if self.round != self.at:
            return super().send_and_receive(messages, timeout=timeout)
        self.sent.append([message.metadata.dst_node_id for message in messages])
        lost = [message for message in messages if self.looks.get(message.metadata.dst_node_id, 0) > 0]
        kept = [message for message in messages if message not in lost]
        errors = [Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=each) for each in lost]
        return [*errors, *super().send_and_receive(kept, timeout=timeout)]


LOSING = (
    "{rounds: 3, clients: 3, model: {name: mlp}, train: {steps: 1}, evaluate: {clients: false}, "
    "strategy: {name: FedAvg, min_train_nodes: 2}, engine: {workers: 0, node_timeout: 20, device: cpu}}"
)


def trained(grid: Lost, out: Path) -> tuple[bytes, list[int]]:
    serve(grid, {"experiment": LOSING, "out": str(out)})
    (file,) = out.rglob("history.jsonl")
    lines = map(json.loads, file.read_text().splitlines())
    return file.with_name("model.safetensors").read_bytes(), [line["clients"] for line in lines]


@pytest.mark.parametrize(
    ("looks", "counts", "sent"),
    [
        ({}, [3, 3, 3], [[1, 2, 3]]),
        ({3: 9}, [3, 2, 2], [[1, 2, 3]]),  # two are enough: the round goes on without it
        ({1: 5, 3: 9}, [3, 2, 2], [[1, 2, 3], [1]]),  # node 2 is connected, and has answered
        ({1: 5, 3: 5}, [3, 3, 3], [[1, 2, 3], [1, 3]]),
        ({1: 3, 2: 6, 3: 6}, [3, 3, 3], [[1, 2, 3], [1], [2, 3]]),
    ],
)
def test_lost_nodes_get_the_messages_of_a_round_again_when_they_are_back(
    looks: Mapping[int, int], counts: list[int], sent: list[list[int]], tmp_path: Path
) -> None:
    """Once each, also while other nodes are connected."""
    grid = Lost(looks)
    model, found = trained(grid, tmp_path / "lost")
    assert (found, grid.sent) == (counts, sent)
    undisturbed, _ = trained(Lost({}), tmp_path / "undisturbed")
    assert (model == undisturbed) == (counts == [3, 3, 3])


def test_the_log_names_the_client_of_a_node_that_has_never_trained(
    flower_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trained(Lost({2: 1000}, at=1), tmp_path)
    assert "round 1: left out client 1 (node 2): Node Unavailable" in flower_log.text


def test_a_node_that_came_back_too_late_for_a_round_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    grid = Lost({2: 1000}, absent=[3])
    assert trained(grid, tmp_path)[1] == [3, 2, 2]
    assert grid.sent == [[1, 2], [3]]


def test_a_round_whose_nodes_stay_away_ends_the_run_after_a_time(slept: list[float], tmp_path: Path) -> None:
    grid = Lost(dict.fromkeys((1, 2, 3), 1000))
    with pytest.raises(RunFailed, match=r"round 2: 0 of 3 clients sent a usable reply, 2 are needed"):
        trained(grid, tmp_path)
    assert grid.sent == [[1, 2, 3]]
    assert 20 <= sum(slept) < 22


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
