"""Channels last: where `auto` chooses it, and that nothing but the last bits of results depends on it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, build_model
from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.messages import protocol
from fedbn_flwr.models import MODELS
from fedbn_flwr.models.layout import suits_channels_last
from fedbn_flwr.models.tensors import ModelTensors, copied
from fedbn_flwr.norms import NORMS
from tests.support.federations import near
from tests.support.marks import slow_except

SMALL = ("cnn", "fedbs_mnist", "resnet20")


def images(*shape: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(*shape, dtype=dtype, generator=generator), torch.randint(0, 10, shape[:1], generator=generator))
        for _ in range(2)
    ]


def built(name: str, norm: str = "bn") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(name, 10, norm, input_shape=(3, 32, 32))


def is_last(model: nn.Module) -> bool:
    filters = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    return all(each.is_contiguous(memory_format=torch.channels_last) for each in filters)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", slow_except({"cnn", "fedbs_mnist"}, SMALL))
def test_every_norm_trains_the_same_with_channels_last(name: str, norm: str) -> None:
    """In float64 the results of a round agree but for rounding, and replies have arrays in the usual order."""
    try:
        model = built(name, norm).double()
    except SettingsError:
        pytest.skip("fixup is for residual networks")
    updates = {}
    for last in (False, True):
        client = BNClient(copy.deepcopy(model), images(6, 3, 32, 32, dtype=torch.float64), lr=0.01, channels_last=last)
        assert is_last(client.model) == last
        before = client.get_parameters({})
        assert [each.tobytes() for each in before] == [v.tobytes() for v in BNClient(model, []).get_parameters({})]
        updates[last] = client.train_round(copied(model.state_dict()), {}).arrays
    for key, value in updates[False].items():
        assert updates[True][key].flags.c_contiguous
        np.testing.assert_allclose(updates[True][key], value, rtol=1e-8, atol=1e-10, err_msg=key)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"cnn1d", "deeplabv3plus_resnet50", "resnet50", "densenet121"}))
def test_auto_leaves_out_networks_without_convolutions_and_lenet_s_six_channels(name: str) -> None:
    assert suits_channels_last(built(name)) == (name not in ("mlp", "linear", "lenet"))


@pytest.mark.parametrize("norm", NORMS)
def test_auto_leaves_out_instance_norm(norm: str) -> None:
    assert suits_channels_last(built("resnet20", norm)) == (norm != "in")


def test_auto_is_for_float32_and_for_groups_of_eight_channels() -> None:
    assert not suits_channels_last(built("cnn").double())
    norms = {2: True, 4: True, 8: False}  # groups of 32 channels; of 16 channels, half as many
    for groups, suits in norms.items():
        layers = nn.Conv2d(3, 32, 3), nn.GroupNorm(groups, 32), nn.Conv2d(32, 8, 3)
        assert suits_channels_last(nn.Sequential(*layers)) == suits
    assert not suits_channels_last(nn.Sequential(nn.Conv2d(3, 32, 3), nn.LayerNorm([32, 30, 30])))
    assert not suits_channels_last(nn.Conv3d(3, 32, 3))


def own(num_classes: int, in_channels: int) -> nn.Module:
    convolutions = nn.Conv2d(in_channels, 16, 3), nn.Conv2d(16, 16, 3)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"model.norm": "in"}, False),
        ({"train.channels_last": False}, False),
        ({"model.name": f"{__name__}:own"}, False),
    ],
    ids=str,
)
def test_auto_is_for_the_networks_of_this_library(changes: dict[str, Any], expected: bool) -> None:
    settings = {"train.channels_last": "auto", **changes}
    experiment = load_experiment("quick", [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    context = Context(run_id=0, node_id=0, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    assert is_last(ClientMaker(experiment)(context, {protocol.RUN: next(iter(experiment.by_folder))}).model) == expected


# --- what BNClient does by default ---


def network(channels: int = 3) -> nn.Sequential:
    layers = nn.Conv2d(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def formats(client: BNClient) -> set[bool]:
    """Whether channels are last in the outputs of the first convolution, in training and in evaluation."""
    found: set[bool] = set()
    sent = copied(client.model.state_dict())
    first = next(layer for layer in client.model.modules() if isinstance(layer, nn.Conv2d))
    note = first.register_forward_hook(
        lambda layer, inputs, outputs: found.add(
            not outputs.is_contiguous() and outputs.is_contiguous(memory_format=torch.channels_last)
        )
    )
    client.train_round(sent, {})
    client.evaluate_round(sent, {})
    note.remove()
    return found


def client_of(model: nn.Module, channels: int = 3, **how: Any) -> BNClient:
    return BNClient(model, images(6, channels, 12, 12), images(6, channels, 12, 12), **how)


@pytest.mark.parametrize("channels", [1, 3])
def test_by_default_the_inputs_of_a_cpu_have_channels_last(channels: int) -> None:
    model = network(channels)
    assert formats(client_of(copy.deepcopy(model), channels)) == {True}
    assert formats(client_of(copy.deepcopy(model), channels, channels_last=False)) == {False}


def test_the_default_changes_only_the_last_bits_and_leaves_filters_gradients_and_data_alone() -> None:
    model, sent = network(), copied(network().state_dict())
    clients = client_of(model), client_of(copy.deepcopy(model), channels_last=False)
    before = [x.clone() for x, _ in clients[0].train_data]  # type: ignore[union-attr]
    updates = [client.train_round(sent, {}) for client in clients]
    near(updates[1].arrays, updates[0].arrays, rtol=1e-4, atol=1e-5)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    for (x, _), expected in zip(clients[0].train_data, before, strict=True):  # type: ignore[call-overload]
        assert x.equal(expected)
        assert x.is_contiguous()


class Viewing(nn.Sequential):
    """A module of another project, whose code needs the usual format."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.view(len(x), -1).view(x.shape)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def patched() -> nn.Module:
    model = network()
    model[2].forward = torch.relu
    return model


def hooked() -> nn.Module:
    model = network()
    model[3].register_forward_pre_hook(lambda layer, inputs: (inputs[0].view(len(inputs[0]), -1).view_as(inputs[0]),))
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a module": (lambda: nn.Sequential(Viewing(network()[0]), *network()[1:]), {}),
    "a hook": (hooked, {}),
    "the forward of a module": (patched, {}),
    "a loss": (network, {"loss": own_loss}),
    "an evaluation's loss": (network, {"eval_loss": own_loss}),
    "a loss with options": (network, {"loss": partial(own_loss)}),
    "float64": (lambda: network().double(), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_known_to_take_channels_last_keeps_the_usual_format(name: str) -> None:
    make, how = OTHERS[name]
    client = client_of(make(), **how)
    if name == "float64":
        client.train_data = client.eval_data = images(6, 3, 12, 12, dtype=torch.float64)
    assert formats(client) == {False}


def test_a_rule_of_another_project_sees_the_usual_format() -> None:
    seen = []

    class Watching(ClientRule):
        keys = {"test.watching": Key("true", "for this test")}

        def loss(self, inputs: Tensor, targets: Tensor, outputs: Tensor, loss: Any) -> Any:
            seen.append(inputs.is_contiguous())
            return loss

    client_of(network()).train_round(copied(network().state_dict()), {"test.watching": True})
    assert seen == [True, True]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, partial(cross_entropy, label_smoothing=0.1)])
def test_losses_of_pytorch_and_of_this_library_take_any_format(loss: Any) -> None:
    assert formats(client_of(network(), loss=loss)) == {True}


def test_a_metric_may_need_the_usual_format() -> None:
    def peak(outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.view(len(outputs), -1).amax())

    data = [(inputs, torch.zeros(len(inputs), 8, 8).long()) for inputs, _ in images(6, 3, 12, 12)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3))
    assert BNClient(model, data, data, metrics=[peak]).evaluate_round(copied(model.state_dict()), {})["peak"]


def test_a_shared_model_is_laid_out_and_keeps_its_parameters() -> None:
    tensors = ModelTensors(built("cnn"))
    parameters = [*tensors.model.parameters()]
    BNClient(tensors, images(4, 3, 32, 32), channels_last=False)
    assert not is_last(tensors.model)
    BNClient(tensors, images(4, 3, 32, 32), channels_last=True)
    assert is_last(tensors.model)
    assert all(now is before for now, before in zip(tensors.model.parameters(), parameters, strict=True))


def test_volumes_train_the_same_if_asked_for() -> None:
    model = nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.Conv3d(8, 10, 3), nn.Flatten(2)).double()
    data, sent, found = images(4, 2, 7, 7, 7, dtype=torch.float64), copied(model.state_dict()), []
    for last in (False, True):
        client = BNClient(model, data, lr=0.1, loss=lambda z, y: F.cross_entropy(z.mean(2), y), channels_last=last)
        assert model[2].weight.is_contiguous(memory_format=torch.channels_last_3d) == last
        found.append(client.train_round(sent, {}).arrays)
    for key, value in found[0].items():
        assert found[1][key].flags.c_contiguous
        np.testing.assert_allclose(found[1][key], value, rtol=1e-10, atol=1e-12)
