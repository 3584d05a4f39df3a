"""FedTAN as a strategy: messages, sessions and aggregation, against centralised training in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, build_model, client_app
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.client.rule import Loss
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.errors import RoundSkipped, RunFailed
from fedbn_flwr.exchange.carriers import ByMessages
from fedbn_flwr.exchange.step import LayerwiseStep
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of, unpack
from fedbn_flwr.strategies import FedAvg, GlobalMomentum, Round, Wrapper
from tests.support.cohort import run_cohort
from tests.support.federations import Changed, Federations, Forgetful, failing, last_model, same
from tests.support.marks import slow_except
from tests.support.models import two_norms, two_norms_with_dropout
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII
from tests.support.twins import sgd, union


def centralised(
    fed: Any, rounds: int, *, lr: float, momentum: float = 0.0, loss: Loss = F.cross_entropy
) -> dict[str, np.ndarray]:
    """The twin: one model on the union of the clients' first batches."""
    model = copy.deepcopy(fed.model).train()
    state = sgd(model, [union(fed)] * rounds, loss, lr=lr, momentum=momentum)
    return {key: value.numpy() for key, value in state.items()}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(value - b[key]).max()) for key, value in a.items())


@pytest.mark.parametrize(
    ("exchange", "momentum"),
    slow_except([("fused", 0.9)], [("fused", 0.0), ("fused", 0.9), ("paper", 0.0), ("paper", 0.9)]),
)
def test_twenty_rounds_equal_twenty_steps_of_centralised_sgd(
    federation: Federations, exchange: str, momentum: float
) -> None:
    fed = federation(
        (6, 6, 6),
        batches=1,
        model=two_norms,
        dtype=torch.float64,
        lr=0.1,
        steps=1,
        momentum=momentum,
        keep_momentum=True,
    )
    ours = last_model(fed, FedTAN(fraction_evaluate=0.0, exchange=exchange), 20)
    twin = centralised(fed, 20, lr=0.1, momentum=momentum)
    assert distance(ours, twin) < 1e-10
    plain = last_model(fed, FedAvg(fraction_evaluate=0.0), 20)
    assert distance(plain, twin) > 1e-3


def test_unequal_batches_equal_the_union_when_weighted_by_batch(federation: Federations) -> None:
    fed = federation((3, 8, 5), batches=1, model=two_norms, dtype=torch.float64, lr=0.1, steps=1)
    fed.data[0].num_examples = 30  # of which its batch has three
    ours = last_model(fed, FedTAN(fraction_evaluate=0.0, weights="batch"), 5)
    assert distance(ours, centralised(fed, 5, lr=0.1)) < 1e-10


def test_class_weights_and_label_smoothing_leave_it_exact(federation: Federations) -> None:
    """Batches with other classes on each client, so that the sums of their weights differ."""
    weights = torch.tensor([5.0, 1.0, 0.2])
    loss = make_loss("cross_entropy", label_smoothing=0.1, class_weights=weights)
    fed = federation((6, 6, 6), batches=1, model=two_norms, dtype=torch.float64, lr=0.1, steps=1, loss=loss)
    for number, data in enumerate(fed.data):
        data.batches = [(x, torch.where(torch.arange(6) < 4, number, y)) for x, y in data.batches]
    ours = last_model(fed, FedTAN(fraction_evaluate=0.0), 5)
    assert distance(ours, centralised(fed, 5, lr=0.1, loss=loss)) < 1e-10
    assert distance(ours, centralised(fed, 5, lr=0.1)) > 1e-3
    # PyTorch's division by the sum of the weights of a batch would not be exact.
    fed.options["loss"] = nn.CrossEntropyLoss(weights.double())
    divided = last_model(fed, FedTAN(fraction_evaluate=0.0), 5)
    assert distance(divided, centralised(fed, 5, lr=0.1, loss=fed.options["loss"])) > 1e-3


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"clip": 1.0}])
def test_a_client_refuses_a_first_step_that_is_not_linear(federation: Federations, options: dict[str, Any]) -> None:
    fed = federation((6, 6), model=two_norms, dtype=torch.float64, **options)
    with pytest.raises(RunFailed, match="only SGD without clipping takes; expected optimizer sgd and no clip"):
        last_model(fed, FedTAN(fraction_evaluate=0.0), 1)
    last_model(fed, FedAvgGlobalStats(fraction_evaluate=0.0), 1)


def test_weights_by_data_and_by_batch_differ_for_equal_batches(federation: Federations) -> None:
    fed = federation((4, 8), model=two_norms, dtype=torch.float64, lr=0.1, steps=1)
    fed.data[1].batches = [(x[:2], y[:2]) for x, y in fed.data[1].batches]  # as large as the other's
    assert len({len(data.batches[0][1]) for data in fed.data}) == 1
    by_data, by_batch = (last_model(fed, FedTAN(fraction_evaluate=0.0, weights=w), 1) for w in ("data", "batch"))
    assert distance(by_data, by_batch) > 1e-6


def test_an_exchange_waits_no_longer_than_a_round(federation: Federations) -> None:
    waited: set[float | None] = set()

    class Timed(GridAround):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            waited.add(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    for limit, expected in ((50, {50}), (700, {600, 700})):
        waited.clear()
        fed = federation((4, 4), batches=1, model=two_norms)
        rule = FedTAN(fraction_evaluate=0.0)
        rule.start(Timed(fed.grid()), fed.arrays(), num_rounds=1, timeout=limit)
        assert {timeout for timeout in waited if timeout is not None} == expected


def test_one_client_equals_fedavg(federation: Federations) -> None:
    fed = federation((8,), model=two_norms, dtype=torch.float64, lr=0.1)
    single = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
    plain = last_model(fed, FedAvg(**single), 3)
    for rule in (FedTAN, FedAvgGlobalStats):
        assert distance(last_model(fed, rule(**single), 3), plain) < 1e-10


def test_local_steps_after_the_first_are_ordinary(federation: Federations) -> None:
    """By hand: one step with exchanges, which leaves client i at w - lr g_i, then two local ones, then the mean."""
    fed = federation((6, 6), batches=3, model=two_norms, dtype=torch.float64, lr=0.1, steps=3)
    ours = last_model(fed, FedTAN(fraction_evaluate=0.0), 1)
    copies = [copy.deepcopy(fed.model).train() for _ in fed.data]
    works = [
        lambda exchange, m=m, b=data.batches[0]: LayerwiseStep(exchange)(m, *b, F.cross_entropy)  # type: ignore[call-arg]
        for m, data in zip(copies, fed.data, strict=True)
    ]
    run_cohort(works, [1.0, 1.0])
    for model, data in zip(copies, fed.data, strict=True):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        sgd(model, data.batches[1:], lr=0.1)
    mean = {key: sum(m.state_dict()[key].numpy() for m in copies) / 2 for key in ours}
    assert distance(ours, mean) < 1e-12


@pytest.mark.parametrize(
    ("rule", "options", "rounds"),
    [(FedTAN, {"exchange": "paper"}, 58), (FedTAN, {}, 39), (FedAvgGlobalStats, {}, 20), (FedAvg, {}, 1)],
    ids=["FedTAN paper", "FedTAN fused", "forward only", "FedAvg"],
)
def test_communication_rounds_and_bytes_of_resnet20_are_the_papers(
    federation: Federations, rule: Any, options: dict[str, Any], rounds: int
) -> None:
    """FedTAN paper, Table 3 and Appendix G: 3L + 1 = 58 rounds, and 4 x 1,376 floats more than FedAvg's."""
    fed = federation((2,) * 5, batches=1, model=lambda: build_model("resnet20", 10, input_shape=(2, 32, 32)), steps=1)
    metered = MeteredGrid(fed.grid())
    rule(fraction_evaluate=0.0, **options).start(metered, fed.arrays(), num_rounds=1)
    traffic = metered.take()
    # Two input channels rather than three: 144 weights less in the first convolution.
    model = 271_098 - 144
    forward = 1_376 if rule is not FedAvg else 0
    backward = 1_376 if rule is FedTAN else 0
    assert traffic.communication_rounds == rounds
    assert traffic.bytes_down == traffic.bytes_up == 4 * 5 * (model + forward + backward)
    ending = int(rule is FedAvgGlobalStats)  # a contribution without arrays
    assert traffic.messages_down == traffic.messages_up == 5 * (rounds + ending)


@pytest.mark.parametrize("around", [lambda rule: rule, GlobalMomentum])
def test_parked_and_replayed_rounds_give_the_same_model(
    federation: Federations, monkeypatch: pytest.MonkeyPatch, around: Any
) -> None:
    fed = federation((6, 6), model=two_norms_with_dropout, lr=0.1, momentum=0.9)
    parked = last_model(fed, around(FedTAN(fraction_evaluate=0.0)), 3)
    monkeypatch.setattr("fedbn_flwr.client.layerwise.parked_rounds", Forgetful())
    assert same(parked, last_model(fed, around(FedTAN(fraction_evaluate=0.0)), 3))


@pytest.mark.parametrize("name", [{}, {protocol.RUN: "the same"}], ids=["own names", "one name"])
def test_two_runs_in_one_process_take_turns_between_two_exchanges(
    federation: Federations, name: dict[str, str]
) -> None:
    """The nodes of both have the same ids. `start` names each run; with one name, each ends the other's rounds."""
    fed, other = (federation(sizes, model=two_norms_with_dropout, lr=0.1) for sizes in ((6, 6), (8, 5)))

    def run(fed: Any, grid: LocalGrid) -> dict[str, np.ndarray]:
        models: list[ArrayRecord] = []
        strategy = FedTAN(fraction_evaluate=0.0)
        config = ConfigRecord(name)
        strategy.start(grid, fed.arrays(), 1, train_config=config, evaluate_fn=lambda _, model: models.append(model))
        return dict(unpack(models[-1]))

    inside: list[dict[str, np.ndarray]] = []

    class TakingTurns(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            sent = list(messages)
            if sent and config_of(sent[0].content).get(protocol.EXCHANGE_STEP):
                inside.append(run(other, other.grid()))
            return super().send_and_receive(sent, timeout=timeout)

    found = run(fed, TakingTurns(fed.app(), 2))
    assert same(found, run(fed, fed.grid()))
    assert len(inside) == 4, "one before each exchange but the first, and before training"
    assert all(same(each, run(other, other.grid())) for each in inside)


def test_a_round_that_the_server_has_given_up_leaves_nothing_in_the_client_s_state(federation: Federations) -> None:
    fed = federation((6, 6, 6), batches=1, model=two_norms, lr=0.1, steps=1)

    def lose(messages: list[Message], replies: list[Message]) -> list[Message]:
        configs = [config for message in messages for config in message.content.config_records.values()]
        exchanging = any(protocol.EXCHANGE_STEP in config for config in configs)
        return [each for each in replies if each.metadata.src_node_id != 2 or not exchanging]

    grid, rule = fed.grid(), FedTANII(fedtan_rounds=1, fraction_evaluate=0.0)
    rule.start(Changed(grid, lose), fed.arrays(), num_rounds=2)
    contexts = grid.contexts()
    assert contexts is not None
    assert [key for key in contexts[2].state if "exchange" in key or "layerwise" in key] == []


def test_too_few_answers_to_an_exchange_end_the_run_with_reasons(federation: Federations) -> None:
    fed = federation((6, 6), model=two_norms)

    app = failing(fed, lambda client, config: client == 1, OSError("the disk is gone"))
    with pytest.raises(RunFailed, match=r"client 1 could not take part.*the disk is gone"):
        FedTAN(fraction_evaluate=0.0).start(LocalGrid(app, 2), fed.arrays(), num_rounds=1)


def test_clients_that_share_one_model_are_refused(federation: Federations) -> None:
    """The rounds of the clients overlap, so one model cannot serve two of them."""
    fed = federation((6, 6), model=two_norms)
    model = two_norms()

    def make(context: Any) -> BNClient:
        return BNClient(model, fed.data[int(context.node_config["partition-id"])], context=context)

    with pytest.raises(RunFailed, match="another client is in the middle of a round with this very model"):
        FedTAN(fraction_evaluate=0.0).start(LocalGrid(client_app(make), 2), fed.arrays(), num_rounds=1)
    FedAvg(fraction_evaluate=0.0).start(LocalGrid(client_app(make), 2), fed.arrays(), num_rounds=1)  # without overlap


def test_a_client_with_another_model_is_named(federation: Federations, flower_log: pytest.LogCaptureFixture) -> None:
    fed = federation((6, 6, 6), model=two_norms)
    other = federation((6, 6, 6))

    def make(context: Any) -> Any:
        return (other if context.node_config["partition-id"] == 2 else fed).make_client(context)

    with pytest.raises(RunFailed, match="client 2"):
        FedTAN(fraction_evaluate=0.0, min_train_nodes=3).start(
            LocalGrid(client_app(make), 3), fed.arrays(), num_rounds=1
        )


class OwnNorm(nn.Module):
    """A batch norm for each client (domain-specific batch norm)."""

    def __init__(self, used: int | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(2))
        self.classify, self.used = nn.Linear(32, 3), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        y: torch.Tensor = self.classify(x if self.used is None else self.norms[self.used](x))
        return y


@pytest.mark.parametrize(
    ("used", "says"),
    [
        (int, r"client 1 \(node 2\): it sent moments of the layer 'norms\.1' .*, but client 0 sent .* 'norms\.0'"),
        (lambda _: None, "no batch norm ran in the forward pass of this client's model"),
    ],
    ids=["another layer", "none"],
)
def test_clients_that_pass_through_different_layers_are_named(
    federation: Federations, used: Callable[[int], int | None], says: str
) -> None:
    fed = federation((8, 8))

    def make(context: Any) -> BNClient:
        number = int(context.node_config["partition-id"])
        return BNClient(OwnNorm(used(number)), fed.data[number], context=context)

    strategy, model = FedTAN(fraction_evaluate=0.0), ArrayRecord(OwnNorm(0).state_dict())
    with pytest.raises(RunFailed, match=says):
        strategy.start(LocalGrid(client_app(make), 2), model, num_rounds=1)


class SkipsTheFirst(Wrapper):
    def incoming(self, round: Round, messages: Sequence[Message]) -> Sequence[Message]:
        if round.number == 1:
            raise RoundSkipped("it is the first")
        return messages


def test_the_carrier_of_a_skipped_round_has_no_part_in_a_round_without_exchanges(federation: Federations) -> None:
    fed = federation((6, 6), batches=1, model=two_norms, lr=0.1, steps=1)
    finished: list[int] = []

    class Noting(ByMessages):
        def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
            finished.append(len(replies))
            return replies

    rule = FedTANII(fraction_evaluate=0.0, fedtan_rounds=1)
    rule.base.service = Noting
    SkipsTheFirst(rule).start(fed.grid(), fed.arrays(), num_rounds=2)
    assert finished == []


def test_fedtan_ii_is_fedtan_then_frozen_statistics(federation: Federations) -> None:
    fed = federation((6, 6, 6), batches=1, model=two_norms, dtype=torch.float64, lr=0.1, steps=1)
    rounds: list[int] = []
    models: list[dict[str, np.ndarray]] = []
    metered = MeteredGrid(fed.grid())

    def note(server_round: int, arrays: ArrayRecord) -> None:
        rounds.append(metered.take().communication_rounds)
        models.append(unpack(arrays))

    FedTANII(fraction_evaluate=0.0, fedtan_rounds=2).start(metered, fed.arrays(), num_rounds=4, evaluate_fn=note)
    assert rounds == [0, 5, 5, 1, 1]
    assert distance(models[2], centralised(fed, 2, lr=0.1)) < 1e-10
    # The twin of the other rounds: centralised SGD with batch norm in evaluation mode.
    twin = copy.deepcopy(fed.model)
    twin.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in models[2].items()}, strict=False)
    twin.train()
    twin[1].eval(), twin[4].eval()
    sgd(twin, [union(fed)] * 2, lr=0.1)
    assert distance(models[4], {key: value.numpy() for key, value in twin.state_dict().items()}) < 1e-10
