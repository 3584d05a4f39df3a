"""A client's model that other clients used before equals a new one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr.client.client import BNClient
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.node import make_client
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


def test_a_node_config_may_have_keys_of_other_apps() -> None:
    assert client_of(0, SETTINGS.format(norm="bn"), rack="b7").identity == {"partition-id": 0}
