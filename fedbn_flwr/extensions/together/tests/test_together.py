"""Clients that train together have the results of clients that train one after the other."""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import client_app, run
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.rule import ClientRule, Key, Memo, Tensors
from fedbn_flwr.client.training import Trained, Training, train
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.extensions.identity import drawn
from fedbn_flwr.extensions.together import parked
from fedbn_flwr.extensions.together.groups import Row, row_of, train_rows
from fedbn_flwr.extensions.together.parked import TogetherPool
from fedbn_flwr.extensions.together.trace import network_of
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.models.tensors import ModelTensors, copied
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedNova,
    FedProx,
    FedTAN,
    FedWon,
    FixBN,
    GlobalMomentum,
    Round,
    Scaffold,
    SiloBN,
    Standalone,
    Wrapper,
)
from fedbn_flwr.strategies.fedprox import FedProxClient  # type: ignore[import-untyped]
from tests.support.federations import models_of, near, same
from tests.support.fixtures import small_net

Federations = Callable[..., Any]


def mlp(norm: Callable[[int], nn.Module] | None = nn.BatchNorm1d) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 3)]
    if norm is not None:
        layers.insert(2, norm(12))
    return nn.Sequential(*layers)


class Branching(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


class Averaging(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(0, keepdim=True)


class Impure(nn.Module):
    """What forward does in Python happens once in a trace, but in each pass of the module."""

    def __init__(self, drawn: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.drawn, self.passes, self.layer = drawn, 0, nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1)) * (1 + self.drawn(self))  # type: ignore[no-any-return]


def counted(model: nn.Module) -> float:
    model.passes += 1
    return float(model.passes)


IMPURE: dict[str, Callable[[], nn.Module]] = {
    "python": lambda: Impure(lambda _: random.random()),
    "numpy": lambda: Impure(lambda _: float(np.random.rand())),
    "torch": lambda: Impure(lambda _: torch.rand(1).item()),
    "counting": lambda: Impure(counted),
}


def with_one_model(fed: Any) -> ClientApp:
    """Clients that share one model, as in an experiment."""
    shared = ModelTensors(copy.deepcopy(fed.model))
    options = {"lr": 0.1, **fed.options}

    def make_client(context: Any) -> BNClient:
        return BNClient(shared, fed.data[int(context.node_config["partition-id"])], context=context, **options)

    return client_app(make_client)


def tied(build: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter) -> nn.Module:
    """Two layers with one weight."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[4].weight = build(model[2].weight)
    return model


def doubling(place: int | None) -> nn.Module:
    """A module whose object has a forward of its own."""
    model = mlp()
    module = model if place is None else model[place]
    module.forward = MethodType(lambda self, inputs: 2 * type(self).forward(self, inputs), module)
    return model


NETWORKS = {
    "none": partial(mlp, None),
    "batch norm": mlp,
    "batch norm without affine and statistics": lambda: mlp(
        lambda n: nn.BatchNorm1d(n, affine=False, track_running_stats=False)
    ),
    "layer norm": partial(mlp, nn.LayerNorm),
    "group norm": lambda: mlp(lambda n: nn.GroupNorm(3, n)),
}
Groups = list[tuple[int, int]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """The numbers of clients that have trained at once, and of their kinds."""
    found: Groups = []

    def noted(rows: Sequence[Row]) -> None:
        train_rows(rows)
        if rows:  # not of a query
            found.append((sum(row.trained is not None for row in rows), len({row.kind for row in rows})))

    monkeypatch.setattr(parked, "train_rows", noted)
    return found


def both(
    fed: Any,
    make: Callable[[], Any],
    rounds: int = 2,
    *,
    most: int = 3,
    app: Callable[[], ClientApp] | None = None,
    rtol: float = 1e-10,
    atol: float = 1e-12,
) -> list[Arrays]:
    """The models of clients that train at once, which are those of clients that train one after the other."""
    apps = [fed.app() if app is None else app() for _ in range(2)]
    expected = models_of(fed, make(), rounds, apps[0])
    found = models_of(fed, make(), rounds, grid=fed.grid(apps[1], pool=partial(TogetherPool, most=most)))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        near(mine, theirs, rtol=rtol, atol=atol)
    return found


def rounds(
    model: nn.Module, sizes: tuple[int, ...] = (8, 13, 8, 5), *, epochs: int = 2, batch: int = 4, **options: Any
) -> list[Training]:
    """A round of each client with a copy of the model, and last batches of any size above one."""
    found = []
    for client, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(size, 2, 4, 4, generator=generator, dtype=torch.float64) * (1 + client) + client
        targets = options.get("type", Tensor.long)(torch.randint(3, (size,), generator=generator))
        batches = [pair for pair in zip(inputs.split(batch), targets.split(batch), strict=True) if len(pair[0]) > 1]
        if client == options.get("ignoring"):  # of five examples
            batches = [(x, y.where(torch.arange(len(y)) % 2 == 0, -100)) for x, y in batches]
        own = copy.deepcopy(model).double().train()
        loss = options.get("loss", make_loss("cross_entropy"))
        given = {name: options[name] for name in ("momentum", "weight_decay", "clip") if name in options}
        optimizer = make_optimizer(options.get("optimizer", "sgd"), dict(own.named_parameters()), 0.1, **given)
        found.append(Training(own, (batches * epochs).copy, optimizer, loss, torch.device("cpu")))
    return found


def together(rounds: Sequence[Training]) -> list[Trained]:
    """Train rounds that each have their own model; rounds of one kind train at once."""
    rows = [kinds([training]) for training in rounds]
    train_rows([*itertools.chain(*rows)])
    return [row[0].finished() if row else train(training) for training, row in zip(rounds, rows, strict=True)]


def values(training: Training) -> dict[str, Tensor]:
    return dict(training.model.state_dict())


def check(ours: list[Training], apart: list[Training]) -> None:
    found, expected = together(ours), [train(training) for training in apart]
    for mine, one, a, b in zip(ours, apart, found, expected, strict=True):
        torch.testing.assert_close(values(mine), values(one), rtol=1e-10, atol=1e-11)
        assert a.loss == pytest.approx(b.loss, rel=1e-11)
        assert (a.steps, a.first_batch) == (b.steps, b.first_batch)
        torch.testing.assert_close(dict(mine.optimizer.state()), dict(one.optimizer.state()), rtol=1e-10, atol=1e-11)


def kinds(trainings: Sequence[Training]) -> list[Row]:
    found = []
    for training in trainings:
        with suppress(NotImplementedError):
            found.append(row_of(training))
    return found


@pytest.mark.parametrize(
    ("network", "options"),
    [
        *((name, {}) for name in NETWORKS),
        ("batch norm", {"momentum": 0.9}),
        ("batch norm", {"momentum": 0.9, "weight_decay": 1e-2}),
        ("batch norm", {"optimizer": {"name": "sgd", "nesterov": True}, "momentum": 0.5}),
        ("batch norm", {"clip": 0.3}),
        ("batch norm", {"loss": make_loss("cross_entropy", label_smoothing=0.1)}),
        ("batch norm", {"sizes": (4, 41, 2, 17, 3), "epochs": 3}),  # one batch or many
        ("batch norm", {"ignoring": 3}),
        ("batch norm", {"type": Tensor.byte}),
    ],
)
def test_rounds_train_as_one_after_the_other(network: str, options: dict[str, Any]) -> None:
    model = NETWORKS[network]()
    ours = rounds(model, **options)
    assert len({row.kind for row in kinds(rounds(model, **options))}) == 1
    check(ours, rounds(model, **options))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def test_the_order_of_the_clients_does_not_matter() -> None:
    model = mlp()
    forward, backward = rounds(model), rounds(model)[::-1]
    together(forward)
    together(backward)
    for one, other in zip(forward, backward[::-1], strict=True):
        torch.testing.assert_close(values(one), values(other), rtol=0, atol=0)


def test_nan_stays_with_its_client() -> None:
    model = mlp()
    ours, apart = rounds(model), rounds(model)
    for training in (ours[1], apart[1]):
        next(iter(training.batches()))[0].fill_(torch.nan)
    for training in apart:
        train(training)
    together(ours)
    assert values(ours[1])["1.weight"].isnan().all()
    for place in (0, 2, 3):
        torch.testing.assert_close(values(ours[place]), values(apart[place]), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (small_net, "'0' is Conv2d("),
        (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), "'1' is Dropout(p=0.5, inplace=False)"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 3)),
            "'1' is BatchNorm1d(32, eps=1e-05, momentum=None",
        ),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 3)), "parametriz"),
        (Branching, "control flow"),
        (Averaging, "its forward has mean"),
        (tied, "'2.weight' and '4.weight' are the same tensor"),
        (lambda: tied(lambda parameter: nn.Parameter(parameter.data)), "'2.weight' and '4.weight' are the same tensor"),
        (lambda: doubling(1), "'1' has a forward of its own"),
        (lambda: doubling(None), "'the model' has a forward of its own"),
    ],
    ids=["convolution", "dropout", "cumulative mean", "parametrisation", "control flow", "mean", "tied", "one memory",
         "own forward", "own forward of the model"],
)  # fmt: skip
def test_other_networks_train_alone(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        network_of(model())


@pytest.mark.parametrize("name", IMPURE)
def test_networks_that_draw_or_count_train_alone(name: str) -> None:
    model = IMPURE[name]()
    before = drawn()
    with pytest.raises(NotImplementedError, match="its forward draws random numbers, or changes the model"):
        network_of(model)
    assert (model.passes, drawn()) == (0, before)


@pytest.mark.parametrize("model", [tied, *IMPURE.values(), lambda: doubling(1)], ids=["tied", *IMPURE, "own forward"])
def test_such_networks_train_as_one_after_the_other(model: Callable[[], nn.Module], federation: Federations) -> None:
    fed = federation((8, 12, 11), batches=3, model=model, dtype=torch.float64, lr=0.05, epochs=2)
    both(fed, FedAvg, app=partial(with_one_model, fed), rtol=0, atol=0)


class DrawingClient(ClientRule):
    """A rule that draws random numbers in the hook that its key names."""

    keys: ClassVar[dict[str, Key]] = {"test.drawing": Key("string", "a test's key")}

    def begin(self, w: Tensors) -> Memo:
        in_begin = self.local.config["test.drawing"] == "begin"
        return {"noise": {name: torch.randn_like(each) for name, each in w.items()}} if in_begin else {}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        for name, gradient in g.items():
            if self.local.config["test.drawing"] == "adjust":
                gradient.add_(random.random() + torch.randn_like(gradient))
            elif "noise" in memo:
                gradient.add_(memo["noise"][name])


class Drawing(Wrapper):
    def __init__(self, strategy: Any, hook: str) -> None:
        super().__init__(strategy)
        self.hook = hook

    def config(self, round: Round) -> Config:
        return {"test.drawing": self.hook}


def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.randn_like(outputs), targets)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: Drawing(FedAvg(), "begin"), None),
        (lambda: Drawing(FedAvg(), "adjust"), None),
        (lambda: Drawing(FedTAN(min_batch=1), "begin"), None),
        (lambda: Drawing(FedTAN(min_batch=1), "adjust"), None),
        (FedAvg, noisy),
    ],
    ids=["begin", "adjust", "begin in FedTAN", "adjust in FedTAN", "loss"],
)
def test_clients_that_draw_random_numbers_in_training_do_so_alone(
    make: Callable[[], Any], loss: Any, federation: Federations
) -> None:
    fed, after = federation((12, 8, 8), model=mlp, dtype=torch.float64, loss=loss), []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        both(fed, make)
        after.append((random.random(), torch.rand(1).item()))
    assert after[0] != after[1]


@pytest.mark.parametrize("hook", ["adjust", "none"])
def test_clients_that_train_alone_draw_what_they_draw_alone(hook: str, federation: Federations) -> None:
    """A loader that shuffles draws between the draws of a rule, and in the round after those of the loss."""
    fed = federation((12, 8, 8), model=mlp, loss=noisy if hook == "none" else None, epochs=2)
    data = [TensorDataset(*map(torch.cat, zip(*own.batches, strict=True))) for own in fed.data]

    def make_client(context: Any) -> BNClient:
        own = DataLoader(data[int(context.node_config["partition-id"])], batch_size=4, shuffle=True)
        return BNClient(copy.deepcopy(fed.model), own, context=context, **fed.options)

    both(fed, lambda: Drawing(FedAvg(), hook), app=partial(client_app, make_client), rtol=0, atol=0)


class FirstGradientClient(ClientRule):
    """Adds the gradient of the first batch to each later one, and counts its steps."""

    keys: ClassVar[dict[str, Key]] = {"test.first-gradient": Key("true", "a test's key")}

    def begin(self, w: Tensors) -> Memo:
        self.steps = 0
        mean = self.local.model.state_dict()["2.running_mean"]
        return {"first": {name: parameter.grad.clone() + mean.sum() for name, parameter in w.items()}}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        self.steps += 1
        for name, gradient in g.items():
            gradient.add_(memo["first"][name], alpha=self.steps)


@pytest.mark.parametrize("base", [FedAvg, partial(FedTAN, min_batch=1)], ids=["FedAvg", "FedTAN"])
@pytest.mark.parametrize("ill", [False, True], ids=["at once", "each alone"])
def test_begin_has_the_first_gradient_and_rules_begin_anew_alone(
    base: Any, ill: bool, federation: Federations, groups: Groups, flower_log: pytest.LogCaptureFixture
) -> None:
    class FirstGradient(Wrapper):
        def config(self, round: Round) -> Config:
            return {"test.first-gradient": True}

    fed = federation((8, 12, 11, 8), batches=3, model=mlp, dtype=torch.float64, lr=0.01, epochs=2)
    if ill:  # found in the last step
        fed.data[1].batches[-1][1].fill_(7)
    exact = ill and base is FedAvg  # FedTAN's clients replay what they have agreed on at once
    both(fed, lambda: FirstGradient(base()), most=4, rtol=0 if exact else 1e-10, atol=0)
    assert base is not FedAvg or groups[0] == (0 if ill else 4, 1)
    assert ("training several clients at once has failed, so each trains alone: " in flower_log.text) == ill


class LastGradientClient(ClientRule):
    """A rule that remembers more from a client's second round on."""

    keys: ClassVar[dict[str, Key]] = {"test.last-gradient": Key("true", "a test's key")}

    def begin(self, w: Tensors) -> Memo:
        memo: Memo = {"sum": {name: torch.zeros_like(parameter) for name, parameter in w.items()}}
        if before := self.local.state.load("last-gradient"):
            memo["last"] = {name: torch.from_numpy(before[name].copy()) for name in w}
        return memo

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        for name, gradient in g.items():
            if "last" in memo:
                gradient.add_(memo["last"][name])
            memo["sum"][name].add_(gradient)

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        if metrics["num-examples"] == 8:  # the client with 12 is always as in its first round
            self.local.state.save("last-gradient", copied(memo["sum"]))


@pytest.mark.parametrize("base", [FedAvg, partial(FedTAN, min_batch=1)], ids=["FedAvg", "FedTAN"])
def test_clients_whose_rules_remember_other_tensors_train_apart(base: Any, federation: Federations) -> None:
    class LastGradient(Wrapper):
        def config(self, round: Round) -> Config:
            return {"test.last-gradient": True}

    fed = federation((12, 8, 8), dtype=torch.float64, lr=0.05, model=mlp)
    both(fed, lambda: LastGradient(base()), 3, most=10, rtol=1e-9, atol=1e-11)


def test_an_adjust_of_its_own_is_elementwise_only_if_it_is_marked() -> None:
    class Renamed(FedProxClient):
        pass

    class Halved(FedProxClient):
        def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
            raise NotImplementedError

    kinds = (ClientRule, FedProxClient, Renamed, Halved)
    assert [hasattr(kind.adjust, "elementwise") for kind in kinds] == [False, True, True, False]


@pytest.mark.parametrize(
    "register",
    [
        *(lambda model, name=name: model.get_submodule(name).register_forward_hook(bool) for name in ("", "0", "2")),
        lambda model: model[1].weight.register_hook(torch.neg),
        lambda model: model[1].bias.register_post_accumulate_grad_hook(Tensor.neg_),
    ],
    ids=["model", "flatten", "norm", "gradient", "accumulated gradient"],
)
def test_a_model_trains_alone_while_it_has_hooks(register: Callable[[Any], Any]) -> None:
    model = mlp()
    for _ in range(2):  # before and after the network is known
        hook = register(model)
        with pytest.raises(NotImplementedError, match="a module or a parameter has hooks"):
            network_of(model)
        hook.remove()
        network_of(model)


@pytest.mark.parametrize("type", [Tensor.int, Tensor.short, Tensor.char, Tensor.bool])
def test_labels_of_other_types_are_the_same_error_as_alone(type: Callable[[Tensor], Tensor]) -> None:
    model, errors = mlp(), []
    for run_all in (together, lambda trainings: [*map(train, trainings)]):
        with pytest.raises(RuntimeError, match=r"Long|not implemented") as error:
            run_all(rounds(model, type=type))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_rounds_that_differ_form_groups_of_their_own() -> None:
    model = mlp()
    assert not kinds([*rounds(model, optimizer="adam"), *rounds(model, optimizer="rmsprop")]), "they train alone"
    rows = kinds([*rounds(model), *rounds(model, momentum=0.9), *rounds(mlp(None))])
    assert [len({row.kind for row in rows[:4]}), len({row.kind for row in rows})] == [1, 3]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "Scaffold": Scaffold,
    "FedBN": FedBN,
    "SiloBN": SiloBN,
    "Standalone": Standalone,
    "FixBN": lambda: FixBN(FedAvg(), freeze_round=1),
    "refreshed": lambda: FixBN(FedAvg(), freeze_round=1, refresh=0.1),  # stacked networks would call no hooks
    "frozen affine": lambda: FixBN(FedProx(proximal_mu=0.1), freeze_round=1, freeze=("statistics", "affine")),
    "GlobalMomentum": lambda: GlobalMomentum(FedAvg()),
    "FedNova": FedNova,
    "FedWon": lambda: FedWon(clip=0.01),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_the_same(name: str, federation: Federations, groups: Groups) -> None:
    model = partial(mlp, None) if name == "FedWon" else mlp
    options = {"momentum": 0.5, "keep_momentum": name not in ("GlobalMomentum", "FedNova"), "lr": 0.05, "epochs": 2}
    fed = federation((8, 12, 11, 8), batches=3, model=model, dtype=torch.float64, **options)
    found = both(fed, STRATEGIES[name], 3)
    assert name == "Standalone" or not same(found[-1], found[0])
    assert 3 in [number for number, _ in groups]


def test_clients_with_control_variates_of_different_rounds_are_one_group(
    federation: Federations, groups: Groups
) -> None:
    """Two of three clients train in each round, so in later rounds the server has variates of different rounds."""
    fed = federation((8, 12, 7), model=mlp, dtype=torch.float64, lr=0.05)
    both(fed, partial(Scaffold, fraction_train=0.67, seed=1), 4)
    assert groups == [(2, 1)] * 4


def test_clients_may_share_the_model_one_may_be_alone_and_other_networks_change_no_bit(federation: Federations) -> None:
    """FedNova refuses momentum from an earlier round: one at a time, no client must seem to have any."""
    fed = federation((8, 12, 7), model=mlp, dtype=torch.float64, momentum=0.5, lr=0.05)
    both(fed, FedBN, 3, most=2, app=partial(with_one_model, fed))
    both(fed, FedNova, most=1, rtol=0, atol=0)
    both(federation((8, 12)), FedAvg, rtol=0, atol=0)


def test_mods_and_overridden_methods_work(federation: Federations, groups: Groups) -> None:
    fed = federation((8, 12, 7), model=mlp, dtype=torch.float64)
    calls: list[str] = []

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        calls.append("mod begins")
        reply = call_next(message, context)
        calls.append("mod ends")
        return reply

    class Own(BNClient):
        def train_round(self, *arguments: Any) -> Any:
            update = super().train_round(*arguments)
            calls.append("trained")
            return update

    def make_client(context: Any) -> BNClient:
        return Own(copy.deepcopy(fed.model), fed.data[int(context.node_config["partition-id"])], context=context)

    app = client_app(make_client, mods={"train": [mod]})
    models_of(fed, FedAvg(), 1, grid=fed.grid(app, pool=partial(TogetherPool, most=3)))
    assert groups == [(3, 1)]
    assert calls == ["mod begins"] * 3 + ["trained", "mod ends"] * 3


def test_a_failing_client_fails_by_itself(federation: Federations) -> None:
    fed = federation((8, 12, 7), model=mlp)
    inputs, targets = fed.data[1].batches[0]
    fed.data[1].batches[0] = inputs[:, :1], targets
    grid, strategy = fed.grid(pool=partial(TogetherPool, most=3)), FedAvg()
    strategy.start(grid, fed.arrays(), num_rounds=1)
    assert [reason.partition(":")[0] for reason in strategy.base.training.left_out] == ["node 2"]


@pytest.mark.slow
def test_many_clients_at_once_do_not_reach_the_limit_of_nested_calls(federation: Federations) -> None:
    fed, limit = (
        federation((4,) * 150, batches=1, model=partial(mlp, None), dtype=torch.float64),
        sys.getrecursionlimit(),
    )
    both(fed, FedAvg, 1, most=150)
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("only", ["FedAvg+BN", "FedTAN"])
def test_an_experiment_trains_clients_together(only: str, tmp_path: Path, groups: Groups) -> None:
    """Five at once, in one group, and the numbers of one at a time."""
    how: dict[str, Any] = {"only": only, "rounds": 2, "seeds": [0], "progress": False}
    apart, at_once = (
        list(run("demo", engine={"workers": 0, "together": n}, out=tmp_path / str(n), **how).history["train_loss"])
        for n in (1, 8)
    )
    assert at_once == pytest.approx(apart, rel=1e-5)
    assert only == "FedTAN" or groups == [(5, 1)] * 2


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"workers": 2}, "together=4 trains clients in one process, but workers is 2; leave one of them out"),
        ({"name": "ray"}, "together=4 trains clients in one process, but name is 'ray'; leave one of them out"),
    ],
)
def test_other_engines_do_not_train_clients_together(engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(problem)):
        run("demo", engine={"together": 4, **engine})
