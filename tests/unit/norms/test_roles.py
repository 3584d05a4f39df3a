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
    "instance norm that tracks": lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
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
def test_module_and_state_dict_give_the_same_roles(name: str) -> None:
    model = MODELS[name]()
    of_module, of_state = roles(model), roles(model.state_dict())
    assert of_module == of_state
    assert list(of_module) == list(model.state_dict())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121", "resnet20"])
def test_roles_follow_the_type_of_the_owner(name: str) -> None:
    """The twin: walk the modules by hand."""
    model = MODELS[name]()
    expected = dict.fromkeys(model.state_dict(), Role.WEIGHTS)
    ends = {"weight": Role.AFFINE, "bias": Role.AFFINE, "num_batches_tracked": Role.COUNTER}
    ends |= {"running_mean": Role.STATISTICS, "running_var": Role.STATISTICS}
    layers = 0
    for prefix, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            layers += 1
            expected |= {f"{prefix}.{end}": role for end, role in ends.items()}
    assert layers > 0
    assert roles(model) == expected


def test_downsample_batch_norm_of_resnet18_is_found() -> None:
    found = roles(torchvision.models.resnet18(weights=None))
    assert found["layer2.0.downsample.0.weight"] is Role.WEIGHTS
    assert found["layer2.0.downsample.1.weight"] is Role.AFFINE
    assert found["layer2.0.downsample.1.running_var"] is Role.STATISTICS


@pytest.mark.parametrize(
    ("name", "layers", "missed"),
    [("resnet18", 20, 3), ("mobilenet_v2", 52, 52), ("densenet121", 121, 121), ("vgg16_bn", 13, 13)],
)
def test_names_of_batch_norms_say_little(name: str, layers: int, missed: int) -> None:
    """docs/faq.md says so, and its check, which finds the means and the variances."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    found = roles(model)
    assert sum(role is Role.COUNTER for role in found.values()) == layers
    assert len([key for key, role in found.items() if role == "statistics" and "bn" not in key]) == 2 * missed


def test_resnet20_has_the_paper_s_counts() -> None:
    model = build_model("resnet20", 10)
    found, state = roles(model), model.state_dict()

    def elements(*wanted: Role) -> int:
        return sum(state[key].numel() for key, role in found.items() if role in wanted)

    assert elements(Role.WEIGHTS, Role.AFFINE) == 269_722
    assert elements(Role.STATISTICS) == 1_376
    assert elements(Role.AFFINE) == 1_376
    assert sum(role is Role.COUNTER for role in found.values()) == 19


def test_a_model_that_is_a_batch_norm() -> None:
    assert roles(nn.BatchNorm1d(3)) == {
        "weight": Role.AFFINE,
        "bias": Role.AFFINE,
        "running_mean": Role.STATISTICS,
        "running_var": Role.STATISTICS,
        "num_batches_tracked": Role.COUNTER,
    }


def test_a_layer_under_two_names_has_both() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(3, 3)})
    found = roles(model)
    assert found == roles(model.state_dict())
    for prefix in ("a", "b.0"):
        assert found[f"{prefix}.weight"] is Role.AFFINE
        assert found[f"{prefix}.running_mean"] is Role.STATISTICS
    assert found["c.weight"] is Role.WEIGHTS


def test_gamma_of_group_norm_is_a_weight() -> None:
    found = roles(nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm2d(4)))
    assert found["0.weight"] is Role.WEIGHTS
    assert found["1.bias"] is Role.WEIGHTS
    assert found["2.weight"] is Role.AFFINE


def test_names_do_not_decide() -> None:
    """A linear layer called bn is none, and a batch norm called fc is one."""
    model = nn.ModuleDict({"bn": nn.Linear(2, 2), "fc": nn.BatchNorm1d(2)})
    for found in (roles(model), roles(model.state_dict())):
        assert found["bn.weight"] is Role.WEIGHTS
        assert found["fc.weight"] is Role.AFFINE


def test_a_parameter_of_a_model_that_holds_batch_norms_is_a_weight() -> None:
    """Only the batch norm's own tensors have its roles."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(nn.Linear(2, 2).weight.detach())
            self.norm = nn.BatchNorm1d(2)

    assert roles(Net())["weight"] is Role.WEIGHTS
    assert roles(Net().state_dict())["weight"] is Role.WEIGHTS


def test_of_roles_has_the_entries_of_these_roles_in_their_order() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    of_norm = of_roles(state, {Role.STATISTICS, Role.COUNTER})
    assert list(of_norm) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert all(value is state[key] for key, value in of_norm.items())
    assert list(of_roles(state, {Role.WEIGHTS, Role.AFFINE})) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert of_roles(state, frozenset()) == {}


def test_the_name_of_a_class_does_not_matter() -> None:
    class BetterThanInstanceNorm(nn.BatchNorm2d):
        pass

    class Renamed(nn.InstanceNorm2d):
        pass

    norm = roles(BetterThanInstanceNorm(2, track_running_stats=False))
    assert norm == {"weight": Role.AFFINE, "bias": Role.AFFINE}
    assert set(roles(Renamed(2, affine=True)).values()) == {Role.WEIGHTS}
