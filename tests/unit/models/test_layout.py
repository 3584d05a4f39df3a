"""Channels last: where `auto` chooses it, and that nothing but the last bits of results depends on it."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, build_model
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.messages import protocol
from fedbn_flwr.models import layout
from fedbn_flwr.models.build import MODELS
from fedbn_flwr.models.layout import suits_channels_last
from fedbn_flwr.models.tensors import ModelTensors, copied
from fedbn_flwr.norms.convert import NORMS

SMALL = ("cnn", "fedbs_mnist", "resnet20")


@pytest.fixture(autouse=True)
def _new_trials() -> None:
    layout._fits.clear()


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
@pytest.mark.parametrize("name", SMALL)
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


class Own(nn.Module):
    """A network of another project, whose code may need the usual format somewhere."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, needs: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(in_channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout))
        self.more, self.classify = nn.Conv2d(16, 16, 3), nn.Linear(16, num_classes)
        self.needs, self.passes = needs, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(self.features(x))
        if self.needs == "view" or self.needs == ("view in training" if self.training else "view in evaluation"):
            x = x.view(len(x), -1).view(x.shape)
        if self.needs == "view backwards":
            x = ViewBackwards.apply(x)  # type: ignore[no-untyped-call]
        if self.needs == "its own draws":
            x = F.dropout(x, 0.5)
        if self.needs == "as_strided":  # of the memory as it is
            x = x.as_strided(x.shape, torch.empty(x.shape).stride())
        return self.classify(x.flatten(2).mean(2))  # type: ignore[no-any-return]


class ViewBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 - ctx.x.view(len(ctx.x), -1).tanh().square()).view(gradient.shape)


NEEDS = ("view", "view in training", "view in evaluation", "view backwards", "its own draws", "as_strided")


def test_auto_is_for_networks_of_other_projects_too() -> None:
    model, data = Own(), images(6, 3, 12, 12)
    client, plain = BNClient(model, data), BNClient(copy.deepcopy(model), data, channels_last=False)
    sent = copied(model.state_dict())
    updates = [each.train_round(sent, {}) for each in (client, plain)]
    assert is_last(model)
    assert not is_last(plain.model)
    for key, value in updates[0].arrays.items():
        assert value.flags.c_contiguous
        np.testing.assert_allclose(value, updates[1].arrays[key], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("needs", NEEDS)
def test_a_network_that_needs_the_usual_format_gets_it(needs: str) -> None:
    """Its results are those without channels last, bit for bit: the trial leaves no trace."""
    first, *clients = (
        BNClient(Own(needs=needs, dropout=0.2), images(6, 3, 12, 12), images(6, 3, 12, 12), channels_last=last)  # type: ignore[arg-type]
        for last in ("auto", "auto", False)
    )
    sent = copied(first.model.state_dict())
    for evaluated_first in (False, True):
        found = []
        for client in clients:
            before = client.evaluate_round(sent, {}) if evaluated_first else {}
            update = client.train_round(sent, {})
            found.append((before, {key: value.tobytes() for key, value in update.arrays.items()}, update.metrics))
            assert not is_last(client.model)
        assert found[0] == found[1]


@pytest.mark.parametrize("given", ["loss", "eval_loss"])
def test_a_loss_that_needs_the_usual_format_gets_it(given: str) -> None:
    def of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.view(len(outputs), -1)[:, :16], targets)

    def usual(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.mean((2, 3)), targets)

    losses = {"loss": usual, "eval_loss": usual}
    for functions, expected in ((losses, True), ({**losses, given: of_pixels}, False)):
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3))
        client = BNClient(model, images(6, 3, 12, 12), images(6, 3, 12, 12), **functions)  # type: ignore[arg-type]
        client.train_round(copied(model.state_dict()), {})
        assert client.evaluate_round(copied(model.state_dict()), {})["loss"] > 0
        assert is_last(model) == expected


def test_a_metric_may_need_the_usual_format() -> None:
    def peak(outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.view(len(outputs), -1).amax())

    data = [(inputs, torch.zeros(len(inputs), 8, 8).long()) for inputs, _ in images(6, 3, 12, 12)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3))
    metrics = BNClient(model, data, data, metrics=[peak]).evaluate_round(copied(model.state_dict()), {})
    assert is_last(model)
    assert metrics["peak"]


def test_the_format_is_decided_before_the_first_pass_of_any_kind() -> None:
    """So that results do not depend on what a worker process did before."""
    for answer in ("evaluate_round", "train_round", "statistics_round"):
        model = Own()
        client = BNClient(model, images(6, 3, 12, 12), images(6, 3, 12, 12))
        getattr(client, answer)(copied(model.state_dict()), {})
        assert is_last(model), answer


def test_one_example_decides_as_many_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(16), nn.Conv2d(16, 10, 1))
    model.append(nn.Flatten())
    data = [(inputs[:1], targets[:1]) for inputs, targets in images(6, 3, 12, 12)]
    BNClient(model, data, data).evaluate_round(copied(model.state_dict()), {})
    assert is_last(model)


def test_a_new_model_for_each_message_is_tried_once() -> None:
    class Counted(Own):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.passes += 1
            return super().forward(x)

    for count, tried in ((2, True), (2, False)):
        Counted.passes, model = 0, Counted()
        client = BNClient(model, images(6, 3, 12, 12), steps=count)
        del model.passes
        client.train_round(copied(model.state_dict()), {})
        assert Counted.passes == count + 3 * tried
        assert is_last(model)


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std((2, 3), keepdim=True) * self.weight


def test_auto_leaves_out_networks_with_layers_that_were_not_measured() -> None:
    assert suits_channels_last(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()))
    assert not suits_channels_last(nn.Sequential(nn.Conv2d(3, 16, 3), OwnNorm()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"model.norm": "in"}, False),
        ({"train.channels_last": False}, False),
        ({"model.name": f"{__name__}:Own"}, True),
    ],
    ids=str,
)
def test_auto_in_an_experiment(changes: dict[str, Any], expected: bool) -> None:
    settings = {"train.channels_last": "auto", **changes}
    experiment = load_experiment("quick", [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    context = Context(run_id=0, node_id=0, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    config = {protocol.RUN: next(iter(experiment.named)), protocol.ROUND: 1}
    client = ClientMaker(experiment)(context, config)
    client.train_round(copied(client.model.state_dict()), config)
    assert is_last(client.model) == expected


def test_a_shared_model_is_laid_out_and_keeps_its_parameters() -> None:
    tensors = ModelTensors(built("cnn"), build=lambda: built("cnn"))
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
