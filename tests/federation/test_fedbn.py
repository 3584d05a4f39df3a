"""FedBN: batch norm stays on the client, the rest is averaged; against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from fedbn_flwr import LocalGrid
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import FedAvg, FedBN, FixBN, SiloBN, Standalone
from tests.support.federations import Federations, near, replaced
from tests.support.twins import by_hand

STATISTICS = {"1.running_mean", "1.running_var"}
AFFINE = {"1.weight", "1.bias"}

# Each rule, and the keys of the small network that stay on the client.
RULES = {
    "FedBN": (FedBN, STATISTICS | AFFINE),
    "SiloBN": (SiloBN, STATISTICS),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def test_a_flower_project_s_clients_store_their_state_in_the_folder_of_the_node_config(
    federation: Federations, tmp_path: Path
) -> None:
    fed = federation((8, 8))
    grid = LocalGrid(fed.app(), 2, node_config={"state": str(tmp_path)})
    FedBN(fraction_evaluate=0.0).start(grid, fed.arrays(), num_rounds=2)
    assert sorted(file.parent.name for file in tmp_path.glob("run-*/*/round-2")) == ["client-0", "client-1"]


# --- against a twin ----------------------------------------------------------


@every_rule
def test_a_run_s_name_and_token_in_the_training_config_are_those_of_its_evaluations(
    federation: Federations, rule: str
) -> None:
    """Otherwise clients would take an evaluation for another run's, and delete their batch norm."""
    fed = federation((8, 12))
    named = ConfigRecord({"fedbn.run": "one", "fedbn.run-token": "0" * 32})
    first, second = (
        RULES[rule][0]().start(fed.grid(), fed.arrays(), num_rounds=2, train_config=config) for config in (None, named)
    )
    assert second.evaluate_metrics_clientapp == first.evaluate_metrics_clientapp


def test_batch_norms_of_which_some_track_no_statistics_are_refused(federation: Federations) -> None:
    """The server would share gamma and beta of those, which it does not know as batch norm."""

    def net() -> nn.Module:
        static = nn.BatchNorm2d(4, track_running_stats=False)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), static, nn.Flatten(), nn.Linear(16, 3))

    fed = federation((8, 12), model=net)
    with pytest.raises(
        RunFailed, match=r"sent '2.weight', which stays on .*whose batch norms all track statistics, or none"
    ):
        FedBN().start(fed.grid(), fed.arrays(), num_rounds=2)
    SiloBN().start(fed.grid(), fed.arrays(), num_rounds=2)  # shares gamma and beta of all


# --- local tensors -----------------------------------------------------------


def test_a_client_that_skips_a_round_keeps_its_batch_norm(federation: Federations) -> None:
    fed = federation((8, 12, 6))
    app, clients = replaced(fed)
    grid = fed.grid(app)
    strategy = FedBN(fraction_train=0.34, fraction_evaluate=0.0, min_train_nodes=1)
    strategy.start(grid, fed.arrays(), num_rounds=1)
    # The last client made for a node may have answered only a query for its partition.
    trained = [node for node, client in clients.items() if int(client.model[1].num_batches_tracked)]
    assert len(trained) == 1
    before = {key: clients[trained[0]].model.state_dict()[key].clone() for key in STATISTICS | AFFINE}
    others = [node for node in (1, 2, 3) if node not in trained]
    content = RecordDict({"arrays": strategy.sent(fed.arrays()), "config": ConfigRecord({"server-round": 2})})
    list(grid.send_and_receive([Message(content, node, "train") for node in others]))
    list(grid.send_and_receive([Message(content, node, "evaluate") for node in trained]))
    for key, value in before.items():
        assert clients[trained[0]].model.state_dict()[key].equal(value), key


# --- messages ----------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [lambda: torchvision.models.resnet18(num_classes=3), lambda: torchvision.models.mobilenet_v2(num_classes=3)],
    ids=["resnet18", "mobilenet_v2"],
)
def test_batch_norm_is_found_by_role_wherever_it_sits(model: Callable[[], nn.Module]) -> None:
    """A ResNet's shortcuts are `downsample.1`, MobileNetV2's norms `conv.0.1`: no name says what they are."""
    net = model()
    norms = {
        f"{name}.{key}"
        for name, module in net.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for key in module.state_dict()
    }
    arrays = pack({k: v.numpy() for k, v in net.state_dict().items() if roles(net)[k] is not Role.COUNTER})
    assert set(FedBN().sent(arrays)) == set(net.state_dict()) - norms
    assert set(SiloBN().sent(arrays)) == {k for k in arrays if not k.endswith(("running_mean", "running_var"))}


@every_rule
def test_a_grid_has_each_client_s_model_after_the_run(federation: Federations, rule: str) -> None:
    make, local = RULES[rule]
    fed = federation((8, 12), dtype=torch.float64, lr=0.1)
    grid = fed.grid()
    result = make().start(grid, fed.arrays(), num_rounds=2)
    found, (_, expected) = grid.client_models(result.arrays), by_hand(fed, 2, local)
    for client, model in enumerate(expected):
        near(model.state_dict(), {k: each.numpy() for k, each in found[client].items()}, rtol=1e-11, atol=1e-13)


# --- composed ----------------------------------------------------------------


def test_wrappers_report_that_their_rule_personalises() -> None:
    assert [bool(FixBN(rule()).traits.local) for rule in (FedBN, SiloBN, Standalone, FedAvg)] == [
        True,
        True,
        True,
        False,
    ]
    assert [FixBN(rule()).traits.has_global_model for rule in (FedBN, Standalone, FedAvg)] == [True, False, True]


@every_rule
def test_the_global_model_s_statistics_are_the_mean_of_the_clients_frozen_ones(
    federation: Federations, rule: str
) -> None:
    fed = federation((8, 12), dtype=torch.float64)
    app, clients = replaced(fed)
    result = FixBN(RULES[rule][0](), freeze_round=0).start(fed.grid(app), fed.arrays(), num_rounds=2)
    states = [clients[node].model.state_dict() for node in (1, 2)]
    for key in STATISTICS:
        mean = (8 * states[0][key] + 12 * states[1][key]) / 20
        np.testing.assert_allclose(unpack(result.arrays)[key], mean.numpy(), rtol=1e-12)
