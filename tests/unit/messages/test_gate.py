"""The gate: what passes, what is refused with which words, and that an honest reply is not copied."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.client.app import ClientFailed
from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.quote import one_line
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.server.poll import Poll, Roster
from fedbn_flwr.strategies import FedAvg
from tests.support.attacks import BYTES, DECLARED, REFUSED

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _task_identity() -> None:
    LocalGrid(ClientApp(), 1).close()  # without it Flower makes no messages


def reply(node: int = 1, **metrics: Any) -> Message:
    content = RecordDict({"arrays": pack({"w": WEIGHT}), "metrics": MetricRecord({"num-examples": 8, **metrics})})
    return from_node(node, content)


def from_node(node: int, content: RecordDict) -> Message:
    message = Message(content, 0, "train")
    message.metadata.__dict__["_src_node_id"] = node
    return message


def with_array(array: Array) -> Message:
    message = reply()
    message.content["arrays"] = ArrayRecord({"w": array})
    return message


def reasons(replies: Iterable[Message]) -> list[str | None]:
    return [str(each.error.reason) if each.has_error() else None for each in gate(replies)]


def test_an_honest_reply_passes_as_the_same_object() -> None:
    honest = reply(**{"train-loss": 0.5, "losses": [0.5, 0.25]})
    assert gate([honest])[0] is honest


@pytest.mark.parametrize(
    "value",
    [
        WEIGHT,
        np.asfortranarray(WEIGHT),
        np.float64(3.0).reshape(()),
        np.zeros((0, 4)),
        np.array([True]),
        WEIGHT[:, ::2],
        WEIGHT.astype(">f4"),
    ],
    ids=["C", "Fortran", "scalar", "empty", "bool", "strided", "big endian"],
)
def test_bytes_are_read_once_bit_for_bit(value: np.ndarray) -> None:
    (passed,) = gate([with_array(Array(np.asarray(value)))])
    found = unpack(passed.content.array_records["arrays"])["w"]
    assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    (again,) = gate([passed])
    assert again is passed


@pytest.mark.parametrize("name", [name for name, (_, verdict) in BYTES.items() if verdict == REFUSED])
def test_other_bytes_are_refused_in_our_own_words(name: str) -> None:
    data = BYTES[name][0](WEIGHT)
    (reason,) = reasons([with_array(Array("float32", (2, 3), "numpy.ndarray", data))])
    assert str(reason).startswith("its array 'w' ")
    assert not any(word in str(reason).lower() for word in ("pickle", "numpy"))


@pytest.mark.parametrize("name", DECLARED)
def test_the_declaration_must_be_that_of_the_bytes(name: str) -> None:
    array, (changes, _) = Array(WEIGHT), DECLARED[name]
    fields = {"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data}
    (reason,) = reasons([with_array(Array(**(fields | changes)))])
    assert ("'w' cannot be read" if "stype" in changes else "is declared as") in str(reason)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train-loss", math.nan),
        ("train-loss", -math.inf),
        ("train-loss", 1e300),
        ("train-loss", -(2**63)),
        ("own-accuracy", 2**63),
        ("train-loss", [1.0, math.nan]),
        ("train-loss", [1.0]),
        ("num-examples", -1),
        ("num-examples", 1e300),
        ("num-examples", [4]),
        ("own-num-examples", 2**53),
        ("batch-examples", 1e300),
        ("batch-values", -1),
        ("partition-id", [2]),
        ("partition-id", math.nan),
        ("partition-id", -1),
        ("partition-id", 10**18),
        ("state-round", [1]),
    ],
)
def test_a_metric_that_may_not_pass_is_named(key: str, value: Any) -> None:
    bad = reply()
    bad.content.metric_records["metrics"][key] = value
    (reason,) = reasons([bad])
    assert repr(key) in str(reason)


def test_values_that_only_a_changed_process_can_send_are_refused() -> None:
    for value in (10**400, "text", True, None, {1: 2}):
        bad = reply()
        bad.content.metric_records["metrics"].__dict__["_data"]["train-loss"] = value
        (reason,) = reasons([bad])
        assert "'train-loss'" in str(reason)
    for partition in ("2", True, 2.0, [2]):
        bad = reply()
        bad.content["client"] = ConfigRecord({"partition-id": partition})
        assert "'partition-id'" in str(reasons([bad])[0])
    bad = reply()
    bad.content.__dict__["_data"]["arrays"] = 5
    assert reasons([bad]) == ["its record 'arrays' is a int"]


def test_a_message_with_neither_content_nor_error_is_refused() -> None:
    empty = reply()
    empty.__dict__["_content"] = empty.__dict__["_error"] = None
    assert reasons([reply(), empty]) == [None, "it has neither content nor an error"]


def test_metrics_that_the_files_name_alike_are_checked_alike() -> None:
    assert reasons([reply(own_accuracy=7.0), reply(**{"validation-num_examples": -8})]) == [
        "its metric 'own_accuracy' is 7.0, expected a number from 0 to 1",
        "its metric 'validation-num_examples' is -8, expected a number from 0 to 2147483648",
    ]


def test_a_reply_has_a_limited_number_of_metrics_with_short_names_and_a_limited_size() -> None:
    """Each is a line of the run's files: 990 names of 980 characters would be a megabyte for each round and client."""
    many = {f"own@{number}-accuracy": 0.5 for number in range(1000)}
    of_classes = [0.5] * 21_841
    assert reasons([reply(**dict([*many.items()][1:])), reply(recalls=of_classes)]) == [None, None], (
        "ImageNet's classes"
    )
    long_ = {f"{number:0980}": 0.5 for number in range(990)}
    size = len("num-examples") + 8 + 990 * (980 + 8)
    limits = "at most 1,000, 1,000 and 262,144 are accepted"
    for given, found in (
        (many, "it has 1,001 metrics, "),
        ({"x" * 1001: 0.5}, "names of up to 1,001 characters ('xxx"),
        (long_, f"{size:,} bytes of names and numbers; {limits}"),
        ({"recalls": of_classes, "precisions": of_classes}, limits),
    ):
        assert found in str(reasons([reply(**given)])[0])


@pytest.mark.parametrize(
    "key", ["accuracy", "own-accuracy", "own@north_sea-macro_f1", "validation-r2", "validation_auc"]
)
def test_a_metric_of_this_library_has_its_range(key: str) -> None:
    beyond = 70.0 if key.endswith("r2") else -0.1
    assert reasons([reply(accuracy=93.5), reply(accuracy=100.5)])[0] is None, "an app of others has percentages"
    found = reasons([reply(**{key: value}) for value in (beyond, [0.5], 1 + 1e-7, 0.25)])
    assert [reason is None for reason in found] == [False, False, True, True]
    assert str(found[0]).startswith(f"its metric {key!r} is {beyond}, expected ")
    others = ("my-accuracy", "own-neg_mae", "own@north_sea-neg_mae")
    assert not any(reasons([reply(**dict.fromkeys(others, value)) for value in (-0.1, 70.0)])), "a user's function"


def test_the_keys_of_replies_do_not_stay_in_memory() -> None:
    """A client that is refused could otherwise fill the server's memory by new keys in each round."""

    def rounds(numbers: Iterable[int]) -> int:
        for number in numbers:
            keys = {f"{number}-{key}" + "x" * 20_000: Array(WEIGHT) for key in range(100)}
            (passed,) = gate([from_node(2, RecordDict({"arrays": ArrayRecord(keys)}))])
            roles(unpack(passed.content["arrays"]))
        del passed, keys
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = rounds(range(2))
        assert rounds(range(2, 6)) - before < 100_000, "four replies have eight million bytes of keys"
    finally:
        tracemalloc.stop()


def test_a_node_keeps_its_partition() -> None:
    rule = FedAvg()
    assert not rule.roster.learn({1: 0, 3: 2})
    assert rule.roster.learn({1: 1, 2: 1}) == {1: "its partition-id is 1, and it reported 0 before"}
    assert rule.memory.partitions == {1: 0, 2: 1, 3: 2}, "a checkpoint has them"
    rule.begin(1, pack({"w": np.zeros(1)}))
    assert rule.roster == Roster()


NO_NUMBER, A_NUMBER = (
    "it has no partition-id, and most clients have one",
    "it has a partition-id, and most clients have none",
)


@pytest.mark.parametrize(
    ("first", "then", "problems"),
    [
        ({1: 0, 2: 1}, {1: 0, 2: 1, 3: None}, {3: NO_NUMBER}),
        ({1: None, 2: None}, {1: None, 3: 0, 4: 1, 5: 2}, dict.fromkeys((3, 4, 5), A_NUMBER)),
        ({1: None, 2: None, 3: 0}, {1: None, 4: None}, {}),
        ({7: 0, 8: 1}, {3: 0, 8: None}, {}),
    ],
    ids=["no number", "numbers among clients without", "one number among the first", "restarted, not repeated"],
)
def test_a_node_that_joins_is_a_client_of_the_run_or_left_out(
    first: dict[int, int | None], then: dict[int, int | None], problems: dict[int, str]
) -> None:
    roster = Roster()
    roster.learn(first)
    assert roster.learn(then) == roster.learn(then) == problems


def test_a_client_that_is_refused_for_two_reasons_is_counted_once() -> None:
    """Otherwise the third client, which does not answer, would not be named."""
    poll = Poll(Roster({1: 0, 2: 1, 3: 2}), [1, 2, 3])
    assert poll.admit("round 2", {1: 0, 2: 7}, [(2, "'w' is not finite")]) == poll.left == [1]
    assert poll.left_out == [
        "client 1 (node 2): its partition-id is 7, and it reported 1 before",
        "client 2 (node 3): it did not answer in time",
    ]


def test_a_reply_with_another_partition_is_an_error_with_the_reason() -> None:
    poll = Poll(Roster({1: 0, 2: 1}), [1, 2])
    poll.read([reply(1), reply(2, **{"partition-id": 7})])
    replies = poll.close("round 2")
    assert [each.message.metadata.src_node_id for each in replies] == poll.left == [1]
    assert [each.error.reason for each in poll.refused] == ["its partition-id is 7, and it reported 1 before"]


@pytest.mark.parametrize("reporting", [1, 2, 4])
def test_a_metric_that_some_clients_cannot_compute_is_named(
    reporting: int, flower_log: pytest.LogCaptureFixture
) -> None:
    """For instance an AUC, where most clients have one class. Names that the clients invent are not repeated."""
    poll = Poll(Roster({node: node - 1 for node in range(1, 6)}), [1, 2, 3, 4, 5])
    known = [{"own-auc": 0.5, "invented": 1.0} if node <= reporting else {} for node in range(1, 6)]
    poll.read([reply(node, **metrics) for node, metrics in enumerate(known, 1)])
    poll.close("round 2")
    said = (
        "client 4 (node 5) reports"
        if reporting == 4
        else f"most clients report no own-auc, such as client {reporting} "
    )
    assert said in flower_log.text
    assert ("invented" in flower_log.text) == (reporting == 4)


def test_a_check_sees_the_replies_that_earlier_ones_have_left() -> None:
    poll, seen = Poll(), list[int]()
    poll.read([reply(1), reply(2), reply(3)])

    def odd_node(each: Reply) -> str | None:
        seen.append(each.message.metadata.src_node_id)
        return "it is odd" if seen[-1] == 2 else None

    def unreadable(each: Reply) -> str | None:
        raise MessageError("it cannot be read")

    poll.check(odd_node)
    poll.leave_out({3: "it is far from the others"})
    poll.check(odd_node)
    assert seen == [1, 2, 3, 1]
    poll.check(unreadable)
    assert not poll.usable
    assert poll.problems == [(2, "it is odd"), (3, "it is far from the others"), (1, "it cannot be read")]


def test_a_node_cannot_exclude_another_one_by_its_partition() -> None:
    """Which of them it belongs to is not known; it may also be one node that has returned under another id."""
    roster = Roster()
    assert not roster.learn({9: 2})
    assert not roster.learn({3: 2, 4: 2})
    assert roster.partitions == {9: 2, 3: 2, 4: 2}


def test_texts_of_clients_are_one_short_line() -> None:
    assert one_line("a\n\tb \x1b[2J\0c") == "a b ?[2J?c"
    assert len(one_line("x" * 10**5)) < 2100


def test_an_error_of_a_client_is_not_wrapped_by_flower() -> None:
    error = ClientFailed("client 1 could not train: KeyError: 'x'")
    wrapped = str(type(error)) + ":<'" + str(error) + "'>"  # as in flwr/supernode/runtime/run_clientapp.py
    assert one_line(f"left out node 7: {wrapped}") == f"left out node 7: {error}"
    assert one_line("<class 'ValueError'>:<'bad'>") == "<class 'ValueError'>:<'bad'>", "which may be another client's"
