"""Outputs and gradients for several clients at once are those that autograd finds for each client's plain module."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.client.rule import Loss
from fedbn_flwr.extensions.together.stacked import losses_of
from fedbn_flwr.extensions.together.trace import network_of
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.norms.statistics import frozen_norm

CLIENTS, EXAMPLES = 3, 5


class Branches(nn.Module):
    """A value that several layers use, one that none uses, functions with options, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unused, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.flatten(self.one(inputs), 1)
        self.unused(x)
        y = F.leaky_relu(self.norm(self.other(x)), negative_slope=0.1) * x + torch.relu(x) / 2 - x
        return self.last(1.0 - y * y)  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.layer(inputs))  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """The addition sees the value that the activation has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.layer(inputs)
        return x + F.relu(x, inplace=True)


# The model, and the shape of an example.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3, bias=False)), (6,)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4),
                              nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 3)), (6,)
    ),
    "batch norm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4),
                              nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)), (6,)
    ),
    "batch norm over positions": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), (2, 6)
    ),
    "other layers": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout(0.0),
                              nn.LayerNorm(4), nn.ELU(), nn.Linear(4, 3)), (2, 3)
    ),
    "branches": (Branches, (6,)),
}  # fmt: skip


def clients_of(model: nn.Module) -> list[nn.Module]:
    """Copies with tensors of their own."""
    generator, found = torch.Generator().manual_seed(1), [copy.deepcopy(model).double().train() for _ in range(CLIENTS)]
    for client in found:
        for tensor in (*client.parameters(), *client.buffers()):
            if tensor.is_floating_point():
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return found


@pytest.mark.parametrize("frozen", [frozenset[Role](), frozenset({Role.STATISTICS})], ids=["training", "frozen"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_modules(name: str, frozen: frozenset[Role]) -> None:
    build, shape = MODELS[name]
    models = clients_of(build())
    inputs = torch.randn(CLIENTS, EXAMPLES, *shape, dtype=torch.float64)
    network = network_of(model := copy.deepcopy(models[0]))
    states = [{**client.state_dict(keep_vars=True)} for client in models]
    stacked = {key: torch.stack([state[key].detach() for state in states]) for key in states[0]}
    w = {key: stacked[key].requires_grad_() for key, _ in model.named_parameters()}
    weights = torch.randn(EXAMPLES, 6 if name == "branches" else 3, dtype=torch.float64)
    with frozen_norm(model, frozen):
        outputs = network.computation(stacked)(inputs)
    (outputs * weights).sum().backward()
    assert {key for key in w if w[key].grad is None} == {key for key in w if key.startswith("unused")}
    for place, client in enumerate(models):
        with frozen_norm(client, frozen):
            expected = client(inputs[place])
            (expected * weights).sum().backward()
        torch.testing.assert_close(outputs[place], expected, rtol=1e-12, atol=1e-12)
        for key, value in w.items():
            if value.grad is not None:
                torch.testing.assert_close(value.grad[place], states[place][key].grad, rtol=1e-11, atol=1e-11)
        for key, value in client.state_dict().items():  # running statistics and counters too
            torch.testing.assert_close(stacked[key][place], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ignored", [0, 2, EXAMPLES])
@pytest.mark.parametrize(
    "loss",
    [make_loss("cross_entropy"), make_loss("cross_entropy", label_smoothing=0.1), lambda z, y: z[:, 0].square().mean()],
    ids=["cross entropy", "smoothed", "own"],
)
def test_losses_and_their_gradients(loss: Loss, ignored: int) -> None:
    outputs = (5 * torch.randn(CLIENTS, EXAMPLES, 4, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(4, (CLIENTS, EXAMPLES))
    targets[1, :ignored] = -100
    losses = losses_of(loss, outputs, targets)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    expected = torch.stack([loss(*pair) for pair in zip(outputs, targets, strict=True)])
    expected.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(gradient, outputs.grad, rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice, "'layer' is used more than once"),
        (InPlace, "'relu' changes a value in place that may be used elsewhere"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.ELU(inplace=True)), "changes a value in place"),
    ],
)
def test_networks_whose_gradients_would_be_wrong_train_alone(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        network_of(model())
