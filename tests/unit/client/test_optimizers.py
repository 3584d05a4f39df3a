"""Optimisers by name: the steps of torch.optim, options, and state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr import BNClient
from fedbn_flwr.client.optimizers import LocalOptimizer, OptimizerSpec, make_optimizer
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.prepare import check_optimizer
from tests.support.command import ROOT, python


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def steps(model: nn.Module, optimizer: LocalOptimizer | torch.optim.Optimizer, numbers: range) -> None:
    """Some steps on batches that depend on the number of the step; a parameter has no gradient in steps 0 and 3."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 7, generator=generator, dtype=model[0].weight.dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if number in (0, 3):
            model[0].bias.grad = None
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """In another order than the model's parameters, whose shapes are alike."""
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[2:]}, {"params": parameters[:2]}], lr=lr, momentum=0.9)


CASES: list[tuple[OptimizerSpec, dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", {}, torch.optim.SGD, {}),
    ("sgd", {"weight_decay": 0.01}, torch.optim.SGD, {"weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    ("adam", {}, torch.optim.Adam, {}),
    ({"name": "Adam", "betas": [0.8, 0.95], "eps": 1e-3}, {"weight_decay": 0.1}, torch.optim.Adam,
     {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ({"name": "adam", "amsgrad": True}, {}, torch.optim.Adam, {"amsgrad": True}),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("AdamW", {"weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ({"name": "sgd", "nesterov": True}, {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ({"name": "sgd", "dampening": 0.3}, {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD,
     {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ({"name": "rmsprop", "alpha": 0.9}, {"momentum": 0.5}, torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5}),
    (torch.optim.NAdam, {"weight_decay": 0.1}, torch.optim.NAdam, {"weight_decay": 0.1}),
    (functools.partial(torch.optim.RAdam, eps=1e-3), {}, torch.optim.RAdam, {"eps": 1e-3}),
    ({"name": "torch.optim:Adagrad", "lr_decay": 0.1}, {}, torch.optim.Adagrad, {"lr_decay": 0.1}),
    (grouped, {}, grouped, {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("spec", "settings", "cls", "options"), CASES)
def test_steps_are_those_of_torch(
    spec: OptimizerSpec,
    settings: dict[str, Any],
    cls: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    ours, theirs = network(dtype), network(dtype)
    steps(ours, make_optimizer(spec, dict(ours.named_parameters()), 0.05, **settings), range(6))
    steps(theirs, cls(theirs.parameters(), lr=0.05, **options), range(6))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("spec", "settings"), [case[:2] for case in CASES])
def test_a_saved_state_continues_the_steps(spec: OptimizerSpec, settings: dict[str, Any]) -> None:
    """Through NumPy, as a client's state is saved."""
    whole, parts = network(), network()
    steps(whole, make_optimizer(spec, dict(whole.named_parameters()), 0.05, **settings), range(6))
    first = make_optimizer(spec, dict(parts.named_parameters()), 0.05, **settings)
    steps(parts, first, range(2))
    saved = {key: value.numpy().copy() for key, value in first.state().items()}
    second = make_optimizer(spec, dict(parts.named_parameters()), 0.05, **settings)
    second.load_state(saved)
    steps(parts, second, range(2, 6))
    assert_same(parts, whole)
    again = network()
    steps(again, make_optimizer(spec, dict(again.named_parameters()), 0.05, **settings), range(2))
    steps(again, make_optimizer(spec, dict(again.named_parameters()), 0.05, **settings), range(2, 6))
    assert bool(saved) is not torch.equal(again[0].weight, whole[0].weight), "without its state it takes other steps"


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("adan", {}, r"optimizer is 'adan'; did you mean 'adam'\? known: .*rmsprop.*, or module:name"),
        ({"name": "adamw", "beta": 0.9}, {}, "optimizer adamw with .*'beta'; its arguments are params, lr, betas"),
        ({"name": "sgd", "lr": 0.1}, {}, r"lr is not an option of sgd; it is a key of its own"),
        ({"name": "adam", "betas": [0.9, 1.5]}, {}, "Invalid beta parameter at index 1: 1.5"),
        ({"name": "adam", "betas": [0.9]}, {}, r"optimizer adam with {'betas': \(0.9,\)}: "),
        ({"name": "RMSprop", "alpha": -1}, {}, "optimizer RMSprop with {'alpha': -1}: Invalid alpha value: -1"),
        ({"name": "sgd", "nesterov": True}, {}, r"{'nesterov': True}: Nesterov momentum requires a momentum"),
        ("adam", {"momentum": 0.9}, "momentum is 0.9, but the optimizer adam has none; leave it out, or set it to 0"),
        ("SparseAdam", {"weight_decay": 0.1}, "weight_decay is 0.1, but the optimizer SparseAdam has none"),
        ("SparseAdam", {}, "optimizer 'SparseAdam' cannot take a step: RuntimeError: SparseAdam does"),
        ("LBFGS", {}, "optimizer 'LBFGS' cannot take a step: TypeError: .* argument: 'closure'"),
        ("builtins:dict", {}, "optimizer builtins:dict"),
    ],
)  # fmt: skip
def test_what_cannot_train_is_refused(spec: OptimizerSpec, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_optimizer(spec, dict(network().named_parameters()), **options)


def test_zero_is_no_setting_for_an_optimiser_without_it() -> None:
    """As `train.momentum=0` on the command line, for an experiment that sets one."""
    parameters = dict(network().named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    check_optimizer("adamw", parameters, momentum=0.0)
    make_optimizer("SparseAdam", parameters, 0.1, weight_decay=0.0)
    assert all(value.equal(before[name]) and value.grad is None for name, value in parameters.items()), "only a check"


class Counting(torch.optim.Optimizer):
    """Its state is a plain number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_a_state_of_numbers_is_saved_too() -> None:
    model = network()
    saved: dict[str, np.ndarray] = {}
    for total in (2, 4):
        optimizer = make_optimizer(Counting, dict(model.named_parameters()), 0.1)
        optimizer.load_state(saved)
        steps(model, optimizer, range(2))
        saved = {key: value.numpy().copy() for key, value in optimizer.state().items()}
        assert {int(value) for value in saved.values()} == {total}


# --- in a client -------------------------------------------------------------

DATA = [
    (inputs, torch.arange(6) % 3)
    for inputs in torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(1)).double()
]


def trained(rounds: int, **options: Any) -> list[np.ndarray]:
    """The parameters of a client after some rounds of two batches each."""
    client = BNClient(network(torch.float64), DATA, lr=0.05, **options)
    parameters = client.get_parameters({})
    for number in range(1, rounds + 1):
        parameters, _, _ = client.fit(parameters, {"server-round": number})
    return parameters


def by_hand(rounds: int, make: Callable[..., torch.optim.Optimizer], *, clip: float | None = None) -> nn.Module:
    model = network(torch.float64).train()
    optimizer = make(model.parameters(), lr=0.05)
    for inputs, targets in DATA * rounds:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if clip is not None:
            norm = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, clip / float(norm))
        optimizer.step()
    return model


@pytest.mark.parametrize(("spec", "make"), [("adamw", torch.optim.AdamW), (torch.optim.RMSprop, torch.optim.RMSprop)])
def test_a_client_that_keeps_its_state_takes_the_steps_of_one_long_run(spec: Any, make: Any) -> None:
    expected = [value.numpy() for key, value in by_hand(3, make).state_dict().items() if "num_batches" not in key]
    kept, fresh = trained(3, optimizer=spec, keep_momentum=True), trained(3, optimizer=spec)
    for found, value in zip(kept, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-10, atol=1e-12)
    assert np.abs(fresh[0] - expected[0]).max() > 1e-3


def test_clipping_limits_the_norm_over_all_parameters() -> None:
    expected = by_hand(2, torch.optim.SGD, clip=0.05)
    np.testing.assert_allclose(trained(2, clip=0.05)[0], expected[0].weight.detach().numpy(), atol=1e-7)
    np.testing.assert_array_equal(trained(2, clip=1e6)[0], trained(2)[0])
    assert np.abs(trained(2, clip=0.05)[0] - trained(2)[0]).max() > 1e-3


@pytest.mark.slow
def test_a_step_of_sgd_does_not_import_the_compiler() -> None:
    program = """
import sys
import torch
from fedbn_flwr import BNClient
batch = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
client = BNClient(torch.nn.Linear(2, 2), [batch], momentum=0.9, clip=1.0, keep_momentum=True)
for _ in range(2):  # the second round begins with the state of the first
    client.fit([torch.ones(2, 2).numpy(), torch.ones(2).numpy()], {})
sys.exit("torch._dynamo" in sys.modules)
"""
    python(program, cwd=ROOT).check_returncode()
