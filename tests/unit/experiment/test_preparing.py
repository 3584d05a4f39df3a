"""What is checked before anything is trained; and a client's model, which is used again, is as good as a new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr.client.client import BNClient
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.find import parse_yaml, read_experiment
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.settings import Experiment
from fedbn_flwr.strategies import FedAvg

SETTINGS = "clients=2 rounds=1 data.partition.kind=iid engine.device=cpu model.norm={norm} train.steps=2"


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def client_of(partition: int, experiment: str) -> BNClient:
    run_config = {"experiment": "demo", "set": experiment}
    node = {"partition-id": partition, "num-partitions": 2}
    return make_client(Context(1, partition, node, RecordDict(), run_config), {})


def state_of(client: BNClient) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in client.model.state_dict().items()}


@pytest.mark.parametrize("norm", ["bn", "brn", "sbn", "won"])
def test_a_client_s_model_is_as_built_whoever_had_it_before(norm: str) -> None:
    experiment = SETTINGS.format(norm=norm)
    client = client_of(0, experiment)
    fresh, model = state_of(client), client.model
    client.fit(client.get_parameters({}), {})
    assert any(not torch.equal(value, fresh[key]) for key, value in client.model.state_dict().items())
    del client
    again = client_of(1, experiment)
    assert again.model is model  # it was used again, or this test says nothing
    assert all(parameter.grad is None for parameter in again.model.parameters())
    for key, value in again.model.state_dict().items():
        assert torch.equal(value, fresh[key]), key


def test_two_clients_at_once_have_two_models() -> None:
    experiment = SETTINGS.format(norm="bn")
    first, second = client_of(0, experiment), client_of(1, experiment)
    assert first.model is not second.model


def test_a_network_of_the_user_s_own_is_built_anew_for_every_client() -> None:
    experiment = SETTINGS.format(norm="bn") + f" model.name={__name__}:network"
    first = client_of(0, experiment).model
    assert client_of(1, experiment).model is not first


# --- a norm that a rule replaces -----------------------------------------------

RULES: list[dict[str, Any]] = [
    {"name": "FedTAN"},
    {"name": "FedTANII", "fedtan_rounds": 1},
    {"name": "FedAvgGlobalStats"},
    {"name": "MeanStatistics", "base": {"name": "FedTAN"}},
    {"name": "FixBN", "freeze_round": 1, "base": {"name": "MeanStatistics", "base": {"name": "FedTAN"}}},
]


def experiment_of(strategy: dict[str, Any], norm: str) -> Experiment:
    return read_experiment({"strategy": strategy, "model": {"norm": norm}, "rounds": 2})


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_norm_with_arithmetic_of_its_own_is_refused_where_it_would_be_lost(rule: dict[str, Any]) -> None:
    message = rf"strategy {rule['name']}.* 'bn1' of 'cnn' is a BatchRenorm, whose own .* use model\.norm: bn"
    with pytest.raises(SettingsError, match=message):
        prepare(experiment_of(rule, "brn"))
    prepare(experiment_of(rule, "bn"))


def test_other_rules_take_it() -> None:
    prepare(experiment_of({"name": "FixBN", "freeze_round": 1}, "brn"))


def strategy_of(text: str) -> object:
    (run,) = read_experiment(parse_yaml(text)).runs
    return make_rule(run)


def test_a_round_needs_two_clients_unless_the_experiment_says_otherwise() -> None:
    for clients, spec, needed in ((1, "", 1), (5, "", 2), (5, ", min_train_nodes: 4", 4)):
        strategy = strategy_of(f"{{clients: {clients}, strategy: {{name: FedAvg{spec}}}}}")
        assert isinstance(strategy, FedAvg)
        assert strategy.min_train_nodes == needed
        assert strategy.min_available_nodes <= needed, "a lost client would stop the run"


@pytest.mark.parametrize("spec", ["{name: FedBN, min_train_nodes: 4}", "{name: FixBN, freeze_round: 1, base: {name: "
                                  "FedAvg, min_available_nodes: 4}}"])  # fmt: skip
def test_more_nodes_than_there_are_cannot_be_asked_for(spec: str) -> None:
    with pytest.raises(SettingsError, match=r"strategy\.min_\w+ of Fed\w+ is 4, but there are 3 clients"):
        strategy_of(f"{{clients: 3, strategy: {spec}}}")
