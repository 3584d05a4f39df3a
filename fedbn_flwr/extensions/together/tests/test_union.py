"""First steps of FedTAN in one pass over all batches: the results of clients whose exchanges are messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import BNClient, client_app, strategies
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.extensions.together import nested, parked
from fedbn_flwr.extensions.together.joined import Joined
from fedbn_flwr.extensions.together.lanes import train_lanes
from fedbn_flwr.extensions.together.nested import train_exchanging
from fedbn_flwr.extensions.together.parked import CohortPool
from fedbn_flwr.extensions.together.waiting import Waiting
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import GlobalMomentum
from tests.support.addressed import OwnModel
from tests.support.federations import models_of, same
from tests.support.fixtures import Batches
from tests.support.marks import slow_except
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII

from .test_exchanges import Ill, check
from .test_exchanges import both as one_way_and_the_other

Federations = Callable[..., Any]
WITHIN = 1e-10  # the kernels add up in another order


class Residual(nn.Module):
    """Convolutions with groups, bias and stride, a norm without gamma and beta, a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.plain = nn.BatchNorm2d(6, affine=False)
        self.down = nn.Conv2d(6, 4, 2, stride=2, dilation=1)
        self.last = nn.BatchNorm1d(4, momentum=None)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for _ in range(2):
            x = x + self.plain(self.grouped(x)).relu()
        x = self.down(x).amax((2, 3))
        return self.head(self.last(x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1))).relu())[:, :3]


def series() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(2), nn.Conv1d(2, 5, 3, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(70, 3)
    )


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients whose first steps were computed in one pass."""
    found: list[int] = []

    def noted(waiting: Sequence[Waiting], ask: Any) -> None:
        train_exchanging(waiting, ask)
        found.append(sum(isinstance(each, Joined) for each in waiting))

    monkeypatch.setattr(parked, "train_exchanging", noted)
    return found


def both(fed: Any, strategy: Callable[..., Any] = FedTAN, **how: Any) -> tuple[list[list[int]], list[str]]:
    return one_way_and_the_other(fed, strategy, within=WITHIN, **how)


def frozen_front() -> nn.Module:
    model = small()
    model[0].requires_grad_(False)
    return model


def called_twice() -> nn.Module:
    norm, layer = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(norm, layer, norm, layer, nn.Flatten(), nn.Linear(32, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small": small,
    "residual": Residual,
    "series": series,
    "tied": Tied,
    "frozen front": frozen_front,
    "layers called twice": called_twice,
    "resnet20": lambda: nn.Sequential(nn.Conv2d(2, 3, 1), build_model("resnet20", 3, "bn")),
    "cnn": lambda: build_model("cnn", 3, "bn", input_shape=(2, 4, 4)),
}


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 13, 6, 11)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_equals_messages(
    name: str, sizes: tuple[int, ...], federation: Federations, groups: list[int]
) -> None:
    fed = federation(sizes, model=NETWORKS[name], dtype=torch.float64, momentum=0.5, lr=0.01, epochs=2)
    # On so few images, a second round of ResNet-20 turns a difference of 1e-15 in the initial weights into 2e-5.
    rounds = 1 if name == "resnet20" else 2
    both(fed, rounds=rounds)
    assert groups == [len(sizes)] * rounds


STRATEGIES: dict[str, Callable[..., Any]] = {
    "paper": partial(FedTAN, exchange="paper"),
    "weighted by batch": partial(FedTAN, weights="batch"),
    "messages only": partial(FedTAN, direct=False),
    "forward only": FedAvgGlobalStats,
    "FedTAN-II": partial(FedTANII, fedtan_rounds=1),
}


@pytest.mark.parametrize("name", slow_except({"paper", "forward only"}, STRATEGIES))
def test_every_mode_equals_messages(name: str, federation: Federations, groups: list[int]) -> None:
    both(federation((8, 13, 6), model=Residual, dtype=torch.float64, momentum=0.5), STRATEGIES[name])
    assert groups == [3] * (1 if name == "FedTAN-II" else 2)


def test_rules_that_remember_equal_messages(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13, 6), model=small, dtype=torch.float64, momentum=0.5, keep_momentum=True)
    make = lambda: GlobalMomentum(FedTAN())  # noqa: E731
    expected = models_of(fed, make(), 3)
    with fed.grid(pool=partial(CohortPool, most=3)) as grid:
        check(models_of(fed, make(), 3, grid=grid), expected, WITHIN)
    assert groups == [3] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"precision": torch.bfloat16},
        {"channels_last": True},
        {"optimizer": {"name": "sgd", "nesterov": True}, "momentum": 0.9},
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))},
    ],
)
def test_options_of_later_steps_are_kept(options: dict[str, Any], federation: Federations, groups: list[int]) -> None:
    both(federation((8, 13, 2), model=small, dtype=torch.float64, **options))  # batches of 4, 7 and 1
    assert groups == [3, 3]


def test_clients_may_share_a_model_and_a_loader_may_shuffle(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13, 6), model=small, dtype=torch.float64)
    loaders = [
        DataLoader(TensorDataset(*(torch.cat(each) for each in zip(*data.batches, strict=True))), 4, shuffle=True)
        for data in fed.data
    ]
    shared = ModelTensors(copy.deepcopy(fed.model), build=lambda: copy.deepcopy(fed.model))

    def app(model: Callable[[], Any]) -> Any:
        def make_client(context: Any) -> BNClient:
            return BNClient(model(), loaders[int(context.node_config["partition-id"])], lr=0.1, context=context)

        return client_app(make_client)

    expected = models_of(fed, FedTAN(), 2, grid=fed.grid(app(lambda: copy.deepcopy(fed.model))))
    with fed.grid(app(lambda: shared), pool=partial(CohortPool, most=3)) as grid:
        check(models_of(fed, FedTAN(), 2, grid=grid), expected, WITHIN)
    assert groups == [3, 3]


def test_more_clients_than_at_once_exchange_as_a_whole(federation: Federations, groups: list[int]) -> None:
    both(federation((8, 13, 6, 9, 8), model=small, dtype=torch.float64), most=2)
    assert sorted(groups) == [1, 1, 2, 2, 2, 2]


def test_a_client_with_nan_is_left_out(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13, 6), model=Residual, dtype=torch.float64, momentum=0.5, keep_momentum=True)
    fed.data[1].batches[0][0].fill_(torch.nan)
    nodes, (reason,) = both(fed)
    assert nodes == [[1, 3]] * 2
    assert "client 1 (node 2): 'mean' has values from nan to nan" in reason
    assert groups == [3, 3]


def test_a_batch_of_another_size_does_not_matter_later(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13), model=small, dtype=torch.float64)
    fed.data[1] = Larger(fed.data[1].batches)
    models = [copy.deepcopy(fed.model) for _ in fed.data]
    expected = models_of(fed, FedTAN(), 3, grid=fed.grid(of_models(fed, models)))
    with fed.grid(of_models(fed, models), pool=partial(CohortPool, most=2)) as grid:
        check(models_of(fed, FedTAN(), 3, grid=grid), expected, WITHIN)
    assert groups == [2, 2]


class Larger(Batches):
    """With larger images in round 1."""

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in self.batches:
            yield F.pad(inputs, (1, 1, 1, 1)) if server_round == 1 else inputs, targets


@pytest.mark.parametrize(("batch", "times"), [(0, 0), (1, 2)], ids=["first", "later"])
def test_a_client_that_fails_does_so_alone(batch: int, times: int, federation: Federations, groups: list[int]) -> None:
    """Its labels are out of range: found in the pass of all, or in a later step."""
    fed = federation((8, 13, 6), model=small, dtype=torch.float64)
    fed.data[1].batches[batch][1].fill_(7)
    nodes, (reason,) = both(fed)
    assert nodes == [[1, 3]] * 2
    assert "Target 7 is out of bounds" in reason
    assert groups == [3] * times


class Mixing(nn.Module):
    """Its outputs depend on the other examples of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.1 * x.mean(0)


class Outside(nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.layer.weight.t()


class Flat(nn.Module):
    """Takes each channel as an example."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(1)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def ending(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 4), nn.Flatten(), nn.BatchNorm1d(4), nn.ReLU(), *last, nn.Linear(4, 3))


def hooked() -> nn.Module:
    model = ending()
    model[0].register_forward_hook(lambda *_: None)
    return model


def with_own_forward() -> nn.Module:
    model = ending()
    model[0].forward = lambda x: F.conv2d(x, model[0].weight)
    return model


class Running(nn.InstanceNorm2d):
    def __init__(self) -> None:
        super().__init__(2, track_running_stats=True)


class Sorted(nn.Module):
    """Computes the examples in another order, and returns them in theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ending()

    def forward(self, x: Tensor) -> Tensor:
        order = x.flatten(1).sum(1).argsort()
        return self.inner(x[order])[order.argsort()]


class Compared(nn.Module):
    """An output depends on a comparison with the other examples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > x.mean(), x, 0.1 * x)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return d / d.norm()


class NormedGradients(nn.Module):
    """Only gradients depend on the other examples."""

    def forward(self, x: Tensor) -> Tensor:
        return _Normed.apply(x)


class Remembering(nn.Module):
    """Keeps a mean of its inputs, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.means = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.means[0]
        self.means[0] = self.means[0] + x.detach().mean(0)
        return y


OTHER_RESULT = "one pass for all clients has another result than a pass for each"
UNFIT = {
    "mixed": (OTHER_RESULT, lambda: ending(Mixing())),
    "sorted": (OTHER_RESULT, Sorted),
    "compared": (OTHER_RESULT, lambda: ending(Compared())),
    "mixed gradients": (OTHER_RESULT, lambda: ending(NormedGradients())),
    "remembering": (OTHER_RESULT, lambda: ending(Remembering())),
    "outside": ("the model uses a parameter outside of its layer", lambda: ending(Outside())),
    "flat": (
        "the model has no tensors with a row for each example",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Flatten(2), Flat(), nn.BatchNorm1d(1), nn.Unflatten(0, (-1, 4)), nn.Flatten(),
            nn.Linear(16, 3),
        ),
    ),
    "drawing": ("the model or the loss draws random numbers", lambda: ending(nn.Dropout(0.5))),
    "counting": ("the model's forward changes the model", lambda: ending(Counting())),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_networks_that_cannot_train_alone_and_say_so_once(
    name: str, federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    why, make = UNFIT[name]
    fed = federation((8, 13, 6), model=make, dtype=torch.float64)
    results = []
    for pool in ({}, {"pool": partial(CohortPool, most=3)}):
        app = of_models(fed, [copy.deepcopy(fed.model) for _ in fed.data])  # kept for all rounds
        with fed.grid(app, **pool) as grid:
            results.append(models_of(fed, FedTAN(), 3, grid=grid))
    if name != "remembering":  # counting the exchanges is a pass too, which is lost here
        check(results[1], results[0], WITHIN)
    assert groups == []
    said = [each for each in flower_log.messages if "at once" in each]
    assert said == [f"training several clients at once has failed, so each trains alone: NotImplementedError: {why}"]


def of_models(fed: Any, models: Sequence[nn.Module]) -> Any:
    """An app with a model for each client."""

    def make_client(context: Any) -> BNClient:
        client = int(context.node_config["partition-id"])
        return BNClient(models[client], fed.data[client], lr=0.1, context=context)

    return client_app(make_client)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = (scale,)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


def test_models_that_differ_in_any_attribute_train_alone(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13, 6), model=lambda: nn.Sequential(Scaled(1), ending()), dtype=torch.float64)
    models = [nn.Sequential(Scaled(scale), copy.deepcopy(fed.model[1])) for scale in (1, 1, 2)]
    app = of_models(fed, models)
    expected = models_of(fed, FedTAN(), 2, grid=fed.grid(app))
    with fed.grid(app, pool=partial(CohortPool, most=3)) as grid:
        check(models_of(fed, FedTAN(), 2, grid=grid), expected, WITHIN)
    assert groups == []


ALONE = {
    "'2' is GroupNorm(2, 4, eps=1e-05, affine=True)": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    ),
    "a module or a parameter has hooks": hooked,
    "'0' is Running(2, eps=1e-05, momentum=0.1, affine=False, track_running_stats=True)": lambda: nn.Sequential(
        Running(), ending()
    ),
    "'0' is Conv2d(2, 4, kernel_size=(4, 4), stride=(1, 1))": with_own_forward,
}


@pytest.mark.parametrize("why", ALONE)
def test_layers_that_cannot_train_alone_to_the_last_bit(
    why: str, federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 13), model=ALONE[why])
    expected = models_of(fed, FedTAN(), 2)
    with fed.grid(pool=partial(CohortPool, most=2)) as grid:
        found = models_of(fed, FedTAN(), 2, grid=grid)
    assert all(map(same, found, expected))
    assert groups == []
    assert "at once" not in flower_log.text


def drawing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.rand_like(outputs), targets)


def test_losses_that_draw_draw_what_they_draw_alone(federation: Federations, groups: list[int]) -> None:
    both(federation((8, 13), model=small, dtype=torch.float64, loss=drawing_loss))
    assert groups == []


class Features(nn.Module):
    """Keeps its last features, for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = ending(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["features"] = self.body(x)
        return self.head(self.features)


def test_a_loss_that_reads_a_shared_model_is_no_part_of_one_pass(
    federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    """One by one, clients of one model cannot be parked, so the run fails."""
    fed = federation((8, 13), model=Features, dtype=torch.float64)
    shared = ModelTensors(copy.deepcopy(fed.model), build=lambda: copy.deepcopy(fed.model))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + shared.model.features.square().mean()

    def make_client(context: Any) -> BNClient:
        data = fed.data[int(context.node_config["partition-id"])]
        return BNClient(shared, data, lr=0.1, loss=loss, context=context)

    with fed.grid(client_app(make_client), pool=partial(CohortPool, most=2)) as grid, pytest.raises(RunFailed):
        models_of(fed, FedTAN(), 1, grid=grid)
    assert groups == []
    assert OTHER_RESULT in flower_log.text


class OwnFedTAN(OwnModel, strategies.FedTAN):
    pass


def test_clients_with_different_models_train_alone(
    federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 13), dtype=torch.float64, model=lambda: nn.Sequential(*ending()[:3], nn.Linear(4, 3)))
    both(fed, partial(OwnFedTAN, min_batch=1))
    assert groups == []
    assert "ValueError: the clients' weights differ" in flower_log.text


def test_a_round_goes_on_in_lanes(federation: Federations, groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the steps after the first are taken in turn, with the results of clients one after the other."""
    lanes: list[int] = []

    def noted(waiting: Sequence[Any]) -> None:
        lanes.append(len(waiting))
        train_lanes(waiting)

    monkeypatch.setattr(nested, "has_lanes", lambda training: True)
    monkeypatch.setattr(nested, "train_lanes", noted)
    fed = federation((8, 13, 6), model=Residual, dtype=torch.float64, momentum=0.5, keep_momentum=True, epochs=2)
    fed.data[1] = Ill(fed.data[1].batches)
    nodes, _ = both(fed, rounds=3)
    assert nodes == [[1, 3], [1, 2, 3], [1, 2, 3]]
    assert groups == lanes == [3, 3, 3]


def test_a_lane_that_fails_takes_the_first_step_again(
    federation: Federations, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nesterov's momentum changes the gradients in place."""
    calls = 0

    def fails_once(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += len(targets) == 3  # the client's second batch
        if calls == 2:  # the first call is the first run's
            calls += 1
            raise RuntimeError("out of memory")
        return F.cross_entropy(outputs, targets)

    monkeypatch.setattr(nested, "has_lanes", lambda training: True)
    momentum = {"optimizer": {"name": "sgd", "nesterov": True}, "momentum": 0.9}
    fed = federation((8, 7), model=small, dtype=torch.float64, loss=fails_once, **momentum)
    both(fed, rounds=1)
    assert groups == [2]
    assert calls == 4
