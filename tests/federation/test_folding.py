"""Replies that are added to the mean as they arrive: the same bits in any order, and the same refusals."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.messages.aggregate import Arrays, RunningSum, weighted_mean
from fedbn_flwr.messages.arrays import AddedArrays, FlatArrays, flat_block, pack, unpack
from fedbn_flwr.strategies import FedAvg, FedBN, FedBS, Reply, Round, Scaffold, folding_of

CLIENTS = 5
NODES = {0: 40, 1: 10, 2: 30, 3: 20, 4: 50}  # by client: not in the order of the ids
SHAPES = {"layer.weight": (7, 300), "bn.weight": (7,), "bn.running_mean": (7,), "bn.running_var": (7,)}


def model_of(client: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(client)
    return {key: random.random(shape).astype(np.float32) for key, shape in SHAPES.items()}


def answer(client: int, fault: str) -> RecordDict:
    arrays, metrics = model_of(client), {"num-examples": 3 + client, "train-loss": 0.1}
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {"arrays": pack(arrays)}
    if fault == "no norm":
        records["arrays"] = pack({"layer.weight": arrays["layer.weight"]})
    records |= {"metrics": MetricRecord(metrics), "client": ConfigRecord({"partition-id": client})}
    if client != 2 or fault == "none":
        return RecordDict(records)
    if fault == "error":
        raise ValueError("no data")
    if fault == "nan":
        arrays["layer.weight"][3, 5] = np.nan
        records["arrays"] = pack(arrays)
    if fault == "negative variance":
        records["arrays"] = pack(arrays | {"bn.running_var": -arrays["bn.running_var"]})
    if fault == "partition":
        records["client"] = ConfigRecord({"partition-id": 4})
    if fault == "list":  # whether it is refused depends on the others
        records["metrics"] = MetricRecord({**metrics, "losses": [1.0, 2.0]})
    if fault == "array by array":
        records["arrays"] = ArrayRecord(dict(pack(arrays)))
    return RecordDict(records)


def grid_of(fault: str) -> LocalGrid:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(answer(int(context.node_config["partition-id"]), fault), reply_to=message)

    return LocalGrid(app, CLIENTS, node_ids=list(NODES.values()))


def exchanged(rule: FedAvg, fault: str) -> tuple[list[Message], dict[int, Message]]:
    """The messages of a round, and the replies by node."""
    with grid_of(fault) as grid:
        messages = list(rule.configure_train(1, pack(model_of(99)), ConfigRecord(), grid))
        return messages, {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}


def round_of(
    fault: str, order: Sequence[int] | None, rule: FedAvg | None = None
) -> tuple[dict[str, np.ndarray], list[str], list[Message]]:
    """The mean, the reasons of the clients left out, and the replies; `order` is that of their arrival."""
    rule = FedAvg() if rule is None else rule
    messages, replies = exchanged(rule, fault)
    if order is not None:
        folding = folding_of(rule, messages, NODES)
        assert folding is not None
        for client in order:
            folding.replied(replies[NODES[client]])
    mean, _ = rule.aggregate_train(1, list(replies.values()))
    assert mean is not None
    return dict(unpack(mean)), rule.left_out, list(replies.values())


FAULTS = ["none", "error", "nan", "negative variance", "partition", "list", "array by array"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_mean_and_the_refusals_do_not_depend_on_arrival(fault: str) -> None:
    expected, left_out, _ = round_of(fault, None)
    for order in itertools.islice(itertools.permutations(range(CLIENTS)), 0, None, 17):
        mean, reasons, _ = round_of(fault, order)
        assert reasons == left_out
        assert {key: value.tobytes() for key, value in mean.items()} == {
            key: value.tobytes() for key, value in expected.items()
        }


def test_rules_whose_clients_send_a_part_of_the_model() -> None:
    """Such a reply has other keys than the server's model, which has the batch norms too."""
    (expected, _, _), (mean, _, replies) = (
        round_of("no norm", order, FedBN(global_norm="initial")) for order in (None, range(CLIENTS))
    )
    assert {key: value.tobytes() for key, value in mean.items()} == {
        key: value.tobytes() for key, value in expected.items()
    }
    assert all(isinstance(unpack(reply.content["arrays"]), AddedArrays) for reply in replies)  # type: ignore[arg-type]


def test_the_mean_is_that_in_float64() -> None:
    mean, _, replies = round_of("none", range(CLIENTS))
    weights = [3 + client for client in range(CLIENTS)]
    for key, value in mean.items():
        exact = np.average(
            [model_of(client)[key].astype(np.float64) for client in range(CLIENTS)], axis=0, weights=weights
        )
        np.testing.assert_array_equal(value, exact.astype(np.float32), err_msg=key)
    assert all(isinstance(unpack(reply.content["arrays"]), AddedArrays) for reply in replies)  # type: ignore[arg-type]


@pytest.mark.parametrize(("order", "held"), [((0, 1, 2, 3, 4), 0), ((1, 2, 0, 4, 3), 2), ((4, 3, 2, 1, 0), 4)])
def test_a_reply_is_freed_as_soon_as_those_before_it_have_arrived(order: Sequence[int], held: int) -> None:
    rule, most = FedAvg(), 0
    messages, replies = exchanged(rule, "none")
    folding = folding_of(rule, messages, NODES)
    assert folding is not None
    alive = []
    for client in order:
        arrays = unpack(replies[NODES[client]].content["arrays"])  # type: ignore[arg-type]
        assert isinstance(arrays, FlatArrays)
        alive.append(weakref.ref(arrays.flat))
        del arrays
        folding.replied(replies[NODES[client]])
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
    assert most == held


class FirstReply(FedAvg):
    """A rule of a user's own, which reads single replies."""

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        return replies[0].arrays


@pytest.mark.parametrize(
    "rule",
    [
        FedBS(),
        Scaffold(),
        FedAvg(robust="median"),
        FedAvg(max_share=0.4),
        FedAvg(train_metrics_aggr_fn=lambda contents, key: MetricRecord()),
        FirstReply(),
    ],
)
def test_rules_that_need_all_replies_keep_them(rule: FedAvg) -> None:
    with grid_of("none") as grid:
        rule.begin(1, pack(model_of(99)))
        messages = list(rule.configure_train(1, pack(model_of(99)), ConfigRecord(), grid))
        assert folding_of(rule, messages, NODES) is None
        plain = FedBN()
        messages = list(plain.configure_train(1, pack(model_of(99)), ConfigRecord(), grid))
        assert folding_of(plain, messages, NODES) is not None
        assert folding_of(plain, messages, {client: NODES[client] for client in range(4)}) is None  # one is unknown


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_mean_that_was_begun_has_the_same_bits(dtype: type) -> None:
    random, weights = np.random.default_rng(0), [0.5, 7.0, 1e-3, 2.0**31, 3.0]
    blocks = [flat_block({"a": random.normal(size=40_001).astype(dtype), "b": np.ones(1, dtype)}) for _ in weights]
    replies = [block for block in blocks if block is not None]
    expected = weighted_mean(replies, weights)
    for count in range(1, len(replies) + 1):
        begun = RunningSum()
        for reply, weight in zip(replies[:count], weights, strict=False):
            begun.add(reply, weight)
        added = [AddedArrays(reply.layout) for reply in replies[:count]]
        mean = weighted_mean([*added, *replies[count:]], weights, begun)
        assert all(mean[key].tobytes() == expected[key].tobytes() for key in expected)
        with pytest.raises(ValueError, match="not the first ones"):
            weighted_mean(replies, weights, begun)
    with pytest.raises(ValueError, match="'a' of this reply was added to the mean of the round and freed"):
        added[0]["a"]
