"""A client's model that other clients used before equals a new one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from torch import nn

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.node import ClientParts, checked_client_number, make_client
from fedbn_flwr.experiment.run.federation import check_nodes
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.norms.roles import Role
from tests.support.experiments import read

SETTINGS = "clients=2 rounds=1 seed=4711 data.partition.kind=iid engine.device=cpu model.norm={norm} train.epochs=1"


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def client_of(partition: int, experiment: str, **more: str) -> BNClient:
    run_config = {"experiment": "quick", "set": experiment}
    node = {"partition-id": partition, "num-partitions": 2, **more}
    return make_client(Context(1, partition, node, RecordDict(), run_config), {})


def state_of(client: BNClient) -> dict[str, torch.Tensor]:
    client.get_parameters({})  # what a client has neither loaded nor read is not reset
    return {key: value.clone() for key, value in client.model.state_dict().items()}


@pytest.mark.parametrize("norm", ["bn", "brn", "sbn", "won"])
def test_a_reused_model_is_as_built(norm: str) -> None:
    experiment = SETTINGS.format(norm=norm)
    client = client_of(0, experiment)
    fresh, model = state_of(client), client.model
    client.fit(client.get_parameters({}), {})
    assert any(not torch.equal(value, fresh[key]) for key, value in client.model.state_dict().items())
    del client
    again = client_of(1, experiment)
    assert again.model is model  # it was used again; otherwise this test checks nothing
    assert all(parameter.grad is None for parameter in again.model.parameters())
    for key, value in state_of(again).items():
        assert torch.equal(value, fresh[key]), key


@pytest.mark.parametrize("sent", ["weight", "all", "none"])
def test_a_reused_model_keeps_nothing_of_the_client_before(sent: str) -> None:
    """Of what a message leaves out, the second client has the initial values."""
    experiment = SETTINGS.format(norm="bn") + " train.epochs=3"
    client = client_of(0, experiment)
    fresh, model = state_of(client), client.model
    message = {
        key: np.full(value.shape, 0.5, np.float32)
        for key, value in fresh.items()
        if value.is_floating_point() and sent in (key.rpartition(".")[2], "all")
    }
    if sent == "weight":  # a message lacks some of them only if the client has its own
        message |= {key: fresh[key].numpy() for key, role in client.roles.items() if role is Role.WEIGHTS}
    client.train_round(message, {})
    del client
    again = client_of(1, experiment)
    assert again.model is model
    again.evaluate_round(message, {})
    for key, value in again.model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(message[key]) if key in message else fresh[key]), key


def test_two_clients_at_once_have_two_models() -> None:
    experiment = SETTINGS.format(norm="bn")
    first, second = client_of(0, experiment), client_of(1, experiment)
    assert first.model is not second.model


def test_a_network_of_the_user_s_own_is_built_for_every_client() -> None:
    experiment = SETTINGS.format(norm="bn") + f" model.name={__name__}:network"
    first = client_of(0, experiment).model
    assert client_of(1, experiment).model is not first


@pytest.mark.parametrize(
    ("key", "near"), [("data", "data-path"), ("data_path", "data-path"), ("num-partition", "num-partitions")]
)
def test_a_node_config_with_a_misspelt_key_is_refused(key: str, near: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key '{key}'; did you mean '{near}'") as refused:
        client_of(0, SETTINGS.format(norm="bn"), **{key: "/srv/data"})
    assert "\n" not in str(refused.value)


def test_a_partition_id_counts_from_0() -> None:
    for own, ends in (({}, ", or \"data-path='...'\" for a site with its own data"), ({"data-path": "/srv/data"}, "")):
        context = Context(1, 1, {"partition-id": 2, "num-partitions": 2, **own}, RecordDict(), {})
        with pytest.raises(SettingsError, match=r"partition-id=2 and num-partitions=2, but .*clients=2") as refused:
            checked_client_number(context, 2)
        assert str(refused.value).endswith(f'num-partitions=2" with N from 0 to 1{ends}')


def test_a_node_config_may_have_keys_of_other_apps() -> None:
    assert client_of(0, SETTINGS.format(norm="bn"), rack="b7").identity == {"partition-id": 0}


@pytest.mark.parametrize("name", ["heart", "digits", "cifar10", "heart/train.csv"])
def test_a_data_path_is_a_path_even_if_a_data_set_has_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBN_DATA", str(tmp_path / "elsewhere"))
    folder = tmp_path / name.split("/")[0]
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text("age,ill\n61,0\n62,1\n63,0\n64,1\n")
    run = Settings(data={"label": "ill", **({"test": 0.5} if "." in name else {})})
    node = {"data-path": name, "partition-id": 0, "num-partitions": run.clients}
    context = Context(run_id=0, node_id=0, node_config=dict(node), state=RecordDict(), run_config={})
    assert ClientParts.of(run, context).dataset.input_names == ("age",)


# --- what the server sees of an error -----------------------------------------

SITE = {
    "clients": 1,
    "rounds": 1,
    "data": {
        "inputs": ["age", "sex"],
        "label": "outcome",
        "categories": {"sex": ["f", "m"]},
        "class_names": ["ill", "well"],
        "normalise": "unit",
    },
    "model": {"name": "mlp"},
    "evaluate": {"server": False},
}
ROWS = "age,sex,outcome\n61,f,ill\n62,m,well\n"
WHOLE = "(the client's log has the whole error)"


@pytest.mark.parametrize(
    ("changes", "rows", "public", "private"),
    [
        ({}, ROWS + "zoë,f,ill\n", "... of ... values of the column 'age' are not numbers", "zoë"),
        (
            {},
            ROWS + "63,zoë,ill\n",
            "data.categories lacks ... of the values of the column 'sex' of data-path",
            "'zoë'",
        ),
        ({}, ROWS + "63,f,zoë\n", "data.class_names lacks ... of the classes in 'outcome' of data-path", "'zoë'"),
        ({}, ROWS + "63,f,ill,zoë\n", "data.name=data-path: cannot read its files", "Expected 3 columns, got 4: 63,f,"),
        ({}, None, "images work too, as train/CLASS/*.png", "zoë.txt"),
        ({"inputs": ["picture"]}, "picture,outcome\nzoë.png,ill\n", "the image in row ... cannot be read", "zoë.png"),
        ({"domain": "sex"}, ROWS, "'sea' is not a domain of data-path", "known: f, m"),
        ({"ranges": {"age": [0, 61]}}, ROWS, "... of ... rows have a value of 'age' outside of data.ranges", "to 62"),
        ({}, ROWS + "63,f,\n", "... of ... rows have no value in 'outcome', the first is row ...", "row 2 of train"),
        ({"class_names": [], "classes": 2}, ROWS, "a class has fewer training examples than", "'ill' has 1, and min"),
    ],
)
def test_the_server_sees_neither_values_nor_files_of_a_site(
    changes: dict[str, Any],
    rows: str | None,
    public: str,
    private: str,
    tmp_path: Path,
    flower_log: pytest.LogCaptureFixture,
) -> None:
    for split in ("train", "test"):
        (tmp_path / (f"{split}.csv" if rows else "zoë.txt")).write_text(rows or "", encoding="utf-8")
    data = {**SITE["data"], **changes}  # type: ignore[dict-item]
    size = {} if "age" in data["inputs"] else {"channels": 3, "size": 8, "categories": {}}
    said = _error_of_site(tmp_path, {**SITE, "data": data | size})
    assert public in said
    assert said.endswith(WHOLE)
    assert private not in said
    assert not re.search(r"\d", said.removeprefix("client 0"))
    assert "zoë" not in said
    assert str(tmp_path) not in said
    assert private in flower_log.text, "the site's log has all of it"


def breaks(num_classes: int, in_features: int = 0) -> nn.Module:
    raise ValueError("zoë")


def test_the_server_sees_no_text_of_an_error_of_other_packages(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the site has data of its own: the text may have its values. The kind of the error and its place remain."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text(ROWS)
    said = _error_of_site(tmp_path, SITE | {"model": {"name": f"{__name__}:breaks"}})
    assert "failed (the client's log has the whole error)" in said
    monkeypatch.setattr(BNClient, "batch_examples", breaks)
    said = _error_of_site(tmp_path, SITE, min_batch=2)
    assert "client 0 could not report its partition: ValueError: the client's log has the whole error" in said
    assert "zoë" not in said
    assert "ValueError: zoë" in flower_log.text


def _error_of_site(folder: Path, experiment: dict[str, Any], min_batch: int = 0) -> str:
    run_config = {"experiment": json.dumps(experiment | {"engine": {"device": "cpu"}})}
    node = {"partition-id": 0, "num-partitions": 1, "data-path": str(folder)}
    node |= {"domain": "sea"} if "domain" in experiment["data"] else {}
    config = {protocol.READY: True, protocol.RUN: "FedAvg", protocol.EXCHANGE_MIN_BATCH: min_batch}
    with LocalGrid(client_app(make_client), 1, run_config=run_config, node_config=node) as grid:
        content = RecordDict({"config": ConfigRecord(config)})
        (reply,) = grid.send_and_receive([Message(content, 1, protocol.PARTITION_QUERY)])
    assert isinstance(reply.error, Error)
    return str(reply.error.reason)


# --- The nodes that a run begins with.


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


@pytest.mark.usefixtures("slept")
def test_a_node_that_restarts_when_a_run_begins_is_asked_again() -> None:
    grid = Restarting(2)
    assert check_nodes(grid, read(TEXT), CONFIG).nodes == {0: 1, 1: 2, 2: 3}
    assert grid.asked == [1, 2, 3, 2, 2]


@pytest.mark.usefixtures("slept")
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


@pytest.mark.usefixtures("slept")
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


@pytest.mark.usefixtures("slept")
def test_the_log_names_the_client_of_a_node_that_has_never_trained(
    flower_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trained(Lost({2: 1000}, at=1), tmp_path)
    assert "round 1: left out client 1 (node 2): Node Unavailable" in flower_log.text


@pytest.mark.usefixtures("slept")
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


@pytest.mark.usefixtures("slept")
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
