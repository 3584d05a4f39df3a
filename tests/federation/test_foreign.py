"""Our client under Flower's own strategies, and our strategies with a client that was not written for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partialmethod
from itertools import pairwise
from typing import Any

import flwr.server.strategy as old
import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.client.rule import BY_KEY, known_keys
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedBS,
    FedProx,
    FedTAN,
    FixBN,
    GlobalMomentum,
    MeanStatistics,
    Scaffold,
    SiloBN,
    Standalone,
    as_rule,
    restore,
    state_of,
)
from tests.support.command import ROOT, python_blocks
from tests.support.federations import Federations, near, same
from tests.support.marks import slow_except
from tests.support.plugin import CLIENTS, PACKAGE, PROJECT, Project, RecordingGrid, copied, imported

Arrays = dict[str, np.ndarray]
SIZES = (8, 12, 6, 10, 14)
ROUNDS = 6

OPTIMISERS: dict[str, Callable[[], flower.Strategy]] = {
    "FedAdam": lambda: flower.FedAdam(eta=0.05),
    "FedYogi": lambda: flower.FedYogi(eta=0.05),
    "FedAdagrad": lambda: flower.FedAdagrad(eta=0.05),
    "FedAvgM": lambda: flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
}
PER_COORDINATE: dict[str, Callable[[], flower.Strategy]] = {
    "FedMedian": lambda: flower.FedMedian(),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.2),
}
STRATEGIES: dict[str, Callable[[], flower.Strategy]] = {
    "FedAvg": lambda: flower.FedAvg(),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    **PER_COORDINATE,
    **{f"MeanStatistics({name})": lambda make=make: MeanStatistics(make()) for name, make in OPTIMISERS.items()},
}


def variances(arrays: Arrays) -> Arrays:
    return {key: value for key, value in arrays.items() if key.endswith("running_var")}


def whole(fed: Any) -> ArrayRecord:
    """The whole state dict, with the counters: what Flower's templates send."""
    return ArrayRecord(fed.model.state_dict())


# --- our client under Flower's strategies ------------------------------------


@pytest.mark.parametrize("arrays", slow_except({"whole"}, ["whole", "without counters"]))
@pytest.mark.parametrize("name", STRATEGIES)
def test_flower_s_strategy_drives_our_client(federation: Federations, name: str, arrays: str) -> None:
    fed = federation(SIZES, lr=0.05, momentum=0.9)
    grid = RecordingGrid(fed.app(), len(SIZES))
    models: list[Arrays] = []
    result = STRATEGIES[name]().start(
        grid,
        whole(fed) if arrays == "whole" else fed.arrays(),
        num_rounds=ROUNDS,
        evaluate_fn=lambda server_round, record: models.append(unpack(record)),
    )
    assert grid.errors() == []
    assert grid.count("train") == grid.count("evaluate") == ROUNDS * len(SIZES)
    assert set(result.evaluate_metrics_clientapp) == set(range(1, ROUNDS + 1))
    assert len(models) == ROUNDS + 1
    for before, after in pairwise(models):
        assert list(after) == list(before)
        assert (after["0.weight"] != before["0.weight"]).any(), "each round moves the model"
        assert all(np.isfinite(value).all() for value in after.values())
        assert all(value.min() >= 0 for value in variances(after).values())


def replies_of(grid: RecordingGrid, strategy: flower.Strategy, server_round: int, arrays: ArrayRecord) -> list[Message]:
    return list(grid.send_and_receive(strategy.configure_train(server_round, arrays, ConfigRecord(), grid)))


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("base", [flower.FedAvg, FedAvg])
def test_statistics_have_the_weights_of_the_strategy_inside(base: type[Strategy], counts: bool) -> None:
    """Four clients send the values 1 to 4; the metric `n`, 1000 for the first and else 1, weights them."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        arrays = {key: np.full_like(value, partition + 1) for key, value in unpack(message.content["arrays"]).items()}
        metrics = MetricRecord({"n": 1 if partition else 1000} | ({"num-examples": 1} if counts else {}))
        content = RecordDict({"arrays": ArrayRecord({k: Array(v) for k, v in arrays.items()}), "metrics": metrics})
        return Message(content, reply_to=message)

    names = ("fc.weight", "bn.running_mean", "bn.running_var")
    arrays = ArrayRecord({name: Array(np.zeros(2)) for name in names})
    strategy = MeanStatistics(base(weighted_by_key="n", fraction_evaluate=0.0))  # type: ignore[call-arg]
    result = unpack(strategy.start(LocalGrid(app, 4), arrays, num_rounds=1).arrays)
    near(result, dict.fromkeys(names, (1000 + 2 + 3 + 4) / 1003), rtol=1e-12)


def test_a_weight_that_no_client_reports_ends_the_run(federation: Federations) -> None:
    """Flower's FedAvg inside would aggregate nothing, and the run would keep the initial model."""
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match=r"round 1: 0 of 2 clients sent a usable reply, .*:\n.* lack 'n'"):
        FixBN(flower.FedAvg(weighted_by_key="n"), freeze_round=1).start(fed.grid(), fed.arrays(), num_rounds=2)


EXACT: dict[str, Callable[[], flower.Strategy]] = {
    **OPTIMISERS,
    **PER_COORDINATE,
    "Krum": STRATEGIES["Krum"],
    "MultiKrum": STRATEGIES["MultiKrum"],
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.05, q=0.5, train_loss_key="train-loss"),
    "private FedAvg": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=len(SIZES)
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_mean_statistics_hides_statistics_and_counters_from_flower_s_strategies(
    federation: Federations, name: str
) -> None:
    """They receive the model without the norms' state, of which it has sum_i n_i s_i / sum_i n_i."""
    fed = federation(SIZES, lr=0.05)
    grid, arrays = RecordingGrid(fed.app(), len(SIZES)), whole(fed)
    strategy, alone = MeanStatistics(EXACT[name]()), EXACT[name]()
    of_norms = [key for key, role in roles(arrays).items() if role in (Role.STATISTICS, Role.COUNTER)]

    def shown(arrays: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({key: value for key, value in arrays.items() if key not in of_norms})

    for server_round in (1, 2, 3):
        replies = replies_of(grid, strategy, server_round, arrays)
        # Flower asks clients in a random order; the wrapper passes on their replies in the order of partitions.
        replies.sort(key=lambda reply: reply.content["client"]["partition-id"])
        alone.configure_train(server_round, shown(arrays), ConfigRecord(), grid)
        for_it = copy.deepcopy(replies)
        for reply in for_it:
            reply.content["arrays"] = shown(reply.content["arrays"])
        expected, _ = alone.aggregate_train(server_round, for_it)
        ours, _ = strategy.aggregate_train(server_round, replies[::-1])
        assert ours is not None
        assert expected is not None
        found, clients = unpack(ours), [unpack(reply.content["arrays"]) for reply in replies]
        assert {k: v.dtype for k, v in found.items()} == {k: v.numpy().dtype for k, v in arrays.items()}
        near({k: found[k] for k in found if k not in of_norms},
             {k: v.numpy().astype(np.float32) for k, v in expected.items()})  # fmt: skip
        for key in of_norms:
            mean = np.average([client[key].astype(np.float64) for client in clients], axis=0, weights=SIZES)
            np.testing.assert_allclose(found[key], mean, rtol=1e-6, atol=1e-7)
        arrays = ours
    assert grid.errors() == []


def test_the_metrics_that_flower_s_strategies_average_are_those_of_the_model(federation: Federations) -> None:
    fed = federation((8, 12))
    result = flower.FedAvg().start(fed.grid(fed.app()), fed.arrays(), num_rounds=1)
    assert set(result.train_metrics_clientapp[1]) == {"train-loss"}
    assert set(result.evaluate_metrics_clientapp[1]) == {"loss", "accuracy"}


@pytest.mark.parametrize("cls", [flower.FedAvg, FedAvg])
def test_a_start_of_its_own_inside_another_strategy_is_refused(cls: type[Strategy]) -> None:
    """As in Flower's advanced examples. The wrapper starts the run, and would never call it."""
    announced: Any = type("Announced", (cls,), {"start": lambda self, *given, **options: cls.start(self, *given)})
    with pytest.raises(SettingsError, match=r"^Announced has start\(\) of its own, which FixBN around it would not"):
        FixBN(announced(), freeze_round=1)


class Logged(flower.FedAdam):
    """It appends to a list of its caller."""

    def __init__(self, log: list[float]) -> None:
        super().__init__()
        self.log = log

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        metrics = super().aggregate_evaluate(server_round, replies)
        self.log.append(float(metrics["loss"]))  # type: ignore[index, arg-type]
        return metrics


def test_a_wrapped_strategy_keeps_the_objects_that_it_was_given(federation: Federations) -> None:
    fed, log = federation((8, 12)), list[float]()
    wrapped = FixBN(MeanStatistics(Logged(log)), freeze_round=1)
    result = wrapped.start(fed.grid(), whole(fed), num_rounds=2)
    assert log == [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]


def with_falling_rate(cls: type[Strategy]) -> Any:
    """A strategy that halves the rate every 2 rounds, as that of Flower's tutorial does every 5."""

    class Falling(cls):  # type: ignore[misc, valid-type]
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            if server_round % 2 == 0:
                config["lr"] *= 0.5  # type: ignore[operator]
            return super().configure_train(server_round, arrays, config, grid)

    return Falling


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_falling_rate(flower.FedAdagrad)(),
        lambda: MeanStatistics(with_falling_rate(flower.FedAdagrad)()),
        lambda: FixBN(MeanStatistics(with_falling_rate(flower.FedAdagrad)()), freeze_round=2),
        lambda: with_falling_rate(FedAvg)(),
        lambda: with_falling_rate(FixBN)(FedAvg(), freeze_round=2),
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(
            FixBN(with_falling_rate(flower.FedAvg)(), freeze_round=2), 0.0, 1e6, 2
        ),
    ],
)
def test_a_rate_that_a_strategy_changes_stays_changed(federation: Federations, make: Any) -> None:
    fed = federation((8, 12), momentum=0.9)
    grid = RecordingGrid(fed.app(), 2)
    make().start(grid, whole(fed), num_rounds=5, train_config=ConfigRecord({"lr": 0.4}))
    rates = [message.config["lr"] for message in grid.sent if message.kind == "train"]
    assert rates[::2] == [0.4, 0.2, 0.2, 0.1, 0.1]


# --- our strategies inside and outside of others ------------------------------


class Outer(Strategy):
    """A strategy of another project around one of ours, whose rounds it starts itself."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner

    def configure_train(self, *given: Any) -> Any:
        return self.inner.configure_train(*given)

    def aggregate_train(self, *given: Any) -> Any:
        return self.inner.aggregate_train(*given)

    def configure_evaluate(self, *given: Any) -> Any:
        return self.inner.configure_evaluate(*given)

    def aggregate_evaluate(self, *given: Any) -> Any:
        return self.inner.aggregate_evaluate(*given)

    def summary(self) -> None:
        self.inner.summary()


@pytest.mark.parametrize(
    "make", [FedBN, lambda: GlobalMomentum(FedAvg()), lambda: FixBN(GlobalMomentum(Scaffold()), freeze_round=1)]
)
def test_a_second_run_inside_a_strategy_of_another_project_begins_without_the_state_of_the_first(
    federation: Federations, make: Any
) -> None:
    """And so equals one that our own start() begins."""
    fed, inner = federation((8, 12), momentum=0.9), make()
    grid, expected = fed.grid(), make().start(fed.grid(), fed.arrays(), num_rounds=3)
    for _ in range(2):
        run = Outer(inner).start(grid, fed.arrays(), num_rounds=3)
        assert same(unpack(run.arrays), unpack(expected.arrays))
        assert run.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp


class Twice(flower.FedAvg):
    def configure_train(self, *given: Any) -> Any:
        messages = [*super().configure_train(*given)]
        return [*messages, *(Message(each.content, each.metadata.dst_node_id, "train") for each in messages)]


def test_two_messages_to_one_client_are_an_error(federation: Federations) -> None:
    """Its replies would be one client's, of which one is used."""
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match=r"round 1: Twice sends 2 messages to node \d; expected one to each node"):
        FixBN(Twice(), freeze_round=1).start(fed.grid(), fed.arrays(), num_rounds=1)


def test_a_strategy_of_flower_trains_in_one_run_only(federation: Federations) -> None:
    """A second run would begin with the moments of the first."""
    fed, around = federation((8, 12)), FixBN(MeanStatistics(flower.FedAdam()), freeze_round=1)
    around.start(fed.grid(), fed.arrays(), num_rounds=1)
    with pytest.raises(SettingsError, match=r"^FedAdam has trained before, .* make a new one for each run$"):
        around.start(fed.grid(), fed.arrays(), num_rounds=1)


class Scheduled(flower.FedAvg):
    """It has an attribute that it fills in its first round with what cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Any = None


def test_a_resumed_strategy_of_flower_has_all_its_attributes(federation: Federations) -> None:
    arrays = federation((8, 12)).arrays()
    before, after = as_rule(Scheduled()), as_rule(Scheduled())
    for each in (before, after):
        each.begin(3, arrays)
    before.strategy.schedule = lambda number: 0.1
    restore(after, state_of(before))
    assert after.strategy.schedule is None


class Turning(flower.FedAvg):
    """It counts its evaluations in their config."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Any] = []

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        config["turn"] = int(config.get("turn", 0)) + 1  # type: ignore[arg-type]
        self.turns.append(config["turn"])
        return super().configure_evaluate(server_round, arrays, config, grid)


def test_an_evaluation_s_config_that_a_strategy_changes_stays_changed(federation: Federations) -> None:
    fed, theirs = federation((8, 12)), Turning()
    FixBN(theirs, freeze_round=2).start(fed.grid(), fed.arrays(), num_rounds=3)
    assert theirs.turns == [1, 2, 3]


def test_a_rule_inside_a_strategy_of_flower_begins_with_each_run(federation: Federations) -> None:
    """It knows the number of rounds, and rounds with losses that are alike are counted anew."""
    fed, begun = federation((8, 12)), list[int]()

    class Noting(FedBS):
        def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
            begun.append(num_rounds)
            super().begin(num_rounds, arrays)

    rule = Noting(epsilon=1e9, patience=3)
    inner = FixBN(rule, freeze_round=0.5)
    for rounds in (2, 4, 2):
        around = as_rule(flower.DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 2))
        around.start(fed.grid(), whole(fed), num_rounds=rounds)
        assert (begun.pop(), begun, inner.memory.switch_round) == (rounds, [], rounds // 2 + 1)
        assert rule.memory.switch_round == (4 if rounds == 4 else None)


def test_a_strategy_that_was_wrapped_works_on_its_own_as_before(federation: Federations) -> None:
    fed = federation((8, 12), lr=0.05)

    def make() -> FixBN:
        return FixBN(FedAvg(), freeze_round=2)

    base = make()
    MeanStatistics(base).start(fed.grid(), fed.arrays(), num_rounds=3)
    expected = unpack(make().start(fed.grid(), fed.arrays(), num_rounds=3).arrays)
    assert same(unpack(base.start(fed.grid(), fed.arrays(), num_rounds=3).arrays), expected)


# --- mixtures with Flower's old API -------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "found"),
    [(old.FedAvg(), r".*, a flwr\.server\.strategy\.\S*FedAvg"), (FedAvg, "<class .*FedAvg'>"), ("FedAvg", "'FedAvg'")],
)
def test_what_is_no_strategy_is_not_wrapped(strategy: Any, found: str) -> None:
    words = (
        r"^FixBN wraps an object of a flwr.serverapp.strategy.Strategy, for instance FixBN\(FedAvg\(\), ...\); found "
    )
    with pytest.raises(TypeError, match=words + found):
        FixBN(strategy)


@pytest.mark.parametrize("make", [FedAvg, Scaffold, lambda: FixBN(flower.FedAvg(), freeze_round=0)])
def test_clients_of_the_old_api_are_named_as_such(federation: Federations, make: Any) -> None:
    fed = federation((8, 12))
    app = ClientApp(client_fn=lambda context: fed.make_client(context).to_client())
    with pytest.raises(RunFailed, match=r"node 1, node 2: its ClientApp was made with a client_fn, .*\(docs"):
        make().start(LocalGrid(app, 2), fed.arrays(), num_rounds=1)


def test_an_unknown_argument_has_the_nearest_one_of_the_class_and_its_bases() -> None:
    with pytest.raises(TypeError, match="FedProx has no argument 'proximal'; did you mean 'proximal_mu'"):
        FedProx(proximal=0.1)
    with pytest.raises(TypeError) as caught:
        FedBN(frozen=True)
    known = str(caught.value).partition("known: ")[2].split(", ")
    assert {"global_norm", "seed", "bounds", "fraction_train"} <= {*known}
    assert "options" not in known


def test_an_error_of_all_clients_is_logged_once_with_its_reason(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """Flower's FedAvg ends such a run without an error and without a model."""
    fed = federation((8, 12))
    for data in fed.data:
        data.batches = [{"photo": images, "label": labels} for images, labels in data.batches]
    result = flower.FedAvg(fraction_evaluate=0.0).start(fed.grid(), fed.arrays(), num_rounds=2)
    assert len(result.arrays) == 0
    (logged,) = [record.getMessage() for record in flower_log.records if record.levelname == "ERROR"]
    assert "a client could not train: TypeError: a batch is a dict with the keys 'photo', 'label'" in logged
    assert "batch=(KEY_OF_INPUTS, KEY_OF_TARGETS)" in logged


def narrow(fed: Any) -> Any:
    """Batches of little variance: running variances fall from their first value, 1, towards zero."""
    for data in fed.data:
        data.batches = [(images * 0.01, labels) for images, labels in data.batches]
    return fed


def test_our_client_reports_a_negative_variance_of_bare_fedadam(federation: Federations) -> None:
    fed = narrow(federation(SIZES, lr=0.05))
    grid = RecordingGrid(fed.app(), len(SIZES))
    result = flower.FedAdam(eta=1.0).start(grid, fed.arrays(), num_rounds=ROUNDS)
    assert min(value.min() for value in variances(unpack(result.arrays)).values()) < 0
    errors = grid.errors()
    assert len(errors) > len(SIZES), "all clients refuse, to train and to evaluate"
    for error in errors:
        assert re.search(r"client \d could not (train|evaluate): MessageError: .*negative values", error)
        assert "'1.running_var' has negative values (-" in error
        assert "MeanStatistics(FedAdam(...))" in error
        assert "hide statistics from a mod that adds noise" in error


@pytest.mark.parametrize("strategy", [SiloBN(global_norm="initial"), FedBN(global_norm="initial"), Standalone()])
def test_mean_statistics_refuses_a_rule_whose_clients_send_none(strategy: Strategy) -> None:
    name = type(strategy).__name__
    with pytest.raises(SettingsError, match=f"nothing to combine: with this {name}, .* Use {name} without it"):
        MeanStatistics(strategy)


@pytest.mark.parametrize(
    ("name", "make"),
    [("FedAdam", MeanStatistics), ("FedMedian", lambda s: s), ("FedMedian", MeanStatistics), ("Krum", lambda s: s)],
)
def test_fixbn_freezes_around_flower_s_strategies(federation: Federations, name: str, make: Any) -> None:
    """FedAdam's arrays are float64 where the clients' are float32; FedMedian empties the replies it reads."""
    fed = federation(SIZES, lr=0.05)
    grid = RecordingGrid(fed.app(), len(SIZES))
    models: list[Arrays] = []
    FixBN(make((STRATEGIES | OPTIMISERS)[name]()), freeze_round=2).start(
        grid, whole(fed), num_rounds=4, evaluate_fn=lambda server_round, record: models.append(unpack(record))
    )
    assert grid.errors() == []
    assert all((a["0.weight"] != b["0.weight"]).any() for a, b in pairwise(models))
    moved = [(a["1.running_var"] != b["1.running_var"]).any() for a, b in pairwise(models)]
    assert moved == [True, True, False, False]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda: None, "make_client() returned None; expected a BNClient, without .to_client()"),
        (lambda: NumPyClient().to_client(), "make_client() returned a NumPyClientWrapper; expected a BNClient"),
        (lambda: NumPyClient(), "make_client() returned a NumPyClient; expected a BNClient"),
    ],
)
def test_what_is_no_client_is_refused(federation: Federations, returned: Any, says: str) -> None:
    fed = federation((8, 12))
    with pytest.raises(RunFailed, match=re.escape(f"could not train: MessageError: {says}")):
        FedAvg().start(LocalGrid(client_app(lambda context: returned()), 2), fed.arrays(), num_rounds=1)


# --- our strategies with the template's client -------------------------------


@pytest.fixture(scope="module")
def project() -> Any:
    """Another project, unchanged: `@app.train()` and `@app.evaluate()` without our code."""
    with imported() as found:
        yield found


def start(strategy: Any, project: Project, rounds: int = 3) -> tuple[Any, RecordingGrid, Arrays]:
    """The result, the grid, and the first model."""
    torch.manual_seed(0)
    arrays, grid = ArrayRecord(project.task.Net().state_dict()), project.grid()
    result = strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.05}))
    return result, grid, unpack(arrays)


PLAIN = {
    "FedAvg": lambda: FedAvg(),
    "FedAvg, half of the clients": lambda: FedAvg(0.5, fraction_evaluate=0.5),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_fedavg_and_fedprox_drive_the_template_s_client(project: Project, name: str) -> None:
    strategy = PLAIN[name]()
    result, grid, before = start(strategy, project)
    assert [error for error in grid.errors() if "partition" not in error] == []  # it has no handler for that query
    after = unpack(result.arrays)
    assert {key: value.dtype for key, value in after.items()} == {key: value.dtype for key, value in before.items()}
    assert (after["conv.weight"] != before["conv.weight"]).any()
    losses = [metrics["eval_loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert len(losses) == 3
    if strategy.fraction_evaluate == 1:  # the same clients evaluate every round
        assert losses[-1] < losses[0]


EVERY = "node 1, node 2, node 3, node 4: "
FROZEN = r"running_mean', which is frozen\. Its ClientApp ignores the config key 'fedbn\.fixbn-freeze'"
REFUSING: dict[str, tuple[Callable[[], Strategy], str]] = {
    "FixBN": (lambda: FixBN(FedAvg(), freeze_round=2), rf"^round 3: 0 .*\n.*{EVERY}it changed 'features.*{FROZEN}"),
    "FixBN of Flower's": (
        lambda: FixBN(flower.FedAvg(), freeze_round=2), rf"^round 3: 0 .*\n.*{EVERY}it changed 'features.*{FROZEN}"
    ),
    "FedTAN": (
        lambda: FedTAN(),
        rf"^round 1, exchange 1: 0 of 4 clients sent a usable reply, 2 are needed:\n.*{EVERY}its ClientApp does not "
        r"support exchanges; serve the client with fedbn_flwr\.client_app",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except({"FedTAN"}, REFUSING))
def test_the_template_s_client_is_refused_where_it_ignores_what_is_asked(project: Project, name: str) -> None:
    """Frozen statistics in the first frozen round, and exchanges."""
    make, says = REFUSING[name]
    with pytest.raises(RunFailed, match=says):
        start(make(), project)


HOME = {
    "FedBN": lambda: FedBN(),
    "FedBN, initial": lambda: FedBN(global_norm="initial"),
    "SiloBN": lambda: SiloBN(),
}


@pytest.mark.parametrize(
    ("strict", "says"), [(True, "loads a whole state dict"), (False, "ignores the config key 'fedbn.")]
)
@pytest.mark.parametrize("name", HOME)
def test_rules_with_local_norms_refuse_the_template_s_client(
    project: Project, name: str, strict: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no norms, so each round would begin with new ones."""
    load = partialmethod(torch.nn.Module.load_state_dict, strict=strict)
    monkeypatch.setattr(project.task.Net, "load_state_dict", load)
    words = rf"{EVERY}its ClientApp {says}.*by fedbn_flwr\.client_app with a BNClient"
    with pytest.raises(RunFailed, match=rf"^round 1: 0 of 4 clients sent a usable reply.*\n.*{words}"):
        start(HOME[name](), project)


# --- docs/client-protocol.md -------------------------------


def blocks(page: str) -> list[str]:
    return python_blocks((ROOT / "docs" / page).read_text())


@pytest.mark.slow
def test_the_documented_client_honours_the_freeze_keeps_its_batch_norm_and_refuses_the_rest(tmp_path: Any) -> None:
    task = (
        "\n\ndef train_batches(model, loader, lr):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=lr)\n"
        "    for batch in loader:\n"
        "        optimizer.zero_grad()\n"
        "        nn.functional.cross_entropy(model(batch['img']), batch['label']).backward()\n"
        "        optimizer.step()\n"
        "\n\ndef test_batches(model, loader):\n"
        "    assert not model.training\n"
        "    with torch.no_grad():\n"
        "        return sum(float(model(batch['img']).abs().sum()) for batch in loader)\n"
    )
    source = (PROJECT / PACKAGE / "task.py").read_text()
    client, server = blocks("client-protocol.md")
    folder = copied(tmp_path / "project", task=source + task, client_app=client)
    with imported(folder) as project:
        with LocalGrid(project.client_app, CLIENTS) as local:
            exec(server, {**globals(), "grid": local, "Net": project.task.Net})
        result, grid, _ = start(FixBN(FedAvg(), freeze_round=1), project)
        assert grid.errors() == []
        second, third, after = grid.trained(2)[0], grid.trained(3)[0], unpack(result.arrays)
        for key in [key for key in after if "running" in key]:
            assert second[key] == third[key] == after[key].tobytes()
        assert second["conv.weight"] != third["conv.weight"]
        assert result.evaluate_metrics_clientapp[1].keys() == {"f1"}
        _, grid, _ = start(FedBN(), project)
        assert grid.errors() == []
        assert not any("after_conv" in key for message in grid.trained(3) for key in message), "batch norm isn't sent"
        found = [
            unpack(reply.content["arrays"]) for reply in grid.replies if "arrays" in reply.content
        ]  # it is returned
        first, other, *_, last = (each for each in found[:CLIENTS] + found[-CLIENTS:])
        assert (first["after_conv.weight"] != other["after_conv.weight"]).any()
        assert last["after_conv.num_batches_tracked"] == 3 * first["after_conv.num_batches_tracked"] > 0
        with pytest.raises(RunFailed, match=r"asks for 'fedbn\.scaffold"):
            start(Scaffold(), project)


def test_the_documented_keys_are_those_of_the_protocol() -> None:
    page = (ROOT / "docs" / "strategy-reference.md").read_text()
    documented = set(re.findall(r"^\| `(fedbn\.[\w-]+)`", page, re.MULTILINE))
    modules = {key: rule.__module__ for key, rule in BY_KEY.items()}  # tests in the same process define others
    ours = re.compile(r"(fedbn_flwr|strategies)\.(?!.*\btests\b)")
    of_tests = {key for key, module in modules.items() if not ours.match(module)}
    assert documented == {key for key in known_keys() if key.startswith(protocol.PREFIX)} - of_tests


def test_a_metric_that_one_client_lacks_does_not_end_a_run_by_flower_s_strategy(
    federation: Federations,
) -> None:
    """Flower raises an error where the metrics of clients differ."""
    fed = federation((12, 12), metrics=["auc", "macro_f1"])
    fed.data[1].batches = [(inputs, torch.zeros_like(labels)) for inputs, labels in fed.data[1].batches]
    with pytest.raises(InconsistentMessageReplies):
        flower.FedMedian().start(fed.grid(), fed.arrays(), num_rounds=1)
    result = FixBN(flower.FedMedian(), freeze_round=1).start(fed.grid(), fed.arrays(), num_rounds=1)
    reported = set(result.evaluate_metrics_clientapp[1])
    assert {"loss", "accuracy", "macro-f1", "auc"} <= reported, "the mean over the clients that report it"
