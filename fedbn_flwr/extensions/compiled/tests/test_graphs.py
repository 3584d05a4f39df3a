"""Which networks can be recorded: what these checks find, a recording would repeat or leave out in each step."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import convert_norm
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.client.training import backpropagate
from fedbn_flwr.extensions.compiled import graphs
from fedbn_flwr.extensions.compiled.graphs import check_recordable, recorded, run_twice, state_of
from fedbn_flwr.models.build import build_model


class Acting(nn.Module):
    """A network that calls `act` in each pass."""

    def __init__(self, act: Callable[[Acting], Any]) -> None:
        super().__init__()
        self.body, self.act, self.is_second = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), act, False
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.act(self)
        logits: torch.Tensor = self.body(images) - self.mean
        return logits


def two_passes(model: nn.Module, side: int = 2) -> None:
    run_twice(backpropagate, model, torch.randn(4, 3, side, side), torch.tensor([0, 1, 2, 0]), F.cross_entropy)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda net: setattr(net, "is_second", not net.is_second), "changes an attribute"),
        (lambda net: setattr(net, "mean", net.mean + 1), "assigns a buffer"),
        (lambda net: torch.rand(1), "draws random numbers"),
        (lambda net: random.random(), "draws random numbers"),
    ],
)
def test_what_acts_in_python_is_refused(act: Callable[[Acting], Any], words: str) -> None:
    model = Acting(act)
    with pytest.raises(NotImplementedError, match=words):
        two_passes(model)
    assert not model.is_second
    assert not model.mean.any()


@pytest.mark.parametrize("norm", ["bn", "gn", "fixup", "won", "brn"])
def test_trials_of_our_networks_leave_no_trace(norm: str) -> None:
    model = build_model("resnet20", 10, norm)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_recordable(model)
    two_passes(model, 16)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_with_a_state_are_refused() -> None:
    seen: list[Any] = []
    for register in (
        lambda net: net.body.register_forward_hook(lambda *given: seen.append(given)),
        lambda net: net.body.register_forward_pre_hook(functools.partial(print, 1)),
        lambda net: net.body[1].weight.register_hook(seen.append),
    ):
        model = Acting(lambda net: None)
        check_recordable(model)
        register(model)
        with pytest.raises(NotImplementedError, match="hook with a state"):
            check_recordable(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[2].eval(),
        lambda net: setattr(net[2], "momentum", 0.5),
        lambda net: net[1].weight.requires_grad_(False),
        lambda net: setattr(net[1], "weight", nn.Parameter(net[1].weight.clone())),
        lambda net: net[2].register_forward_hook(print),
    ],
)
def test_a_recording_is_of_one_state_of_the_layers(change: Callable[[nn.Sequential], Any]) -> None:
    model = convert_norm(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8)), "bn")
    before = state_of(model)
    assert state_of(model) == before
    change(model)
    assert state_of(model) != before


def test_a_failed_recording_is_not_tried_again_and_keeps_no_model() -> None:
    made = []

    def use(model: nn.Module) -> None:
        made.append(weakref.ref(model))
        model.register_forward_hook(functools.partial(print, model))  # has a state
        for _ in range(3):
            with pytest.raises(RuntimeError, match="hook with a state"):
                recorded(functools.partial(backpropagate), model, torch.ones(2, 3), torch.ones(2), F.mse_loss)
        assert len(graphs._recordings[model]) == 1

    use(nn.Linear(3, 1))
    gc.collect()
    assert made[0]() is None


def test_clients_share_recordings_which_end_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        """Instead of a recording, which needs a GPU."""

        def __init__(self, *given: Any) -> None:
            made.append(weakref.ref(self))

    made: list[weakref.ref[Kept]] = []
    monkeypatch.setattr(graphs, "Recording", Kept)
    images, targets = torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])

    def use(model: nn.Sequential) -> None:
        def record(loss: Any, precision: torch.dtype | None = None) -> object:
            return recorded(functools.partial(backpropagate, precision=precision), model, images, targets, loss)

        one = record(make_loss("cross_entropy", label_smoothing=0.1))
        assert record(make_loss("cross_entropy", label_smoothing=0.1)) is one
        others = [record(make_loss("cross_entropy", label_smoothing=0.2)), record(F.cross_entropy)]
        others += [record(F.cross_entropy, torch.bfloat16), record(functools.partial(print, sep=[]))]
        for number in range(9):
            model[2].momentum = number / 10
            record(lambda outputs, targets: model and F.cross_entropy(outputs, targets))
        assert len(made) == 5 + 9
        assert len(graphs._recordings[model]) == 8

    use(nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.BatchNorm1d(3)))
    gc.collect()
    assert not [each for each in made if each()]
