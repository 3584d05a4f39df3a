"""FedBS: weighted by loss until the losses are alike, then FedProx with equal weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import FedAvg, FedBS
from tests.support.federations import Federations, near, same
from tests.support.records import between

Arrays = dict[str, np.ndarray]
Losses = Callable[[int, int], Any]  # of (round, partition); None: the reply has no loss


class Trace:
    """A run whose replies report the given losses."""

    def __init__(self, fed: Any, strategy: Any, rounds: int, losses: Losses) -> None:
        self.models: list[Arrays] = []
        self.replies: dict[tuple[int, int], Arrays] = {}
        self.mu: list[float | None] = [None] * rounds

        def hook(message: RecordDict, reply: RecordDict, partition: int) -> None:
            server_round = int(message["config"]["server-round"])
            self.mu[server_round - 1] = message["config"].get("proximal-mu")
            self.replies[server_round, partition] = unpack(reply["arrays"])
            metrics, loss = dict(reply["metrics"]), losses(server_round, partition)
            del metrics["train-loss"]
            reply["metrics"] = MetricRecord(metrics if loss is None else metrics | {"train-loss": loss})

        def keep(server_round: int, arrays: ArrayRecord) -> None:
            self.models.append(unpack(arrays))

        strategy.start(fed.grid(between(fed.app(), hook)), fed.arrays(), num_rounds=rounds, evaluate_fn=keep)

    def mean(self, server_round: int, weights: Sequence[float]) -> Arrays:
        """The weighted mean of a round's replies, in float64."""
        replies = [self.replies[server_round, i] for i in range(len(weights))]
        return {key: np.average([reply[key] for reply in replies], axis=0, weights=weights) for key in replies[0]}


def strategy(**options: Any) -> FedBS:
    return FedBS(fraction_evaluate=0.0, **options)


def assert_close(found: Arrays, expected: Arrays) -> None:
    near(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("losses", [[3.0, 1.0], [0.0, 2.0]])
def test_the_mean_is_weighted_by_the_losses(federation: Federations, losses: list[float]) -> None:
    """For any numbers of examples, with losses 3 and 1: (3 w_0 + w_1) / 4, statistics of batch norm included."""
    trace = Trace(federation((8, 12), dtype=torch.float64), strategy(), 1, lambda r, i: losses[i])
    assert_close(trace.models[1], trace.mean(1, losses))
    assert "1.running_var" in trace.models[1]


def test_the_losses_are_those_that_training_saw(federation: Federations) -> None:
    fed = federation((8, 12), dtype=torch.float64)
    seen: dict[int, float] = {}

    def hook(message: RecordDict, reply: RecordDict, partition: int) -> None:
        seen[partition] = reply["metrics"]["train-loss"]

    class Weighted(FedBS):
        def after_round(self, round: Any, replies: Any, weights: Any) -> None:
            self.used_weights = weights

    rule = Weighted(fraction_evaluate=0.0)
    rule.start(fed.grid(between(fed.app(), hook)), fed.arrays(), num_rounds=1)
    assert rule.used_weights == [seen[0], seen[1]]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_equal_losses_and_equal_sizes_equal_fedavg_bit_for_bit(
    federation: Federations, clients: int, loss: float
) -> None:
    """In float32; in float64 the weights 6 and 1 round differently in the last bit."""
    fed = federation((6,) * clients)
    ours = Trace(fed, strategy(), 3, lambda r, i: loss)
    theirs = Trace(fed, FedAvg(fraction_evaluate=0.0), 3, lambda r, i: loss)
    assert same(theirs.models[3], ours.models[3])


# --- the switch --------------------------------------------------------------


def test_after_the_switch_it_is_fedprox_with_equal_weights(federation: Federations) -> None:
    fed = federation((8, 12), dtype=torch.float64)
    rule = strategy(patience=2, proximal_mu=0.5)
    trace = Trace(fed, rule, 4, lambda r, i: [1.05, 1.0][i])
    assert trace.mu == [None, None, 0.5, 0.5]
    assert rule.notes() == {"switch_round": 3}
    assert_close(trace.models[2], trace.mean(2, [1.05, 1.0]))
    assert_close(trace.models[3], trace.mean(3, [1, 1]))
    assert_close(trace.models[4], trace.mean(4, [1, 1]))


def test_the_proximal_term_holds_the_clients(federation: Federations) -> None:
    fed = federation((8, 8), dtype=torch.float64)
    free, held = (Trace(fed, strategy(patience=1, proximal_mu=mu), 2, lambda r, i: 1.0).models[1:] for mu in (0.0, 5.0))
    moved = [float(np.abs(two["4.weight"] - one["4.weight"]).sum()) for one, two in (free, held)]
    assert moved[1] < moved[0]


@pytest.mark.parametrize(
    ("spreads", "options", "first"),
    [
        # By default five rounds in a row; a round of unlike losses restarts the count.
        ([0.05] * 5, {}, 6),
        ([0.05] * 4, {}, None),
        ([0.05, 0.05, 0.5, 0.05, 0.05, 0.05, 0.05], {"patience": 3}, 7),
        ([0.05, 0.5] * 3, {"patience": 2}, None),
        # Losses 2.25 and 1.75: the deviation is 0.25 for the population, 0.354 for a sample. It may equal epsilon.
        ([0.25], {"patience": 1, "epsilon": 0.25}, 2),
        ([0.25], {"patience": 1, "epsilon": 0.24}, None),
        # There is no way back.
        ([0.0, 0.0, 1.5, 1.5], {"patience": 2}, 3),
    ],
)
def test_it_switches_after_rounds_whose_losses_are_alike(
    federation: Federations, spreads: list[float], options: dict[str, Any], first: int | None
) -> None:
    """The first round of FedProx where two clients' losses have these standard deviations."""
    rule = strategy(**options)
    Trace(federation((4, 4)), rule, len(spreads), lambda r, i: 2.0 + (-1) ** i * spreads[r - 1])
    assert rule.notes()["switch_round"] == first


# --- losses that cannot be weights -------------------------------------------


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "lack 'train-loss'; they have 'num-examples'"),
        (-0.5, "'train-loss' = -0.5; expected a number, zero or more"),
        (float("nan"), "'train-loss' is nan"),
        (float("inf"), "'train-loss' is inf"),
    ],
)
def test_a_reply_whose_loss_cannot_be_a_weight_is_left_out_and_named(
    federation: Federations, flower_log: pytest.LogCaptureFixture, loss: Any, words: str
) -> None:
    fed = federation((8, 12, 6), dtype=torch.float64)
    trace = Trace(fed, strategy(), 1, lambda r, i: [3.0, loss, 1.0][i])
    assert_close(trace.models[1], trace.mean(1, [3, 0, 1]))
    (line,) = [r.getMessage() for r in flower_log.records if "left out" in r.getMessage()]
    assert "client 1" in line
    assert words in line


def test_fedprox_needs_no_losses(federation: Federations) -> None:
    fed = federation((8, 12), dtype=torch.float64)
    trace = Trace(fed, strategy(patience=1), 2, lambda r, i: 1.0 if r == 1 else None)
    assert_close(trace.models[2], trace.mean(2, [1, 1]))


def test_no_usable_loss_at_all_ends_the_run(federation: Federations) -> None:
    with pytest.raises(RunFailed, match=r"0 of 2 clients sent a usable reply(.|\n)*lack 'train-loss'"):
        Trace(federation(), strategy(), 1, lambda r, i: None)


def test_a_round_of_one_client_does_not_count_as_losses_that_are_alike(federation: Federations) -> None:
    rule = strategy(epsilon=0.0, patience=2, min_train_nodes=1)
    Trace(federation(), rule, 4, lambda number, client: None if client else 1.0)
    assert rule.memory.switch_round is None
