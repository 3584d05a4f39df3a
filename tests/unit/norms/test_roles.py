"""Roles come from the modules; the server, which has none, finds the same ones in the state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import prune

from fedbn_flwr import Role, build_model
from fedbn_flwr.norms.roles import of_roles, roles


class Holding(nn.Module):
    """A batch norm, and a parameter that has the name of one of its."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.zeros(2)), nn.BatchNorm1d(2)


class BetterThanInstanceNorm(nn.BatchNorm2d):
    pass


class BatchNormAlike(nn.InstanceNorm2d):
    pass


def under_two_names() -> nn.Module:
    shared = nn.BatchNorm1d(3)
    return nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(3, 3)})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: build_model("cnn", 10),
    "resnet20": lambda: build_model("resnet20", 10),
    "resnet18": lambda: torchvision.models.resnet18(weights=None),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(weights=None),
    "densenet121": lambda: torchvision.models.densenet121(weights=None),
    "mlp with BatchNorm1d": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
    "a batch norm by itself": lambda: nn.BatchNorm2d(3),
    "group norm": lambda: build_model("resnet20", 10, "gn"),
    "no affine": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False)),
    "group and layer norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm2d(4)),
    "names that mislead": lambda: nn.ModuleDict({"bn": nn.Linear(2, 2), "fc": nn.BatchNorm1d(2)}),
    "a class that misleads": lambda: nn.Sequential(BetterThanInstanceNorm(2), BatchNormAlike(2, affine=True)),
    "a parameter beside": Holding,
    "under two names": under_two_names,
}


class Doubled(nn.Module):
    """A parametrisation with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def parametrised(module: Any, *names: str) -> Any:
    for name in names:
        nn.utils.parametrize.register_parametrization(module, name, Doubled())
    return module


@pytest.mark.parametrize(
    "compute",
    [
        lambda norm: parametrised(norm, "weight", "bias"),
        lambda norm: nn.utils.parametrizations.weight_norm(norm, "weight"),
        lambda norm: prune.l1_unstructured(norm, "weight", 1),
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        lambda norm: nn.Sequential(parametrised(norm, "weight")),
    ],
)
def test_what_computes_gamma_and_beta_is_affine(compute: Callable[[nn.Module], nn.Module]) -> None:
    """A convolution's weights that are computed in the same way stay weights."""
    model = nn.Sequential(parametrised(nn.Conv1d(2, 3, 1), "weight"), compute(nn.BatchNorm1d(3)), nn.PReLU())
    tracked = {"running_mean": Role.STATISTICS, "running_var": Role.STATISTICS, "num_batches_tracked": Role.COUNTER}
    state = model.state_dict()
    expected = {
        key: tracked.get(key.rpartition(".")[2], Role.AFFINE) if key.startswith("1.") else Role.WEIGHTS for key in state
    }
    assert roles(model) == roles(state) == expected
    assert {"1.weight", "1.bias"} - {*state}, "at least one of them is computed"


def test_a_module_inside_a_batch_norm_has_weights() -> None:
    class WithActivation(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(3)
            self.act = nn.PReLU()

    assert roles(WithActivation())["act.weight"] is Role.WEIGHTS
    inside = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.BatchNorm1d(3))
    assert roles(inside)["parametrizations.weight.0.running_mean"] is Role.STATISTICS
    assert roles(inside)["parametrizations.weight.original"] is Role.WEIGHTS


@pytest.mark.parametrize("name", MODELS)
def test_roles_follow_the_type_of_the_owner_and_the_server_finds_them_in_the_state_dict(name: str) -> None:
    """The twin: walk the modules by hand."""
    model = MODELS[name]()
    expected = dict.fromkeys(model.state_dict(), Role.WEIGHTS)
    ends = {"weight": Role.AFFINE, "bias": Role.AFFINE, "num_batches_tracked": Role.COUNTER}
    ends |= {"running_mean": Role.STATISTICS, "running_var": Role.STATISTICS}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            expected |= {key: role for end, role in ends.items() if (key := f"{prefix}.{end}".lstrip(".")) in expected}
    assert (Role.STATISTICS in expected.values()) == (name != "group norm")
    assert [*roles(model).items()] == [*roles(model.state_dict()).items()] == [*expected.items()]


def test_of_roles_has_the_entries_of_these_roles_in_their_order() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    of_norm = of_roles(state, {Role.STATISTICS, Role.COUNTER})
    assert list(of_norm) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert all(value is state[key] for key, value in of_norm.items())
    assert list(of_roles(state, {Role.WEIGHTS, Role.AFFINE})) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert of_roles(state, frozenset()) == {}
