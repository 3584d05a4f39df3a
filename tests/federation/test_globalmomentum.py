"""Momentum that is kept between rounds: the mean of all clients', or each client's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn

from fedbn_flwr import build_model
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.messages.arrays import arrays_in, size_of, unpack
from fedbn_flwr.strategies import FedAvg, FedBN, FedBS, FedProx, FixBN, GlobalMomentum
from tests.support.federations import Arrays, Changed, Federations, models_of, near, replaced, same
from tests.support.records import between
from tests.support.smallbatches import FedTAN
from tests.support.twins import sgd, union

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def fedavg(**options: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, **options)


def without_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def with_group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def centralised(fed: Any, rounds: int) -> Arrays:
    """One SGD step a round on the union of all clients' batches."""
    model = copy.deepcopy(fed.model).train()
    sgd(model, [union(fed)] * rounds, **SGD)
    return {key: parameter.detach().numpy() for key, parameter in model.named_parameters()}


def distance(found: Arrays, expected: Arrays) -> float:
    return max(float(np.abs(found[key] - value).max()) for key, value in expected.items())


# --- the mean of all clients' ------------------------------------------------


@pytest.mark.parametrize("model", [without_norm, with_group_norm])
def test_with_one_full_batch_step_it_is_centralised_sgd_with_momentum(
    federation: Federations, model: Callable[[], nn.Module]
) -> None:
    fed = federation((8, 8, 8), batches=1, model=model, dtype=torch.float64, **SGD)
    expected = centralised(fed, 6)
    assert distance(models_of(fed, GlobalMomentum(fedavg()), 6)[-1], expected) < 1e-10
    assert distance(models_of(fed, fedavg(), 6)[-1], expected) > 1e-2


def test_around_fedtan_it_is_centralised_sgd_with_batch_norm(federation: Federations) -> None:
    fed = federation((8, 8, 8), batches=1, model=with_batch_norm, dtype=torch.float64, **SGD)
    expected = centralised(fed, 4)
    assert distance(models_of(fed, GlobalMomentum(FedTAN(fraction_evaluate=0.0)), 4)[-1], expected) < 1e-10
    assert distance(models_of(fed, FedTAN(fraction_evaluate=0.0), 4)[-1], expected) > 1e-3
    assert distance(models_of(fed, GlobalMomentum(fedavg()), 4)[-1], expected) > 1e-3


def traced(fed: Any, strategy: Any, rounds: int) -> tuple[dict[tuple[int, int], RecordDict], ...]:
    """The train messages and replies of a run, by round and partition."""
    down: dict[tuple[int, int], RecordDict] = {}
    up: dict[tuple[int, int], RecordDict] = {}

    def hook(message: RecordDict, reply: RecordDict, partition: int) -> None:
        key = int(message["config"]["server-round"]), partition
        down[key], up[key] = message, reply

    models_of(fed, strategy, rounds, between(fed.app(), hook))
    return down, up


@pytest.mark.parametrize("base", [fedavg, lambda: FedBS(fraction_evaluate=0.0)])
def test_the_mean_has_the_weights_of_the_base(federation: Federations, base: Callable[[], FedAvg]) -> None:
    fed = federation((8, 12, 6), dtype=torch.float64, **SGD)
    rule = base()
    down, up = traced(fed, GlobalMomentum(rule), 2)
    key = "num-examples" if type(rule) is FedAvg else "train-loss"
    weights = [up[1, i]["metrics"][key] for i in range(3)]
    assert len(set(weights)) == 3
    each = [unpack(up[1, i]["momentum"]) for i in range(3)]
    expected = {name: np.average([one[name] for one in each], axis=0, weights=weights) for name in each[0]}
    for i in range(3):
        near(expected, unpack(down[2, i]["momentum"]), rtol=1e-13, atol=1e-16)


def test_the_first_round_is_that_of_the_base(federation: Federations) -> None:
    fed = federation((8, 12), **SGD)
    ours, theirs = models_of(fed, GlobalMomentum(fedavg()), 2), models_of(fed, fedavg(), 2)
    assert [same(*pair) for pair in zip(theirs[1:], ours[1:], strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("name", "channels", "parameters", "statistics"), [("cnn", 1, 6_138, 96), ("resnet20", 3, 269_722, 1_376)]
)
def test_messages_carry_the_momentum_up_and_from_round_two_down(
    federation: Federations, name: str, channels: int, parameters: int, statistics: int
) -> None:
    fed = federation((4, 4), batches=1, model=lambda: build_model(name, 10), steps=1, **SGD)
    for data in fed.data:
        data.batches = [(torch.randn(4, channels, 8, 8), torch.randint(0, 10, (4,)))]
    grid, rounds = MeteredGrid(fed.grid()), []
    GlobalMomentum(fedavg()).start(
        grid, fed.arrays(), num_rounds=3, evaluate_fn=lambda number, arrays: rounds.append(grid.take())
    )
    model = parameters + statistics
    assert [each.bytes_down for each in rounds[1:]] == [2 * 4 * model] + [2 * 4 * (model + parameters)] * 2
    assert [each.bytes_up for each in rounds[1:]] == [2 * 4 * (model + parameters)] * 3


# --- with other rules --------------------------------------------------------


def test_inside_fixbn_around_fedprox_all_three_are_asked_for(federation: Federations) -> None:
    fed = federation((8, 12), **SGD)
    strategy = FixBN(GlobalMomentum(FedProx(fraction_evaluate=0.0, proximal_mu=0.5)), freeze_round=1)
    down, _ = traced(fed, strategy, 3)
    for (server_round, _), message in down.items():
        config = message["config"]
        assert (config["fedbn.globalmomentum"], config["proximal-mu"]) == (True, 0.5)
        assert ("fedbn.fixbn-freeze" in config, "momentum" in message) == (server_round > 1, server_round > 1)


def test_inside_and_outside_fixbn_are_the_same(federation: Federations) -> None:
    fed = federation((8, 12), **SGD)
    inside = models_of(fed, FixBN(GlobalMomentum(fedavg()), freeze_round=1, freeze=["statistics", "affine"]), 4)
    outside = models_of(fed, GlobalMomentum(FixBN(fedavg(), freeze_round=1, freeze=["statistics", "affine"])), 4)
    assert same(outside[-1], inside[-1])
    assert inside[1]["1.running_mean"].tobytes() == inside[4]["1.running_mean"].tobytes()
    assert inside[1]["1.weight"].tobytes() == inside[4]["1.weight"].tobytes()


def test_around_fedtan_only_the_last_message_has_the_momentum(federation: Federations) -> None:
    fed = federation((8, 8), batches=1, model=with_batch_norm, **SGD)
    sent: list[list[set[str]]] = []

    def note(messages: list[Message], replies: list[Message]) -> list[Message]:
        sent.extend([[{*message.content.array_records} for message in messages]] if messages else [])
        return replies

    GlobalMomentum(FedTAN(fraction_evaluate=0.0)).start(Changed(fed.grid(), note), fed.arrays(), num_rounds=2)
    plain, last = [{"arrays"}] * 2, [{"arrays", "momentum"}] * 2
    assert sent == [plain] * 3 + [plain] * 2 + [last], "one batch norm: two exchanges and the last message"


def test_around_fedbn_the_momentum_of_batch_norm_stays_local(federation: Federations) -> None:
    fed, ups = federation((8, 12), **SGD), []
    app, clients = replaced(fed)
    noted = between(app, lambda message, reply, partition: ups.append(set(reply["momentum"])))
    models_of(fed, GlobalMomentum(FedBN(fraction_evaluate=0.0)), 2, noted)
    assert ups == [{"0.weight", "4.weight", "4.bias"}] * 4
    own = [clients[node].state.load("fedbn.momentum") for node in (1, 2)]
    assert set(own[0]) == {"momentum_buffer/1.weight", "momentum_buffer/1.bias"}
    assert (own[0]["momentum_buffer/1.bias"] != own[1]["momentum_buffer/1.bias"]).any()
    # With one client it makes no difference who keeps the momentum.
    fed = federation((8,), dtype=torch.float64, **SGD)
    alone: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
    models = [models_of(fed, GlobalMomentum(base(**alone)), 3)[-1] for base in (FedBN, FedAvg)]
    near(models[0], models[1])


# --- refusals ----------------------------------------------------------------


def test_clients_that_train_without_momentum_say_so(federation: Federations) -> None:
    with pytest.raises(RunFailed, match=r"this client trains without momentum"):
        models_of(federation((4, 4)), GlobalMomentum(fedavg()), 1)


def test_the_momentum_of_groups_of_parameters_counts(federation: Federations) -> None:
    def grouped(parameters: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": list(parameters), "momentum": 0.9}], lr=lr)

    plain = models_of(federation((4, 4), momentum=0.9), GlobalMomentum(fedavg()), 2)
    assert same(models_of(federation((4, 4), optimizer=grouped), GlobalMomentum(fedavg()), 2)[-1], plain[-1])


def test_a_base_that_does_not_report_its_weights_is_refused() -> None:
    with pytest.raises(
        SettingsError,
        match=r"FedAvg does not report the weights of its mean, .*; wrap one of fedbn_flwr",
    ):
        GlobalMomentum(flower.FedAvg())
    with pytest.raises(SettingsError, match="does not report the weights"):
        GlobalMomentum(FixBN(flower.FedAvg()))


# --- each client's own -------------------------------------------------------


def fedavg_of_one() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


def test_one_client_that_keeps_its_momentum_is_one_long_run_of_sgd(federation: Federations) -> None:
    fed = federation((8,), dtype=torch.float64, **SGD)
    expected = sgd(copy.deepcopy(fed.model).train(), fed.data[0].batches * 4, **SGD)
    fresh = models_of(fed, fedavg_of_one(), 4)[-1]
    fed.options["keep_momentum"] = True
    near(models_of(fed, fedavg_of_one(), 4)[-1], expected)
    assert distance(fresh, {"0.weight": expected["0.weight"].numpy()}) > 1e-3


def test_each_client_keeps_its_own(federation: Federations) -> None:
    fed = federation((8, 12), keep_momentum=True, **SGD)
    app, clients = replaced(fed)
    local = models_of(fed, fedavg(), 3, app)
    own, other = (clients[node].state.load("fedbn.momentum") for node in (1, 2))
    assert set(own) == {f"momentum_buffer/{name}" for name, _ in fed.model.named_parameters()}
    assert (own["momentum_buffer/4.bias"] != other["momentum_buffer/4.bias"]).any()
    fed.options["keep_momentum"] = False
    for other in (fedavg(), GlobalMomentum(fedavg())):
        assert any(models_of(fed, other, 3)[-1][key].tobytes() != value.tobytes() for key, value in local[-1].items())


def test_a_client_s_own_momentum_is_not_sent(federation: Federations) -> None:
    fed = federation((8, 12), keep_momentum=True, **SGD)
    down, up = traced(fed, fedavg(), 2)
    sizes = {size_of(*map(unpack, arrays_in(each).values()))[0] for each in (*down.values(), *up.values())}
    assert sizes == {sum(array.numpy().size for array in fed.arrays().values())}


@pytest.mark.parametrize(("changes", "keeps"), [("", False), ("train.momentum=0.9 train.keep_momentum=true", True)])
def test_train_keep_momentum_reaches_the_client(changes: str, keeps: bool) -> None:
    node = {"partition-id": 0, "num-partitions": 5}
    context = Context(1, 1, node, RecordDict(), {"experiment": "{clients: 5}", "set": changes})
    assert make_client(context, {}).keep_momentum is keeps


def test_the_class_of_torch_is_sgd_too(federation: Callable[..., Any]) -> None:
    rule = lambda: GlobalMomentum(FedTAN(fraction_evaluate=0.0))  # noqa: E731
    found = [
        models_of(federation((8, 8), dtype=torch.float64, optimizer=kind, momentum=0.9, steps=2), rule(), 2)[-1]
        for kind in ("sgd", torch.optim.SGD)
    ]
    assert distance(*found) < 1e-14
