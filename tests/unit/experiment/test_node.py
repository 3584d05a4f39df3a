"""A client's model that other clients used before equals a new one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from torch import nn

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.node import ClientParts, checked_client_number, make_client
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.norms.roles import Role

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
