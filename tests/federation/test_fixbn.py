"""FixBN: ordinary batch norm up to round T*, then frozen statistics."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections import defaultdict
from functools import partial
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.strategies import (
    HBN,
    FedAvg,
    FedBN,
    FedTAN,
    FedTANII,
    FixBN,
    MeanStatistics,
    Private,
    Secure,
    SiloBN,
)
from tests.support.federations import Arrays, Federations, failing, models_of, near, same
from tests.support.plugin import RecordingGrid
from tests.support.records import between
from tests.support.twins import sgd, union

STATISTICS = {"1.running_mean", "1.running_var"}
AFFINE = {"1.weight", "1.bias"}
WEIGHTS = {"0.weight", "4.weight", "4.bias"}
FREEZE = "fedbn.fixbn-freeze"  # the key of clients' config


def moved(before: Arrays, after: Arrays) -> set[str]:
    return {key for key in before if before[key].tobytes() != after[key].tobytes()}


def freezes(fed: Any, strategy: Any, rounds: int) -> list[str]:
    """The roles that clients were asked to freeze in each round."""
    grid = RecordingGrid(fed.app(), len(fed.data))
    models_of(fed, strategy, rounds, grid=grid)
    asked = {each.config["server-round"]: each.config.get(FREEZE, "") for each in grid.sent if each.kind == "train"}
    return [asked[number] for number in range(1, rounds + 1)]


# --- the round of the freeze -------------------------------------------------


@pytest.mark.parametrize(
    ("given", "free"), [(0, 0), (1, 1), (3, 3), (4, 4), (0.5, 2), (0.0, 0), (1.0, 4), (0.74, 2), (0.75, 3), (None, 2)]
)
def test_clients_are_asked_to_freeze_after_round_t(federation: Federations, given: float | None, free: int) -> None:
    """Half of the rounds is the default."""
    strategy = FixBN(FedAvg(fraction_evaluate=0.0), **({} if given is None else {"freeze_round": given}))
    assert freezes(federation((4, 4)), strategy, 4) == [""] * free + ["statistics"] * (4 - free)
    assert strategy.notes() == {"freeze_round": free, "frozen": ["statistics"]}


@pytest.mark.parametrize("fraction", [0.07, 0.29, 0.5, 0.57, 0.58])
def test_a_fraction_of_a_hundred_rounds_is_the_round_it_names(federation: Federations, fraction: float) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    strategy = FixBN(FedAvg(), freeze_round=fraction)
    strategy.begin(100, federation().arrays())
    assert strategy.notes()["freeze_round"] == round(fraction * 100)


def test_evaluation_is_not_asked_to_freeze(federation: Federations) -> None:
    fed = federation((4, 4))
    grid = RecordingGrid(fed.app(), 2)
    models_of(fed, FixBN(FedAvg(), freeze_round=0), 1, grid=grid)
    assert [each.kind for each in grid.sent if FREEZE in each.config] == ["train"] * 2
    assert grid.count("evaluate") == 2


def test_freezing_changes_what_is_learned_but_after_the_last_round(federation: Federations) -> None:
    fed = federation((8, 12), momentum=0.9)
    plain, early, *late = (
        models_of(fed, rule, 3)[-1] for rule in (FedAvg(), *(FixBN(FedAvg(), freeze_round=at) for at in (1, 3, 1.0)))
    )
    assert moved(plain, early) >= WEIGHTS | AFFINE
    assert [moved(plain, each) for each in late] == [set(), set()]


def change(before: Arrays, after: Arrays) -> float:
    """dBN of a round with one batch norm, channel by channel in Python's floats."""
    means = [[float(value) for value in model["1.running_mean"]] for model in (before, after)]
    variances = [[float(value) + 1e-5 for value in model["1.running_var"]] for model in (before, after)]
    shifts = [(old - new) / math.sqrt(var) for old, new, var in zip(*means, variances[1], strict=True)]
    logs = [math.log(old / new) for old, new in zip(*variances, strict=True)]
    return math.sqrt(statistics.fmean(each**2 for each in shifts) + statistics.fmean(each**2 for each in logs))


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("key", ["below", "mean_below"])
def test_it_freezes_once_the_changes_of_the_statistics_vary_little(
    federation: Federations, window: int, key: str
) -> None:
    """Appendix B.6, by hand from what the clients of the same training without a freeze send, or from their mean."""
    fed = federation((8, 12))
    sent = defaultdict[int, list[Arrays]](list)
    app = between(fed.app(), lambda _, reply, partition: sent[partition].append(unpack(reply["arrays"])))
    received = models_of(fed, FedAvg(fraction_evaluate=0.0), 8, app)
    ends = {"below": sent, "mean_below": {-1: received[1:]}}[key]
    changes = {client: [*map(change, received, after)] for client, after in ends.items()}
    last = range(window, 8)
    variances = [max(statistics.pvariance(each[at - window : at]) for each in changes.values()) for at in last]
    tau = statistics.fmean(sorted(variances)[2:4])  # between two, so that rounding doesn't decide
    expected = next(at for at, variance in zip(last, variances, strict=True) if variance < tau)
    strategy = FixBN(FedAvg(), freeze_round={"window": window, key: tau})
    found = models_of(fed, strategy, 8)
    assert strategy.notes() == {"freeze_round": expected, "frozen": ["statistics"]}
    frozen = [not moved(before, after) & STATISTICS for before, after in itertools.pairwise(found)]
    assert frozen == [number > expected for number in range(1, 9)]
    for client, each in changes.items():
        assert strategy.memory.changes[client] == pytest.approx(each[expected - window : expected], rel=1e-6)


def test_a_client_that_was_away_settles_by_its_own_rounds(federation: Federations) -> None:
    """Client 1 misses the second round, so its window of three is full after the fourth."""
    fed = federation((8, 8, 8))
    app = failing(fed, lambda client, config: client == 1 and config["server-round"] == 2, OSError("away"))
    strategy = FixBN(FedAvg(fraction_evaluate=0.0), freeze_round={"window": 3, "below": 1e9})
    models_of(fed, strategy, 5, app)
    assert strategy.notes()["freeze_round"] == 4


FBN: dict[str, Any] = {"freeze_round": 0, "refresh": 0.1}
WINDOWS = r"or \{window: W, below: tau\} or \{window: W, mean_below: tau\}"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: FixBN(FedAvg(), freeze_round={"window": 5}), WINDOWS),
        (lambda: FixBN(FedAvg(), freeze_round={"window": 5, "below": 0}), WINDOWS),
        (lambda: FixBN(FedAvg(), freeze_round={"window": 5, "under": 1}), WINDOWS),
        (lambda: FixBN(FedAvg(), freeze_round={"below": 5, "mean_below": 1}), WINDOWS),
        (lambda: FixBN(FedAvg(), freeze_round={"window": 1, "below": 1}), "its window isn't a whole number >= 2"),
        (lambda: FixBN(FedAvg(), freeze_round={"window": 2.5, "below": 1}), "its window isn't a whole number >= 2"),
        (lambda: FixBN(FedAvg(), freeze_round={"window": 9, "below": 1}), "'window': 9.*, but there are 3 rounds"),
        (lambda: FixBN(FedAvg(), freeze_round=4), "freeze_round is 4, but there are 3 rounds; expected at most 3"),
        (lambda: FixBN(SiloBN(), freeze_round={"window": 2, "below": 1}), "with SiloBN statistics stay on the clients"),
        (lambda: Secure(FixBN(FedAvg(), freeze_round={"window": 2, "below": 1})), "with mean_below their mean"),
        (lambda: FixBN(FedAvg(), **FBN, freeze="affine"), "refresh is 0.1, .*freeze has only 'affine'"),
        (lambda: FixBN(FedBN(), refresh=0.1), "with FedBN statistics stay on the clients"),
        (lambda: FixBN(FedTAN(), refresh=0.1), "FedTAN exchanges those of a round's first step"),
        (lambda: FixBN(FedAvg(), refresh=0.0), "refresh is 0.0"),
        (lambda: FixBN(FixBN(FedAvg()), **FBN), "freeze the same statistics; leave one"),
        (lambda: FixBN(FixBN(FedAvg())), r"FixBN\(freeze_round=0.5, refresh=None\) freeze the same statistics"),
        (lambda: FixBN(FixBN(FedAvg(), **FBN)), r"FixBN\(freeze_round=0, refresh=0.1\) freeze the same statistics"),
        (lambda: Private(FixBN(FedAvg(), **FBN)), "pooled"),
        (
            lambda: FixBN(MeanStatistics(FedAvg(), statistics="median"), refresh=0.1),
            "MeanStatistics takes the median .*, and with refresh FixBN would pool their statistics",
        ),
        (lambda: FixBN(flower.FedMedian(), refresh=0.1), "FedMedian compares the clients' models, and with refresh"),
        (lambda: FixBN(HBN(), refresh=0.1), "HBN weights statistics by the sizes of the batches .*, and with refresh"),
        (lambda: FixBN(flower.FedAdam()), r"FedAdam changes .* FixBN\(MeanStatistics\(FedAdam\(...\)\), ...\)"),
        (lambda: FixBN(flower.FedAvgM()), "FedAvgM changes statistics"),
        (lambda: FixBN(private(flower.FedAdam())), "contains FedAdam, which changes statistics"),
        (lambda: FixBN(private(FedBN())), "contains FedBN, which keeps arrays on the clients.*cannot wrap it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_an_error(federation: Federations, make: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        make().begin(3, federation().arrays())


# --- the frozen tensors ------------------------------------------------------


@pytest.mark.parametrize(
    ("freeze", "still"),
    [
        (("statistics",), STATISTICS),
        ("statistics", STATISTICS),
        (("affine",), AFFINE),
        (("statistics", "affine"), STATISTICS | AFFINE),
    ],
)
def test_only_what_is_frozen_does_not_change(federation: Federations, freeze: Any, still: set[str]) -> None:
    models = models_of(federation((8, 12, 6)), FixBN(FedAvg(), freeze_round=2, freeze=freeze), 5)
    everything = STATISTICS | AFFINE | WEIGHTS
    changes = [moved(*pair) for pair in itertools.pairwise(models)]
    assert changes == [everything] * 2 + [everything - still] * 3


def test_two_may_freeze_one_after_the_other(federation: Federations) -> None:
    roles: list[tuple[Any, Any]] = [("affine", "statistics"), ("statistics", "affine")]
    for inner, outer in roles:
        both = FixBN(FixBN(FedAvg(fraction_evaluate=0.0), freeze_round=1, freeze=inner), freeze_round=2, freeze=outer)
        assert freezes(federation(), both, 3) == ["", inner, "affine,statistics"]


def test_round_zero_freezes_what_the_model_came_with(federation: Federations) -> None:
    models = models_of(federation(), FixBN(FedAvg(), freeze_round=0), 2)
    assert models[-1]["1.running_mean"].tolist() == [0] * 4
    assert models[-1]["1.running_var"].tolist() == [1] * 4


def test_a_fraction_that_is_round_zero_is_reported(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    strategy = FixBN(FedAvg(), freeze_round=0.5)
    strategy.begin(1, federation((8, 8)).arrays())
    assert (
        "freeze_round=0.5 of 1 rounds is round 0: the statistics are frozen at their initial values" in flower_log.text
    )


def test_one_full_batch_step_after_the_freeze_equals_centralised_sgd(federation: Federations) -> None:
    """Equal clients, one step each: the mean of their gradients is that of the union of their batches.

    The twin is one model on the union with its batch norm in evaluation mode, in float64.
    """
    fed = federation((6, 6, 6), batches=1, dtype=torch.float64, lr=0.3, steps=1)
    models = models_of(fed, FixBN(FedAvg(), freeze_round=2), 6)
    twin = copy.deepcopy(fed.model)
    twin.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in models[2].items()}, strict=False)
    twin.train()
    twin[1].eval()
    for server_round in (3, 4, 5, 6):
        near(models[server_round], sgd(twin, [union(fed)], lr=0.3), rtol=1e-10, atol=1e-10)
    assert np.abs(models[6]["0.weight"] - models[2]["0.weight"]).max() > 1e-3, "something was learned"


# --- other rules and clients -------------------------------------------------


def ignoring(fed: Any, partition: int) -> ClientApp:
    """A client that ignores the key."""
    inner, app = fed.app(), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == partition:
            message.content["config"].pop(FREEZE, None)
        return inner(message, context)

    return app


@pytest.mark.parametrize(("freeze", "key"), [("statistics", "1.running_mean"), ("affine", "1.weight")])
def test_a_client_that_ignores_the_freeze_is_refused_by_name(federation: Federations, freeze: Any, key: str) -> None:
    fed = federation((4, 4, 4))
    base = FedAvg(fraction_evaluate=0.0, min_train_nodes=3)
    words = rf"it changed {key!r}, which is frozen.*{FREEZE}"
    with pytest.raises(RunFailed, match=rf"^round 2: 2 of 3 clients sent .*, 3 are needed(.|\n)*\(node 2\): {words}"):
        models_of(fed, FixBN(base, freeze_round=1, freeze=[freeze]), 2, ignoring(fed, 1))


def test_the_round_continues_without_a_client_that_ignores_the_freeze(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((4, 4, 4))
    models = models_of(fed, FixBN(FedAvg(fraction_evaluate=0.0), freeze_round=1), 2, ignoring(fed, 1))
    assert moved(models[1], models[2]) == WEIGHTS | AFFINE
    assert "it changed '1.running_mean', which is frozen" in flower_log.text


@pytest.mark.parametrize("fails", [lambda config: FREEZE in config, lambda config: True])
def test_a_client_that_fails_in_a_frozen_round_or_cannot_be_made_is_left_out(
    federation: Federations, fails: Any
) -> None:
    """As in any round, the others may suffice."""
    fed = federation((4, 4, 4))
    app = failing(fed, lambda client, config: client == 2 and fails(config), OSError("gone"))
    models = models_of(fed, FixBN(FedAvg(), freeze_round=1), 2, app)
    assert moved(models[1], models[2]) == WEIGHTS | AFFINE


def test_around_flower_s_own_fedavg_and_fedprox(federation: Federations) -> None:
    fed = federation((8, 12, 6), dtype=torch.float64)
    ours, theirs, proximal = (
        models_of(fed, FixBN(base, freeze_round=1), 3)
        for base in (FedAvg(), flower.FedAvg(), flower.FedProx(proximal_mu=0.5))
    )
    assert moved(theirs[1], theirs[3]) == moved(proximal[1], proximal[3]) == WEIGHTS | AFFINE
    near(theirs[3], ours[3], rtol=1e-10, atol=1e-12)


def test_a_server_optimiser_may_change_what_is_not_frozen() -> None:
    FixBN(MeanStatistics(flower.FedAdam()))
    FixBN(flower.FedAdam(), freeze=["affine"])


def private(strategy: flower.Strategy) -> flower.Strategy:
    """Flower's wrapper for differential privacy, with neither noise nor clipping."""
    return flower.DifferentialPrivacyServerSideFixedClipping(
        strategy, noise_multiplier=0.0, clipping_norm=1e6, num_sampled_clients=2
    )


def test_inside_a_strategy_of_flower_it_needs_a_round_as_an_int(federation: Federations) -> None:
    fed = federation()
    words = r"freeze_round=0\.5 is a share of the rounds, .* another strategy wraps this one(.|\n)*an int"
    with pytest.raises(SettingsError, match=words):
        models_of(fed, private(FixBN(FedAvg(), freeze_round=0.5)), 2)
    models = models_of(fed, private(FixBN(FedAvg(), freeze_round=1)), 3)
    assert moved(models[2], models[3]) == WEIGHTS | AFFINE


def test_a_client_that_keeps_its_statistics_finds_them_in_its_first_round_after_the_freeze(
    federation: Federations,
) -> None:
    fed = federation((8, 8))
    seen: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def make(context: Context, config: ConfigRecord) -> BNClient:
        partition = int(context.node_config["partition-id"])
        if partition == 1 and config["server-round"] < 3:
            raise RuntimeError("not there yet")
        client = fed.make_client(context)
        if FREEZE in config:
            saved = client.state.load("fedbn.local").get("1.running_mean")
            seen[partition].append(np.zeros(4) if saved is None else saved.copy())
        return client

    strategy = FixBN(SiloBN(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0), freeze_round=1)
    strategy.start(fed.grid(client_app(make)), fed.arrays(), num_rounds=5)
    assert not seen[1][0].any()
    for values in (seen[0], seen[1][1:]):
        assert len(values) >= 2
        assert (values[0] != 0).any()
        assert all(each.tobytes() == values[0].tobytes() for each in values)


@pytest.mark.parametrize(
    "make", [partial(FixBN, FedAvg(), freeze_round=2), partial(FedTANII, min_batch=1, fedtan_rounds=2)]
)
def test_the_rate_may_fall_with_the_freeze(federation: Federations, make: Any) -> None:
    """As if it were a function of the round on the client."""
    fed = federation((8, 12), lr=0.1)
    found = models_of(fed, make(lr_factor=0.5), 4)[-1]
    fed.options["lr"] = lambda server_round: 0.1 if server_round <= 2 else 0.05
    assert same(found, models_of(fed, make(), 4)[-1])
