"""Norms that are not torch's plain batch norm: of other libraries, synchronised, always frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr import BNClient, Role, convert_norm, roles
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.step import exchanged_layers
from fedbn_flwr.norms.statistics import frozen_norm, reestimate


class Theirs(nn.Module):
    """A batch norm of another library: it has the buffers, and no class of torch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=self.training
        )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), Theirs(4), nn.Linear(4, 2))


DATA = [(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 2)]


def test_a_norm_of_another_library_has_the_roles_of_batch_norm_and_freezes() -> None:
    net = model()
    assert {key: role for key, role in roles(net).items() if key.startswith("1.")} == {
        "1.weight": Role.AFFINE, "1.bias": Role.AFFINE,
        "1.running_mean": Role.STATISTICS, "1.running_var": Role.STATISTICS,
    }  # fmt: skip
    with frozen_norm(net, frozenset({Role.STATISTICS})):
        net(DATA[0][0])
    assert not net[1].running_mean.any()
    with frozen_norm(net, frozenset({Role.AFFINE})):
        net(DATA[0][0])
        assert not net[1].weight.requires_grad
    assert net[1].running_mean.any()


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (exchanged_layers, "batch norm over the clients' batches"),
        (lambda model: reestimate(model, DATA, torch.device("cpu")), "a measurement of statistics"),
        (lambda model: convert_norm(model, "gn"), "norm 'gn'"),
    ],
)
def test_what_needs_its_arithmetic_names_layer_and_type(use: Callable[[nn.Module], object], what: str) -> None:
    says = "needs layers of torch.nn.modules.batchnorm, but '1' is a Theirs, and it is unknown which values"
    with pytest.raises(SettingsError, match=f"{what} {says}"):
        use(model())


class Doubled(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("layer", [convert_norm(nn.Sequential(nn.BatchNorm1d(4)), "brn")[0], Doubled(4)])  # type: ignore[index]
def test_an_exchange_refuses_batch_norms_with_arithmetic_of_their_own_unless_they_are_frozen(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(3, 4), layer)
    with pytest.raises(SettingsError, match=f"'1' is a {type(layer).__name__}, whose own arithmetic would be lost"):
        exchanged_layers(net)
    with frozen_norm(net, frozenset({Role.STATISTICS})):
        assert not exchanged_layers(net)


def test_norms_without_statistics_of_a_batch_stay_as_they_are() -> None:
    """An instance norm that tracks statistics, and a batch norm that is always frozen."""
    others = nn.InstanceNorm2d(4, track_running_stats=True), FrozenBatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), *others, nn.BatchNorm2d(4))
    assert [*exchanged_layers(net)] == ["3"]
    found, _ = reestimate(net, [(torch.randn(2, 1, 5, 5), torch.zeros(2))], torch.device("cpu"))
    assert {*found} == {"3.running_mean", "3.running_var"}
    assert [type(layer) for layer in convert_norm(net, "gn")][1:] == [*map(type, others), nn.GroupNorm]


def synchronised() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def test_synchronised_batch_norm_trains_as_batch_norm() -> None:
    client = BNClient(synchronised(), DATA, DATA)
    client.fit(client.get_parameters({}), {})
    assert client.model[1].running_mean.any()
