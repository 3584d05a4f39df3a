"""The one local loop against a hand-written one, and evaluation against plain arithmetic."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.rule import Batch, ClientRule, Memo, Tensors, add_
from fedbn_flwr.client.training import Trained, Training, backpropagate, local_batches, train
from fedbn_flwr.experiment.parts import cosine_rate, step_rate

CPU = torch.device("cpu")
Data = list[tuple[Tensor, Tensor]]


class Counted:
    """Batches that show their origin: (round, epoch, number)."""

    num_examples = 3

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[int, int, int]]:
        return iter([(server_round, epoch, number) for number in range(self.batches)])


@pytest.mark.parametrize(
    ("data", "epochs", "steps", "taken"),
    [
        (Counted(2), 3, None, [(7, 0, 0), (7, 0, 1), (7, 1, 0), (7, 1, 1), (7, 2, 0), (7, 2, 1)]),
        (Counted(3), None, 7, [(7, 0, 0), (7, 0, 1), (7, 0, 2), (7, 1, 0), (7, 1, 1), (7, 1, 2), (7, 2, 0)]),
        (Counted(3), None, 1, [(7, 0, 0)]),
        (["a", "b"], 2, None, ["a", "b", "a", "b"]),  # a plain iterable restarts
        (["a", "b"], None, 3, ["a", "b", "a"]),
    ],
)
def test_training_takes_so_many_epochs_or_steps_over_epochs(
    data: Any, epochs: int | None, steps: int | None, taken: list[Any]
) -> None:
    assert list(local_batches(data, 7, epochs=epochs, steps=steps)) == taken


@pytest.mark.parametrize(("data", "epochs", "steps"), [([], 1, None), ([], None, 5), (iter(["a", "b"]), None, 5)])
def test_data_without_a_batch_and_an_iterator_that_is_used_up_are_errors(
    data: Any, epochs: int | None, steps: int | None
) -> None:
    """And not a hang."""
    with pytest.raises(ValueError, match="yielded no batch"):
        list(local_batches(data, 1, epochs=epochs, steps=steps))


# --- train -------------------------------------------------------------------


def problem(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    return model, [(torch.randn(size, 5, dtype=dtype), torch.randint(0, 3, (size,))) for size in (6, 6, 4)]


def trained(
    model: nn.Module, data: Iterable[Batch], *rules: ClientRule, lr: float = 0.1, clip: float | None = None, **more: Any
) -> Trained:
    momentum, parameters = more.pop("momentum", 0.0), {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer("sgd", parameters, lr, momentum=momentum, clip=clip)
    for rule in rules:
        rule.local = SimpleNamespace(received=parameters)  # type: ignore[assignment]
    return train(Training(model, lambda: data, optimizer, F.cross_entropy, CPU, rules, **more))


def assert_same(one: nn.Module, two: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)


def test_train_equals_a_loop_of_pytorch_bit_for_bit() -> None:
    """The loss is the mean over the examples of batches of 6, 6 and 4."""
    how = {"momentum": 0.9, "weight_decay": 0.01}
    model, data = problem(torch.float64)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer("sgd", dict(model.named_parameters()), 0.1, **how)
    found = train(Training(model, (data * 2).copy, optimizer, F.cross_entropy, CPU))
    theirs, total = torch.optim.SGD(twin.parameters(), lr=0.1, **how), 0.0
    for inputs, targets in data * 2:
        theirs.zero_grad()
        loss = F.cross_entropy(twin(inputs), targets)
        loss.backward()
        theirs.step()
        total += loss.item() * len(targets)
    assert_same(model, twin)
    assert (found.first_batch, found.steps, found.memos) == (6, 6, [])
    assert found.loss == pytest.approx(total / 32, rel=1e-12)


class Decay(ClientRule):
    """Adds the parameters to their gradients."""

    def __init__(self) -> None:
        pass

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        add_(g, w)


def test_what_does_not_train_or_has_no_gradient_does_not_change() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    net, (_, data) = Net().double(), problem(torch.float64)
    before = copy.deepcopy(net.state_dict())
    trained(net, data, Decay())
    for name, layer in net.named_children():
        for key, value in layer.state_dict(prefix=f"{name}.").items():
            assert value.equal(before[key]) is (name != "used"), key


class Noting(ClientRule):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, w: Tensors) -> Memo:
        self.seen.append(("begin", [*w], float(w["3.bias"].sum())))
        return {"sums": {name: torch.zeros_like(value) for name, value in w.items()}}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        self.seen.append(("adjust", [*g]))
        add_(memo["sums"], g)


def test_rules_begin_between_the_first_gradient_and_the_first_step() -> None:
    """A layer-wise round has its records only then. The result has what they keep: here the move, divided by -lr."""
    model, data = problem(torch.float64)
    nn.init.constant_(model[3].bias, 2.0)
    names, rule, start = [name for name, _ in model.named_parameters()], Noting(), copy.deepcopy(model)

    def first(*given: Any) -> Tensor:
        rule.seen.append("first gradient")
        return backpropagate(*given)

    found = trained(model, data, rule, first_step=first)
    assert rule.seen == ["first gradient", ("begin", names, 6.0), *[("adjust", names)] * 3]
    for name, value in start.named_parameters():
        moved = model.get_parameter(name) + 0.1 * found.memos[0]["sums"][name]
        torch.testing.assert_close(moved, value, rtol=1e-12, atol=1e-14)


def test_rules_begin_in_a_round_without_a_step_too() -> None:
    rule = Noting()
    found = trained(problem()[0], [], rule)
    assert (found.steps, found.first_batch, found.loss) == (0, 0, 0.0)
    assert [name for name, *_ in rule.seen] == ["begin"]
    assert found.memos[0]["sums"]["3.bias"].equal(torch.zeros(3))
    rule.begin = lambda w: None  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(TypeError, match=r"Noting\.begin returned None; expected a dict, which may be empty"):
        trained(problem()[0], [], rule)


def test_gradients_are_clipped_after_the_rules() -> None:
    """A rule that multiplies by 1000, one step of rate 1: the model moves by the largest norm."""

    class Scaled(ClientRule):
        def __init__(self) -> None:
            pass

        def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
            add_(g, g, alpha=999.0)

    model, data = problem(torch.float64)
    start = copy.deepcopy(model)
    trained(model, data[:1], Scaled(), lr=1.0, clip=0.25)
    moves = [(p - q).square().sum() for p, q in zip(model.parameters(), start.parameters(), strict=True)]
    assert float(torch.stack(moves).sum().sqrt().detach()) == pytest.approx(0.25, rel=1e-6)


# --- schedules ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "lr", "milestones", "gamma", "expected"),
    [
        (100, 1.0, (0.5, 0.75), 0.1, {1: 1.0, 50: 1.0, 51: 0.1, 75: 0.1, 76: 0.01, 100: 0.01}),  # shares
        (10, 1.0, (1,), 0.5, {1: 1.0, 2: 0.5, 10: 0.5}),  # rounds
        (10, 2.0, (6, 8), 0.5, {6: 2.0, 7: 1.0, 8: 1.0, 9: 0.5}),
        (10, 0.3, (), 0.1, dict.fromkeys(range(1, 11), 0.3)),
    ],
)
def test_a_step_schedule_falls_after_its_milestones(
    rounds: int, lr: float, milestones: Any, gamma: float, expected: dict[int, float]
) -> None:
    """Half and three quarters of 100 rounds: rounds 50 and 75 are the last at each rate."""
    found = {number: step_rate(number, rounds, lr, milestones, gamma=gamma) for number in expected}
    assert found == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("milestone", [0.07, 0.14, 0.28, 0.29, 0.55, 0.56, 0.57, 0.58])
def test_a_fraction_of_a_hundred_rounds_is_the_round_it_names(milestone: float) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point, and 0.07 * 100 is 7.000000000000001."""
    last = round(milestone * 100)
    assert [step_rate(each, 100, 1.0, (milestone,), gamma=0.5) for each in (last, last + 1)] == [1.0, 0.5]


def test_cosine_schedule_begins_at_lr_and_would_end_at_zero() -> None:
    rates = [cosine_rate(server_round, 10, 0.4) for server_round in range(1, 12)]
    assert rates[0] == 0.4
    assert rates[5] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(0.2 * (1 + math.cos(math.pi * 0.9)))
    assert rates.pop() == pytest.approx(0.0, abs=1e-15)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_equals_plain_computation_and_changes_nothing(training: bool) -> None:
    model, data = problem(torch.float64)
    before = copy.deepcopy(model.train(training))
    found = evaluate(model, data, F.cross_entropy, CPU)
    assert model.training is training
    assert_same(model, before)
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    logits = before.eval()(inputs).detach()
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-13)
    assert found["accuracy"] == (logits.argmax(1) == targets).double().mean().item()
    assert (found["num-examples"], type(found["num-examples"])) == (16, int)


# --- bfloat16 ----------------------------------------------------------------


def test_bfloat16_is_only_for_passes() -> None:
    """Convolutions and products compute in it; parameters, gradients, statistics and momentum stay float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    batch = torch.randn(16, 3, 8, 8), torch.arange(16) % 5
    seen: dict[str, torch.dtype] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output.dtype}))

    def gradients(precision: torch.dtype | None) -> Tensor:
        each = copy.deepcopy(model)
        optimizer = make_optimizer("sgd", dict(each.named_parameters()), 0.1, momentum=0.9)
        passes = partial(backpropagate, precision=precision)
        found = train(Training(each, [batch].copy, optimizer, F.cross_entropy, CPU, gradient=passes))
        assert math.isfinite(found.loss)
        tensors = [*each.state_dict().values(), *optimizer.state().values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}
        assert not each[1].running_mean.equal(model[1].running_mean)
        return torch.cat([tensor.flatten() for tensor in optimizer.state().values()])

    exact = gradients(None)
    assert set(seen.values()) == {torch.float32}
    rounded = gradients(torch.bfloat16)
    assert (seen["0"], seen["4"]) == (torch.bfloat16, torch.bfloat16)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.1
    evaluate(model, [batch], F.cross_entropy, CPU)
    assert set(seen.values()) == {torch.float32}
