"""Federated averaging against hand computation, for any order of replies, node ids and states of the clients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.reply import mean_of_metrics
from fedbn_flwr.strategies import FedAvg, FixBN, Scaffold
from tests.support.federations import Arrays, Federations, failing, last_model, near, same
from tests.support.plugin import RecordingGrid
from tests.support.records import between, change_record

SIZES = (8, 12, 6, 10, 14)
IDS = [90210, 17, 4, 2**62, 555]  # random and unordered, as Flower's are


def trained(fed: Any, partition: int, server_round: int = 1) -> Arrays:
    """The model that a client trains from the first one, without a grid."""
    client = BNClient(copy.deepcopy(fed.model), fed.data[partition], **fed.options)
    return client.train_round(unpack(fed.arrays()), {"server-round": server_round}).arrays


def mean_of(fed: Any, partitions: list[int]) -> Arrays:
    """sum_i n_i w_i / sum_i n_i, in float64."""
    counts = [fed.data[i].num_examples for i in partitions]
    results = [trained(fed, i) for i in partitions]
    return {
        key: np.average([result[key].astype(np.float64) for result in results], axis=0, weights=counts)
        for key in results[0]
    }


def mean32_of(fed: Any, partitions: list[int]) -> Arrays:
    return {key: value.astype(np.float32) for key, value in mean_of(fed, partitions).items()}


def spoilt(fed: Any, partitions: set[int], change: Callable[[RecordDict], None]) -> ClientApp:
    """The federation's app, with some clients' train replies changed."""
    return between(fed.app(), lambda _, reply, partition: change(reply) if partition in partitions else None)


# --- the mean ----------------------------------------------------------------


def test_one_round_equals_the_mean_by_hand(federation: Federations) -> None:
    fed = federation((8, 12), lr=0.2, momentum=0.5, epochs=2)
    found, expected = last_model(fed, FedAvg(), 1), mean32_of(fed, [0, 1])
    assert list(found) == list(expected)
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    near(found, expected)


def test_two_rounds_equal_two_means_by_hand(federation: Federations) -> None:
    fed = federation((8, 12, 6), dtype=torch.float64)
    after_one = copy.deepcopy(fed)
    state = {key: torch.from_numpy(value.copy()) for key, value in mean_of(fed, [0, 1, 2]).items()}
    after_one.model.load_state_dict(state, strict=False)
    near(last_model(fed, FedAvg(), 2), mean_of(after_one, [0, 1, 2]), rtol=1e-12, atol=1e-14)


def test_metrics_are_means_weighted_by_examples(federation: Federations) -> None:
    fed = federation((8, 12))
    result = FedAvg().start(fed.grid(), fed.arrays(), num_rounds=1)
    losses = []
    for partition in (0, 1):
        client = BNClient(copy.deepcopy(fed.model), fed.data[partition])
        losses.append(client.train_round(unpack(fed.arrays()), {}).metrics["train-loss"])
    metrics = result.train_metrics_clientapp[1]
    assert metrics["train-loss"] == pytest.approx((8 * losses[0] + 12 * losses[1]) / 20, rel=1e-12)
    assert "partition-id" not in metrics, "a mean of partition ids has no meaning"
    assert set(result.evaluate_metrics_clientapp[1]) == {"loss", "accuracy"}


def test_counters_that_are_sent_stay_whole(federation: Federations) -> None:
    """The whole state dict, as Flower's templates send it."""
    fed = federation((4,) * 10, batches=1)
    state = {key: value.numpy().copy() for key, value in fed.model.state_dict().items()}
    state["1.num_batches_tracked"] += 14
    result = FedAvg(fraction_evaluate=0.0).start(fed.grid(), pack(state), num_rounds=2)
    counter = unpack(result.arrays)["1.num_batches_tracked"]
    assert counter.dtype == np.int64
    assert int(counter) == 16


# --- the choice of clients ------------------------------------------------------


def chosen(fed: Any, node_ids: list[int] | None, rounds: int = 4, **options: Any) -> list[list[int]]:
    """The partitions that train in each round."""
    seen: list[tuple[int, int]] = []

    def make(context: Context, config: ConfigRecord) -> BNClient:
        if "server-round" in config:
            seen.append((int(config["server-round"]), int(context.node_config["partition-id"])))
        return fed.make_client(context)

    grid = fed.grid(client_app(make), node_ids=node_ids)
    FedAvg(fraction_evaluate=0.0, **options).start(grid, fed.arrays(), num_rounds=rounds)
    return [sorted(partition for number, partition in seen if number == n) for n in range(1, rounds + 1)]


def test_the_seed_and_no_node_ids_determine_which_partitions_participate(federation: Federations) -> None:
    fed = federation((4,) * 5)
    first = chosen(fed, None, fraction_train=0.4)
    assert [len(partitions) for partitions in first] == [2] * 4
    assert len(set(map(tuple, first))) > 1, "rounds differ"
    for ids in (IDS, IDS[::-1], [5, 3, 1, 2, 4]):
        assert chosen(fed, ids, fraction_train=0.4) == first
    assert chosen(fed, None, fraction_train=0.4, seed=1) != chosen(fed, None, fraction_train=0.4, seed=2)


def test_the_least_number_of_clients_is_kept(federation: Federations) -> None:
    fed = federation((4,) * 5)
    assert [len(p) for p in chosen(fed, None, 2, fraction_train=0.1, min_train_nodes=3)] == [3, 3]
    fifty = federation((1,) * 50, batches=1)
    assert [len(p) for p in chosen(fifty, None, 1, fraction_train=0.58)] == [29]  # 0.58 * 50 is 28.999999999999996
    # A run without clients would end as it began.
    assert [len(p) for p in chosen(fed, None, 2, fraction_train=0.1, min_train_nodes=0)] == [1, 1]


def test_messages_carry_the_round_and_the_caller_s_config(federation: Federations) -> None:
    fed = federation()
    strategy = FedAvg()
    messages = list(strategy.configure_train(7, fed.arrays(), ConfigRecord({"lr": 0.5}), fed.grid()))
    assert [message.metadata.dst_node_id for message in messages] == [1, 2]
    assert [dict(message.content["config"]) for message in messages] == [{"lr": 0.5, "server-round": 7}] * 2


def test_a_fraction_of_zero_asks_no_client(federation: Federations) -> None:
    fed = federation()
    strategy = FedAvg(fraction_train=0.0, fraction_evaluate=0.0)
    assert list(strategy.configure_train(1, fed.arrays(), ConfigRecord(), fed.grid())) == []
    assert list(strategy.configure_evaluate(1, fed.arrays(), ConfigRecord(), fed.grid())) == []


# --- replies that cannot be used ---------------------------------------------


def change_count(value: Any) -> Callable[[RecordDict], None]:
    def apply(content: RecordDict) -> None:
        metrics = dict(content["metrics"])
        metrics.pop("num-examples")
        content["metrics"] = MetricRecord(metrics if value is None else metrics | {"num-examples": value})

    return apply


def second_metrics(content: RecordDict) -> None:
    content["more"] = MetricRecord({"num-examples": 1})


change_array = functools.partial(change_record, "arrays")
SPOILS: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "NaN": (change_array("0.weight", lambda a: np.full_like(a, np.nan)), "'0.weight' has 72 of 72 values"),
    "infinity": (
        change_array("4.bias", lambda a: a + np.inf),
        "'4.bias' has 3 of 3 values that are not finite",
    ),
    "shape": (
        change_array("4.bias", lambda a: a[:2]),
        "'4.bias' has shape (2,); the server sent shape (3,)",
    ),
    "dtype": (
        change_array("4.bias", lambda a: a.astype(np.float64)),
        "'4.bias' is float64; the server sent float32",
    ),
    "missing key": (change_array("4.bias", lambda a: None), "the reply lacks '4.bias'"),
    "negative variance": (
        change_array("1.running_var", lambda a: -a - 1),
        "'1.running_var' has negative values",
    ),
    "no count": (change_count(None), "lack 'num-examples'"),
    "negative count": (change_count(-3), "'num-examples' is -3, expected a number from 0"),
    "NaN count": (change_count(float("nan")), "'num-examples' is nan"),
    "list of counts": (change_count([1, 2]), "'num-examples' is [1, 2]"),
    "two MetricRecords": (second_metrics, "2 MetricRecords; expected one"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_reply_that_cannot_be_used_is_left_out_and_named(
    federation: Federations, flower_log: pytest.LogCaptureFixture, name: str
) -> None:
    change, words = SPOILS[name]
    fed = federation((8, 12, 6))
    near(last_model(fed, FedAvg(), 1, fed.grid(spoilt(fed, {1}, change))), mean32_of(fed, [0, 2]))
    (line,) = [r.getMessage() for r in flower_log.records if "left out" in r.getMessage()]
    assert line.startswith("round 1: left out ")
    assert "node 2" in line
    assert words in line


def test_a_client_that_fails_is_left_out_and_named(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 12, 6))

    app = failing(fed, lambda client, config: client == 0, OSError("disk full"))
    near(last_model(fed, FedAvg(), 1, fed.grid(app)), mean32_of(fed, [1, 2]))
    lines = [record.getMessage() for record in flower_log.records]
    assert any("client 0 could not train: OSError: disk full" in line for line in lines)
    assert any("client 0 could not evaluate: OSError: disk full" in line for line in lines)


def test_a_client_of_weight_zero_counts_for_nothing(federation: Federations) -> None:
    fed = federation((8, 12, 6))
    near(last_model(fed, FedAvg(), 1, fed.grid(spoilt(fed, {2}, change_count(0)))), mean32_of(fed, [0, 1]))


def test_too_few_usable_replies_end_the_run_with_their_reasons(federation: Federations) -> None:
    fed = federation((8, 12, 6))

    def change(content: RecordDict) -> None:
        partition = content["client"]["partition-id"]
        SPOILS["NaN" if partition == 0 else "missing key"][0](content)

    with pytest.raises(RunFailed) as caught:
        FedAvg().start(fed.grid(spoilt(fed, {0, 2}, change)), fed.arrays(), num_rounds=1)
    first, *reasons = str(caught.value).split("\n")
    assert first == "round 1: 1 of 3 clients sent a usable reply, 2 are needed:"
    assert len(reasons) == 2
    assert "client 0 (node 1): '0.weight' has 72 of 72 values that are not finite" in reasons[0]
    assert "client 2 (node 3): the reply lacks '4.bias'" in reasons[1]


def test_a_reason_names_its_client_once(federation: Federations, flower_log: pytest.LogCaptureFixture) -> None:
    fed, replies = federation((8, 12, 6)), 0

    def change(content: RecordDict) -> None:
        nonlocal replies
        replies += 1
        if replies > 1:  # from the first one the server knows its partition
            content["metrics"]["train-loss"] = float("nan")

    FedAvg().start(fed.grid(spoilt(fed, {0}, change)), fed.arrays(), num_rounds=2)
    assert "round 2: left out client 0 (node 1): its metric 'train-loss' is nan, expected" in flower_log.text


def test_clients_that_do_not_answer_in_time_are_named(federation: Federations) -> None:
    fed = federation((8, 12, 6))
    grid = fed.grid()
    strategy = FedAvg(min_train_nodes=2)
    replies = list(grid.send_and_receive(strategy.configure_train(1, fed.arrays(), ConfigRecord(), grid)))
    with pytest.raises(
        RunFailed, match=r"1 of 3 clients sent a usable reply(.|\n)*- node 2, node 3: it did not answer in time"
    ):
        strategy.aggregate_train(1, replies[:1])


def test_clients_that_all_have_no_examples_end_the_run(federation: Federations) -> None:
    fed = federation()
    with pytest.raises(RunFailed, match="round 1"):
        FedAvg(fraction_evaluate=0.0).start(fed.grid(spoilt(fed, {0, 1}, change_count(0))), fed.arrays(), num_rounds=1)


def test_waiting_for_nodes_has_an_end(federation: Federations, slept: list[float]) -> None:
    fed = federation()
    strategy = FedAvg(min_available_nodes=5, node_timeout=60)
    with pytest.raises(RunFailed, match=r"2 of 5 nodes are connected after 60 s"):
        strategy.start(fed.grid(), fed.arrays(), num_rounds=1)
    assert 60 <= sum(slept) < 61


def test_a_run_continues_without_a_lost_node_until_it_returns(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """With too few nodes it waits, logs what it waits for, and ends."""
    fed = federation((8, 8, 8))

    class Coming(LocalGrid):
        connected = [{1, 2, 3}, {1, 3}, {1, 2, 3}, {3}]  # before each round

        def get_node_ids(self) -> list[int]:
            return [node for node in super().get_node_ids() if node in self.connected[0]]

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if (number := len(replies)) > 1:
                asked.append(number)
                self.connected = self.connected[1:]
            return replies

    asked: list[int] = []
    strategy = FedAvg(fraction_evaluate=0.0, node_timeout=0.3)
    grid = Coming(fed.app(), 3, node_ids=(1, 2, 3))
    with pytest.raises(RunFailed, match=r"1 of 2 nodes are connected after 0\.3 s"):
        strategy.start(grid, fed.arrays(), num_rounds=4)
    assert asked == [3, 2, 3]
    logged = [record.getMessage() for record in flower_log.records]
    assert "round 2, train: without client 1 (node 2), which is not connected" in logged
    waiting = "waiting for nodes: 1 of 2 are connected, at most 0.3 s; without client 0 (node 1), client 1 (node 2); "
    assert any(line.startswith(waiting) for line in logged)


def test_a_client_that_is_back_under_another_node_is_not_missed(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """As after its key was replaced: it says in the first round who it is, before it has trained."""
    fed = federation((8, 8, 8))

    class Renamed(LocalGrid):
        number = 2

        def get_node_ids(self) -> list[int]:
            return [1, self.number, 3]

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            sent = [(m.content, 2 if m.metadata.dst_node_id == 4 else m.metadata.dst_node_id) for m in messages]
            kind = next((message.metadata.message_type for message in messages), "")
            replies = list(super().send_and_receive([Message(*each, kind) for each in sent], timeout=timeout))
            for reply in replies:
                if reply.metadata.src_node_id == 2:
                    reply.metadata.__dict__["_src_node_id"] = self.number
            self.number = 4
            return replies

    FedAvg(fraction_evaluate=0.0).start(Renamed(fed.app(), 3, node_ids=(1, 2, 3)), fed.arrays(), num_rounds=3)
    assert not [record.getMessage() for record in flower_log.records if "not connected" in record.getMessage()]


# --- with code of other projects ---------------------------------------------


def test_flower_s_own_fedavg_drives_our_client(federation: Federations) -> None:
    fed = federation(SIZES, dtype=torch.float64)
    ours = FedAvg().start(fed.grid(), fed.arrays(), num_rounds=2)
    theirs = flower.FedAvg().start(fed.grid(), fed.arrays(), num_rounds=2)
    near(unpack(theirs.arrays), unpack(ours.arrays), rtol=1e-10, atol=1e-12)
    assert theirs.train_metrics_clientapp[2]["train-loss"] == pytest.approx(
        ours.train_metrics_clientapp[2]["train-loss"], rel=1e-10
    )


@pytest.mark.parametrize("key", ["batch-examples", "train-loss"])
@pytest.mark.parametrize("base", [FedAvg, flower.FedAvg])
def test_evaluations_without_the_weight_of_training_count_examples(
    federation: Federations, base: Any, key: str, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 12))
    grid, config = RecordingGrid(fed.app(), 2), ConfigRecord({"fedbn.report-batch": True})
    strategy = FixBN(base(weighted_by_key=key), freeze_round=1)
    result = strategy.start(grid, fed.arrays(), num_rounds=1, train_config=config)
    each = [reply.content["metrics"] for reply in grid.replies if "accuracy" in reply.content.get("metrics", {})]
    assert sorted(metrics["num-examples"] for metrics in each) == [8, 12]
    for name in ("loss", "accuracy"):
        expected = np.average([m[name] for m in each], weights=[m["num-examples"] for m in each])
        assert result.evaluate_metrics_clientapp[1][name] == pytest.approx(expected, rel=1e-12)
    assert "left out" not in flower_log.text


def test_one_client_does_not_choose_the_weights_of_an_evaluation(federation: Federations) -> None:
    fed = federation((8, 12, 6, 10))

    def more(_: RecordDict, content: RecordDict, partition: int) -> None:
        if partition == 2 and "arrays" not in content:
            content["metrics"]["train-loss"] = content["metrics"]["accuracy"] = 1.0

    first, second = (
        FedAvg(weighted_by_key="train-loss").start(fed.grid(app), fed.arrays(), num_rounds=1)
        for app in (fed.app(), between(fed.app(), more, evaluations=True))
    )
    one, other = (each.evaluate_metrics_clientapp[1] for each in (first, second))
    assert other["loss"] == one["loss"]
    assert one["accuracy"] < other["accuracy"] < 1


class Table:
    """A metric function that keeps what it receives."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[RecordDict], str]] = []

    def __call__(self, contents: list[RecordDict], key: str) -> MetricRecord:
        self.calls.append((contents, key))
        return MetricRecord({"sites": len(contents)})


def test_the_mean_of_metrics_is_that_of_flower() -> None:
    given = [(8, 0.1, 3), (13, 0.7, 4), (6, 1 / 3, 9)]
    contents = [RecordDict({"metrics": MetricRecord({"num-examples": n, "a": a, "b": b})}) for n, a, b in given]
    assert mean_of_metrics(contents, "num-examples") == aggregate_metricrecords(contents, "num-examples")


def metrics_of_replies(*given: dict[str, Any]) -> list[RecordDict]:
    return [RecordDict({"metrics": MetricRecord({"num-examples": 8, **metrics})}) for metrics in given]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"auc": 0.5}, {}, {"auc": 0.75, "num-examples": 24}], {"auc": 0.6875}),
        ([{"auc": 0.5}, {}], {"auc": 0.5}),
        ([{"auc": 0.5}, {"auc": [0.5, 0.25]}, {"auc": 1.0}], {"auc": 0.75}),
        ([{"loss": 1.0, "own": 2.0}, {"loss": 2.0}, {"loss": 3.0}], {"loss": 2.0}),
        ([{"auc": 0.5, "num-examples": 0}, {"loss": 1.0}], {"loss": 1.0}),
    ],
)
def test_a_metric_s_mean_is_over_the_clients_that_report_it(given: Any, expected: Any) -> None:
    """A single client of several cannot add one: it could fill a run's files."""
    assert dict(mean_of_metrics(metrics_of_replies(*given), "num-examples")) == expected


@pytest.mark.parametrize("make", [FedAvg, lambda: FixBN(flower.FedAvg(), freeze_round=1)])
def test_a_client_that_leaves_out_a_metric_does_not_remove_the_others(
    federation: Federations, make: Any, flower_log: pytest.LogCaptureFixture
) -> None:
    """In training and in evaluation; it is named once."""
    fed = federation((8, 12, 6))
    whole = make().start(fed.grid(absent_metric(fed.app(), ())), fed.arrays(), num_rounds=2)
    result = make().start(fed.grid(absent_metric(fed.app(), ("train-loss", "accuracy"))), fed.arrays(), num_rounds=2)
    for number in (1, 2):
        for found, of_all in [
            (result.train_metrics_clientapp[number], whole.train_metrics_clientapp[number]),
            (result.evaluate_metrics_clientapp[number], whole.evaluate_metrics_clientapp[number]),
        ]:
            assert found.keys() == of_all.keys()
    assert same(unpack(result.arrays), unpack(whole.arrays))
    lines = [each.getMessage() for each in flower_log.records if "the mean is over" in each.getMessage()]
    assert lines == [
        f"client 1 (node 2) reports no {key}: the mean is over the other clients" for key in ("train-loss", "accuracy")
    ]


def absent_metric(app: Any, names: Iterable[str]) -> ClientApp:
    """Client 1 reports none of these."""

    def change(_: RecordDict, reply: RecordDict, partition: int) -> None:
        for name in names if partition == 1 else ():
            reply["metrics"].pop(name, None)

    return between(app, change, evaluations=True)


def test_a_client_that_does_not_answer_an_evaluation_is_named(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed, rule = federation((8, 12, 6)), FedAvg()
    grid, arrays = fed.grid(), fed.arrays()
    rule.begin(1, arrays)
    rule.aggregate_train(1, grid.send_and_receive(rule.configure_train(1, arrays, ConfigRecord(), grid)))
    replies = list(grid.send_and_receive(rule.configure_evaluate(1, arrays, ConfigRecord(), grid)))
    metrics = rule.aggregate_evaluate(1, replies[:1] + replies[2:])
    assert metrics is not None
    assert rule.evaluation.left == [1, 3]
    words = "client 1 (node 2): it did not answer in time"
    assert rule.evaluation.left_out == [words]
    assert f"round 1, evaluation: left out {words}" in flower_log.text


def test_metric_functions_receive_the_whole_content_of_used_replies(federation: Federations) -> None:
    """As in Flower: arrays, records of the client's own, and metrics that not all clients sent, under their names."""
    fed = federation((8, 12, 6))

    def more(_: RecordDict, content: RecordDict, partition: int) -> None:
        content["info"] = ConfigRecord({"site": f"site-{partition}"})
        metrics = content.metric_records["metrics"]
        del content["metrics"]
        content["figures"] = MetricRecord({**metrics, "own": 1.5} if partition == 0 else {**metrics})
        if partition == 2:
            content["figures"]["num-examples"] = -1  # refused

    training, evaluation = Table(), Table()
    options = {"train_metrics_aggr_fn": training, "evaluate_metrics_aggr_fn": evaluation}
    app = between(fed.app(), more, evaluations=True)
    result = Scaffold(**options).start(fed.grid(app), fed.arrays(), num_rounds=1)
    for table, names in [
        (training, {"arrays", "client", "control", "figures", "info"}),
        (evaluation, {"client", "figures", "info"}),
    ]:
        ((contents, key),) = table.calls
        assert key == "num-examples"
        assert [content["info"]["site"] for content in contents] == ["site-0", "site-1"]
        assert [content["client"]["partition-id"] for content in contents] == [0, 1]
        assert [set(content) for content in contents] == [names] * 2
        assert [content["figures"].get("own") for content in contents] == [1.5, None]
        assert [content["figures"]["num-examples"] for content in contents] == [8, 12]
    for content, partition in zip(training.calls[0][0], (0, 1), strict=True):
        near(trained(fed, partition), unpack(content["arrays"]))
    assert result.train_metrics_clientapp[1] == result.evaluate_metrics_clientapp[1] == MetricRecord({"sites": 2})


@pytest.mark.parametrize(
    ("initial", "words"),
    [
        (
            lambda fed: fed.model.state_dict(),
            r"initial_arrays is a OrderedDict; expected ArrayRecord\(",
        ),
        (lambda fed: fed.model, "initial_arrays is a Sequential; expected ArrayRecord"),
        (lambda fed: ArrayRecord(), "the initial model cannot be trained: it has no arrays"),
    ],
)
@pytest.mark.parametrize("strategy", [FedAvg, lambda: FixBN(FedAvg(), freeze_round=1)])
def test_initial_arrays_of_another_type_or_none_are_refused(
    federation: Federations, strategy: Any, initial: Any, words: str
) -> None:
    fed = federation((4, 4))
    with pytest.raises(SettingsError, match=words):
        strategy().start(fed.grid(), initial(fed), num_rounds=1)


def test_two_nodes_with_one_partition_are_named(federation: Federations, flower_log: pytest.LogCaptureFixture) -> None:
    def same_partition(_: RecordDict, content: RecordDict, partition: int) -> None:
        content["client"]["partition-id"] = 0

    fed = federation((8, 12))
    app = between(fed.app(), same_partition, evaluations=True)
    FedAvg().start(fed.grid(app), fed.arrays(), num_rounds=1)
    assert "nodes 1 and 2 report the same partition-id 0; give each node its own" in flower_log.text
