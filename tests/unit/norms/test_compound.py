"""Batch norms with more behind them, against timm's layers and against the layers one after the other, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import Role, convert_norm, declare_batch_norm, roles
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.step import LayerwiseStep, exchanged_layers
from fedbn_flwr.norms import compound
from fedbn_flwr.norms.statistics import frozen_norm
from tests.support.cohort import alone
from tests.support.nets import two_norms


class Activated(nn.BatchNorm2d):
    """A layer of a user."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__(channels)
        self.activate, self.drop = nn.PReLU(channels, init=0.1), nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        return self.drop(self.activate(super().forward(input)))  # type: ignore[no-any-return]


class Inherited(Activated):
    """It computes what its parent does."""


class Ghost(nn.BatchNorm2d):
    """Normalises two examples at a time."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(part) for part in input.split(2)])


@pytest.fixture
def declared() -> Iterator[None]:
    before = dict(compound._THEN)
    declare_batch_norm(Activated, "activate", "drop")
    declare_batch_norm(Ghost)
    yield
    compound._THEN.clear()
    compound._THEN.update(before)


def with_norm(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    net = two_norms()
    net[1] = layer.double()
    nn.init.normal_(net[1].weight)
    nn.init.normal_(net[1].bias)
    return net.train()


BATCH = torch.randn(6, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def step_of(net: nn.Module) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    loss = LayerwiseStep(alone)(net, *BATCH, F.cross_entropy)
    return loss, [parameter.grad for parameter in net.parameters()], list(net.buffers())


@pytest.mark.parametrize("layer", [Activated(4), Inherited(4), BatchNormAct2d(4, act_layer=nn.SiLU)])
@pytest.mark.usefixtures("declared")
def test_fedtan_s_step_is_that_of_the_parts_one_after_the_other(layer: nn.Module) -> None:
    net = with_norm(copy.deepcopy(layer))
    twin = copy.deepcopy(net)
    norm = nn.BatchNorm2d(4).double()
    norm.load_state_dict({key: value for key, value in net[1].state_dict().items() if "." not in key})
    twin[1] = nn.Sequential(norm, *twin[1].children())
    expected = F.cross_entropy(twin(BATCH[0]), BATCH[1])
    expected.backward()
    loss, gradients, buffers = step_of(net)
    for found, like in [
        (loss, expected.detach()),
        *zip(gradients, (parameter.grad for parameter in twin.parameters()), strict=True),
        *zip(buffers, twin.buffers(), strict=True),
    ]:
        torch.testing.assert_close(found, like, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("declared")
def test_a_ghost_batch_norm_becomes_one_of_the_whole_batches() -> None:
    ghost = with_norm(Ghost(4))
    for found, like in zip(step_of(ghost)[1], step_of(with_norm(nn.BatchNorm2d(4)))[1], strict=True):
        torch.testing.assert_close(found, like, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(convert_norm(ghost, "none")[1](BATCH[0]), BATCH[0])


def test_group_norm_keeps_the_activation_as_timm_s_group_norm_does() -> None:
    layer = BatchNormAct2d(6, eps=1e-3, act_layer=nn.SiLU, drop_layer=nn.Dropout).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    theirs = GroupNormAct(6, 3, eps=1e-3, act_layer=nn.SiLU, drop_layer=nn.Dropout).double()
    theirs.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x = torch.randn(3, 6, 5, 5, dtype=torch.float64) * 3 + 1
    ours = convert_norm(nn.Sequential(layer), "gn", groups=3)
    for training in (True, False):
        outputs = []
        for net in (ours, theirs):
            torch.manual_seed(0)  # of dropout
            outputs.append(net.train(training)(x))
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert [*ours.state_dict()] == ["0.norm.weight", "0.norm.bias"]
    assert ours[0].drop is layer.drop


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "none", "sbn", "brn", "won", "gn+ws"])
@pytest.mark.usefixtures("declared")
def test_every_norm_keeps_what_follows(kind: str) -> None:
    net = with_norm(Activated(4)).eval()
    plain = copy.deepcopy(net)
    norm = nn.BatchNorm2d(4).double()
    norm.load_state_dict({key: value for key, value in net[1].state_dict().items() if "." not in key})
    plain[1] = nn.Sequential(norm.eval(), net[1].activate)
    found, expected = convert_norm(net, kind), convert_norm(plain, kind)
    assert found(BATCH[0]).equal(expected(BATCH[0]))
    assert not any(module.training for module in found.modules())
    if kind in ("sbn", "brn"):
        assert roles(found)["1.norm.weight"] is Role.AFFINE


def test_dropout_stays_on_where_statistics_are_frozen() -> None:
    net = with_norm(BatchNormAct2d(4, drop_layer=nn.Dropout))
    with frozen_norm(net, frozenset({Role.STATISTICS})):
        assert not net[1].training
        assert net[1].drop.training
    assert net[1].training


def test_a_layer_without_a_declaration_is_named_with_the_way_to_declare_it() -> None:
    advice = r"if it computes batch norm and then some of its modules, declare it \(declare_batch_norm\)"
    net = with_norm(Activated(4))
    with pytest.raises(SettingsError, match=f"'1' is a Activated, whose own arithmetic would be lost; .*; {advice}"):
        exchanged_layers(net)
    with pytest.raises(SettingsError, match=f"1 is a Activated, which computes more than batch norm, .*; {advice}"):
        convert_norm(net, "gn")


@pytest.mark.usefixtures("declared")
def test_a_wrong_declaration_is_an_error() -> None:
    with pytest.raises(SettingsError, match="GroupNorm is no subclass of torch's batch norms; expected one to declare"):
        declare_batch_norm(nn.GroupNorm)
    declare_batch_norm(Activated, "act")
    with pytest.raises(SettingsError, match=r"declared with 'act' after its norm, but .*; it has activate, drop"):
        convert_norm(with_norm(Activated(4)), "gn")
