"""The client by hand-made messages, and through client_app on the local grid."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from fedbn_flwr import BNClient, LocalGrid, client_app, seeding
from fedbn_flwr.client.node_state import LOCAL_ARRAYS
from fedbn_flwr.client.rule import BY_KEY, ClientRule, Key, Memo
from fedbn_flwr.client.training import TRAINER, Trained, Trainer, Training
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.messages.arrays import pack, unpack
from tests.support.federations import Federations, failing, near, replaced, same
from tests.support.foreign import Foreign


def message(node: int, arrays: ArrayRecord, kind: str = "train", **config: Any) -> Message:
    config = {key.replace("fedbn_", "fedbn.").replace("_", "-"): value for key, value in config.items()}
    return Message(RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1, **config})}), node, kind)


def ask(grid: LocalGrid, *messages: Message) -> list[Message]:
    return list(grid.send_and_receive(list(messages)))


def reason(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)


def counters(arrays: dict[str, np.ndarray]) -> list[int]:
    return [int(value) for key, value in arrays.items() if key.endswith("num_batches_tracked")]


# --- a NumPyClient -----------------------------------------------------------


def test_it_is_a_numpy_client(federation: Federations) -> None:
    fed = federation(batches=2)
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], fed.data[1], lr=0.1)
    assert isinstance(client, NumPyClient)
    parameters = client.get_parameters({})
    assert len(parameters) == 7, "conv, gamma, beta, mean, variance, weight and bias; no counter"
    result, num_examples, metrics = client.fit(parameters, {"server-round": 1})
    assert num_examples == 8
    assert metrics["train-loss"] > 0
    assert [array.shape for array in result] == [array.shape for array in parameters]
    assert not any(map(np.array_equal, result, parameters))
    loss, num_examples, metrics = client.evaluate(result, {})
    assert num_examples == 12
    assert loss > 0
    assert 0 <= metrics["accuracy"] <= 1


def test_fit_equals_sgd_by_hand(federation: Federations) -> None:
    fed = federation()
    twin = copy.deepcopy(fed.model).train()
    how: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], epochs=2, channels_last=False, **how)
    result, _, _ = client.fit(client.get_parameters({}), {})
    optimizer = torch.optim.SGD(twin.parameters(), **how)
    for inputs, targets in fed.data[0].batches * 2:
        optimizer.zero_grad()
        F.cross_entropy(twin(inputs), targets).backward()
        optimizer.step()
    state = {key: value for key, value in twin.state_dict().items() if not key.endswith("num_batches_tracked")}
    near(state, dict(zip(state, result, strict=True)))


def test_what_it_returned_does_not_change_as_it_trains_on(federation: Federations) -> None:
    fed = federation()
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], lr=0.2)
    first, _, _ = client.fit(client.get_parameters({}), {})
    before = copy.deepcopy(first)
    client.fit(first, {})
    assert all(map(np.array_equal, first, before))


def test_positions_may_include_the_counters(federation: Federations) -> None:
    fed = federation()
    client = BNClient(copy.deepcopy(fed.model), fed.data[0])
    state = [value.numpy().copy() for value in fed.model.state_dict().values()]
    result, _, _ = client.fit(state, {})
    assert len(result) == 8
    assert result[5] == 2, "two batches later"


def test_a_wrong_number_of_arrays_is_refused(federation: Federations) -> None:
    fed = federation()
    client = BNClient(copy.deepcopy(fed.model), fed.data[0])
    with pytest.raises(MessageError, match="received 3 arrays, the model has 7"):
        client.fit(client.get_parameters({})[:3], {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 1, "steps": 2}, "give epochs (1) or steps (2), not both"),
        ({"epochs": 0}, "epochs is 0; expected an integer >= 1 or None"),
        ({"steps": 2.0}, "steps is 2.0; expected an integer >= 1 or None"),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number >= 0 or a function of the round"),
        ({"lr": float("nan")}, "lr is nan; expected a number >= 0 or a function of the round"),
        ({"momentum": 2.0}, "momentum is 2.0; expected a number >= 0 and < 1"),
        ({"clip": 0}, "clip is 0; expected a number > 0 or None"),
        ({"loss": "cross_entropy"}, "loss is 'cross_entropy'; expected a function of (outputs, targets), such as"),
        ({"precision": "bf16"}, "precision is 'bf16'; expected a torch.dtype, such as torch.bfloat16 or None"),
        ({"compile": "no"}, "compile is 'no'; expected true or false"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_right(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}"):
        BNClient(nn.Linear(2, 2), [], **given)


def test_a_client_whose_fit_would_not_be_called_is_refused(federation: Federations) -> None:
    class Own(BNClient):
        def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
            return parameters, 1, {}

    fed = federation()
    app = client_app(lambda context: Own(copy.deepcopy(fed.model), fed.data[0]))
    (reply,) = ask(LocalGrid(app, 1), message(1, pack({"a": np.zeros(2)})))
    assert "Own overrides fit(), which client_app does not call; override train_round() instead" in reason(reply)


def test_learning_rate_may_be_a_function_of_the_round(federation: Federations) -> None:
    fed = federation()
    asked: list[int] = []

    def rate(server_round: int) -> float:
        asked.append(server_round)
        return 0.0

    client = BNClient(copy.deepcopy(fed.model), fed.data[0], lr=rate)
    before = client.get_parameters({})
    after, _, _ = client.fit(before, {"server-round": 5})
    assert asked == [5]
    np.testing.assert_array_equal(after[0], before[0])


def test_a_data_loader_that_shuffles_is_a_function_of_seed_and_round(federation: Federations) -> None:
    fed = federation(batches=1)
    inputs, targets = fed.data[0].batches[0]

    def fit(server_round: int, seed: int = 0) -> list[np.ndarray]:
        torch.manual_seed(np.random.default_rng().integers(2**31))
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True)
        client = BNClient(copy.deepcopy(fed.model), loader, seed=seed)
        result, num_examples, _ = client.fit(client.get_parameters({}), {"server-round": server_round})
        assert num_examples == 8
        return result

    first = fit(1)
    assert all(np.array_equal(a, b) for a, b in zip(first, fit(1), strict=True))
    assert not np.array_equal(first[0], fit(2)[0])
    assert not np.array_equal(first[0], fit(1, seed=1)[0])


def test_training_does_not_change_the_global_generator(federation: Federations) -> None:
    fed = federation()
    client = BNClient(nn.Sequential(nn.Dropout(0.5), copy.deepcopy(fed.model)), fed.data[0])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    client.fit(client.get_parameters({}), {})
    assert torch.rand(2).equal(expected)


# --- through client_app ------------------------------------------------------


def test_a_reply_has_the_keys_that_were_sent(federation: Federations) -> None:
    fed = federation((8, 12))
    arrays = fed.arrays()
    replies = ask(fed.grid(), message(1, arrays), message(2, arrays))
    for partition, (reply, count) in enumerate(zip(replies, (8, 12), strict=True)):
        assert list(reply.content["arrays"]) == list(arrays)
        metrics = reply.content["metrics"]
        assert metrics["num-examples"] == count
        assert reply.content["client"]["partition-id"] == partition
        assert metrics["train-loss"] > 0


def without_statistics(arrays: ArrayRecord) -> ArrayRecord:
    return pack({key: value for key, value in unpack(arrays).items() if "running" not in key})


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda arrays: message(1, arrays, lr=3.0, anything="else"), id="keys of other projects"),
        pytest.param(lambda arrays: message(1, without_statistics(arrays)), id="statistics that stay, as in SiloBN"),
        pytest.param(lambda arrays: Message(RecordDict({"weights": arrays}), 1, "train"), id="a lone record"),
        pytest.param(lambda arrays: Message(RecordDict({"arrays": arrays}), 1, "train"), id="no config: a first round"),
    ],
)
def test_a_message_may_have_more_or_less_and_its_keys_come_back(
    federation: Federations, made: Callable[[ArrayRecord], Message]
) -> None:
    fed = federation()
    sent = made(fed.arrays())
    (reply,) = ask(fed.grid(), sent)
    assert list(reply.content["arrays"]) == list(next(iter(sent.content.array_records.values())))


def test_evaluation_replies_with_metrics_only_and_the_partition_is_sent_when_asked(federation: Federations) -> None:
    fed = federation((8, 12))
    evaluated, asked = ask(
        fed.grid(), message(1, fed.arrays(), "evaluate"), Message(RecordDict(), 2, "query.partition")
    )
    assert not evaluated.content.array_records
    assert set(evaluated.content["metrics"]) == {"loss", "accuracy", "num-examples"}
    assert dict(asked.content["metrics"]) == {"partition-id": 1}


def test_a_query_makes_a_client_only_where_it_asks_for_readiness() -> None:
    def make(context: Context) -> BNClient:
        raise FileNotFoundError("/srv/data")

    grid = LocalGrid(client_app(make), 1)
    (reply,) = ask(grid, Message(RecordDict(), 1, "query.partition"))
    assert reply.content["metrics"]["partition-id"] == 0
    ready = RecordDict({"config": ConfigRecord({"fedbn.ready": True})})
    (reply,) = ask(grid, Message(ready, 1, "query.partition"))
    assert "/srv/data" in reply.error.reason


@pytest.mark.parametrize("kind", [lambda batch: [batch], lambda batch: DataLoader(TensorDataset(*batch), batch_size=4)])
def test_a_list_of_batches_and_a_data_loader_serve_and_know_their_examples(federation: Federations, kind: Any) -> None:
    fed = federation(batches=1)
    data, arrays = kind(fed.data[0].batches[0]), fed.arrays()
    app = client_app(lambda context: BNClient(copy.deepcopy(fed.model), data, data, context=context))
    replies = ask(fed.grid(app), message(1, arrays), message(1, arrays, "evaluate"))
    assert [reply.content["metrics"]["num-examples"] for reply in replies] == [8, 8]


def test_make_client_with_two_parameters_is_given_the_config(federation: Federations) -> None:
    fed = federation()
    app = failing(fed, lambda client, config: config["server-round"] == 2, OSError("it is the second round"))
    first, second = ask(fed.grid(app), message(1, fed.arrays()), message(1, fed.arrays(), server_round=2))
    assert not first.has_error()
    assert "it is the second round" in reason(second)


# --- refusals ----------------------------------------------------------------


def test_an_unknown_key_of_ours_is_refused_and_named(federation: Federations) -> None:
    fed = federation()
    for kind in ("train", "evaluate"):
        (reply,) = ask(fed.grid(), message(1, fed.arrays(), kind, fedbn_freze="statistics"))
        assert "asks for 'fedbn.freze' (= 'statistics')" in reason(reply)
        assert "did you mean 'fedbn.freeze'?" in reason(reply)


def test_a_role_that_cannot_be_frozen_is_named(federation: Federations) -> None:
    fed = federation()
    (reply,) = ask(fed.grid(), message(1, fed.arrays(), fedbn_freeze="statistics,weights"))
    assert "fedbn.freeze names 'weights'; known: affine, statistics" in " ".join(reason(reply).split())
    (reply,) = ask(fed.grid(), message(1, fed.arrays(), fedbn_freeze="statistic"))
    assert "did you mean 'statistics'?" in reason(reply)


def changed(arrays: ArrayRecord, **changes: np.ndarray | None) -> ArrayRecord:
    new = unpack(arrays) | {key.replace("_", ".", 1).lstrip("n"): value for key, value in changes.items()}
    return pack({key: value for key, value in new.items() if value is not None})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n0_weight": np.zeros((4, 2, 5, 5), np.float32)}, ["'0.weight'", "(4, 2, 5, 5)", "(4, 2, 3, 3)"]),
        ({"n7_weight": np.zeros(1, np.float32)}, ["'7.weight', which this client's model does not have", "0.weight"]),
        (
            {"n4_bias": None},
            ["did not send '4.bias' (1 keys of weights are missing)", "the client's state does not have it"],
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    federation: Federations, change: dict[str, np.ndarray | None], words: list[str]
) -> None:
    fed = federation()
    (reply,) = ask(fed.grid(), message(2, changed(fed.arrays(), **change)))
    assert "client 1 could not train" in reason(reply)
    for word in words:
        assert word in reason(reply)


@pytest.mark.parametrize(("count", "found"), [(0, "found 0"), (2, "found 2 ArrayRecords: ['record 0', 'record 1']")])
def test_which_arrays_are_the_model_s_must_be_clear(federation: Federations, count: int, found: str) -> None:
    fed = federation()
    content = RecordDict({f"record {i}": fed.arrays() for i in range(count)})
    (reply,) = ask(fed.grid(), Message(content, 1, "train"))
    assert f"expected an ArrayRecord 'arrays'; {found}" in reason(reply)


@pytest.mark.parametrize("data", [None, {}])
def test_evaluation_without_data_is_refused(federation: Federations, data: Any) -> None:
    fed = federation()
    app = client_app(lambda context: BNClient(copy.deepcopy(fed.model), fed.data[0], data, context=context))
    (reply,) = ask(fed.grid(app), message(1, fed.arrays(), "evaluate"))
    assert "client 0 could not evaluate: MessageError: this client has no data to evaluate on" in reason(reply)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit("bye"), KeyError("lost")])
def test_every_error_becomes_a_reply_that_names_the_partition(federation: Federations, error: BaseException) -> None:
    fed = federation()
    arrays, app = fed.arrays(), failing(fed, lambda client, config: client == 1, error)
    good, bad = ask(fed.grid(app), message(1, arrays), message(2, arrays))
    assert not good.has_error()
    assert f"client 1 could not train: {type(error).__name__}: {error}" in reason(bad)


def test_an_error_in_code_of_the_user_names_file_and_line(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    """Not the folder, which is the site's affair; and not the file of a library in which it was raised."""

    class Faulty(ClientRule):
        keys = {"fedbn.faulty": Key("true", "fail")}

        def begin(self, w: Any) -> Any:
            self.model.eval()  # type: ignore[attr-defined]

    fed, line = federation(), inspect.getsourcelines(Faulty.begin)[1] + 1
    expected = (
        f"could not train: AttributeError: 'Faulty' object has no attribute 'model' (test_client.py, line {line})"
    )
    try:
        (reply,) = ask(fed.grid(), message(1, fed.arrays(), fedbn_faulty=True))
    finally:
        BY_KEY.pop("fedbn.faulty")
    assert reason(reply) == f"client 0 {expected}"
    assert expected in flower_log.text

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="no")

    line = inspect.getsourcelines(loss)[1] + 1
    (reply,) = ask(federation(loss=loss).grid(), message(1, fed.arrays()))
    assert reason(reply).endswith(f"no is not a valid value for reduction (test_client.py, line {line})")
    (reply,) = ask(fed.grid(), message(1, pack({"w": np.zeros(1)})))
    assert "test_client.py" not in reason(reply), "an error of this project says what to change"


def test_a_client_that_exits_while_it_trains_becomes_a_reply(federation: Federations) -> None:
    fed = federation(loss=lambda logits, targets: sys.exit(3))
    (reply,) = ask(fed.grid(), message(1, fed.arrays()))
    assert "client 0 could not train: SystemExit: 3" in reason(reply)


# --- the node's state --------------------------------------------------------


def test_counters_stay_local_and_survive_between_messages(federation: Federations) -> None:
    fed = federation(batches=2)
    arrays = fed.arrays()
    assert not counters(unpack(arrays))
    app, clients = replaced(fed)
    grid = fed.grid(app)
    for expected in (2, 4, 6):  # a new client each time, and the node's counter continues
        ask(grid, message(1, arrays))
        assert int(clients[1].model[1].num_batches_tracked) == expected
    ask(grid, message(2, arrays))
    assert int(clients[2].model[1].num_batches_tracked) == 2, "another node has its own"


def test_another_run_begins_empty(federation: Federations) -> None:
    fed = federation(batches=2)
    app, clients = replaced(fed)
    grid = fed.grid(app)
    for name, expected in (("a", 2), ("a", 4), ("b", 2), ("a", 2)):
        ask(grid, message(1, fed.arrays(), fedbn_run=name))
        assert int(clients[1].model[1].num_batches_tracked) == expected


def test_a_model_that_is_kept_for_the_next_run_begins_anew(federation: Federations) -> None:
    """It has the batch norm of the first run, which the server does not send."""
    fed = federation(batches=2)
    shared = pack({key: value for key, value in unpack(fed.arrays()).items() if "running" not in key})
    model, found = copy.deepcopy(fed.model), []
    grid = LocalGrid(client_app(lambda context: BNClient(model, fed.data[0], lr=0.1, context=context)), 1)
    for name in ("a", "a", "b"):
        (reply,) = ask(grid, message(1, shared, fedbn_run=name, fedbn_kept="statistics", fedbn_return=True))
        found.append(unpack(reply.content["arrays"]))
    assert same(found[0], found[2])
    assert not same(found[0], found[1])


def test_a_server_s_model_without_the_client_s_batch_norm_is_refused(federation: Federations) -> None:
    """convert_norm on the server only: the client would train with batch norm of its own, as with FedBN."""
    fed = federation()
    converted = pack({key: value for key, value in unpack(fed.arrays()).items() if not key.startswith("1.")})
    (reply,) = ask(fed.grid(), message(1, converted, fedbn_run="a"))
    assert "did not send '1.weight' (4 keys of affine are missing)" in reason(reply)
    for config in (
        {"fedbn_run": "a", "fedbn_kept": "affine,statistics"},
        {},
    ):  # FedBN, and a strategy of another project
        assert not ask(fed.grid(), message(1, converted, **config))[0].has_error()


@pytest.mark.parametrize("kept", ["batch norm", "momentum"])
def test_a_client_that_diverges_keeps_its_state_of_before_the_round(federation: Federations, kept: str) -> None:
    fed = federation(batches=2)
    bad = [(torch.full_like(inputs, torch.nan), targets) for inputs, targets in fed.data[0].epoch(1, 0)]
    arrays, options = unpack(fed.arrays()), {"lr": 0.1}
    if kept == "batch norm":
        arrays = {key: value for key, value in arrays.items() if not key.startswith("1.")}
    else:
        options |= {"momentum": 0.9, "keep_momentum": True}

    def make(context: Context, config: Any) -> BNClient:
        data = bad if config["server-round"] == spoiled else fed.data[0]
        return BNClient(copy.deepcopy(fed.model), data, context=context, **options)

    found = []
    for spoiled in (2, 0):
        grid = LocalGrid(client_app(make), 1)
        rounds = (1, 2, 3) if spoiled else (1, 3)
        replies = [ask(grid, message(1, pack(arrays), server_round=number))[0] for number in rounds]
        if spoiled:
            expected = "its train-loss is nan (the client diverged?); the client keeps its state from before this round"
            assert expected in reason(replies.pop(1))
        found.append([unpack(reply.content["arrays"]) for reply in replies])
    assert all(map(same, *found))


@pytest.mark.parametrize("folder", [False, True])
def test_a_client_whose_mod_fails_after_training_has_the_state_from_before(
    federation: Federations, folder: bool, tmp_path: Path
) -> None:
    fed = federation(batches=2)
    arrays = pack({key: value for key, value in unpack(fed.arrays()).items() if not key.startswith("1.")})
    found = []
    for spoiled in (2, 0):

        def failing(message: Message, context: Context, call_next: Any) -> Message:
            reply: Message = call_next(message, context)
            if message.content["config"]["server-round"] == spoiled:  # noqa: B023
                raise ValueError("no mask")
            return reply

        where = {"state": str(tmp_path / str(spoiled))} if folder else {}
        grid = LocalGrid(client_app(fed.make_client, mods={"train": [failing]}), 1, node_config=where)
        own = {"fedbn_run": "a", "fedbn_run_token": "0" * 32, "fedbn_kept": "affine,statistics"}
        rounds = (1, 2, 3) if spoiled else (1, 3)
        replies = [ask(grid, message(1, arrays, server_round=number, **own))[0] for number in rounds]
        if spoiled:
            assert "could not train: ValueError: no mask" in reason(replies.pop(1))
        found.append([unpack(reply.content["arrays"]) for reply in replies])
    assert all(map(same, *found))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda context, config: [config], 1),
        (lambda context, config=None: [config], 1),
        (functools.partial(lambda context, data: [], data=1), 0),
        (lambda context, *, rate=0.1: [rate][1:], 0),
        (lambda context, rate=0.1: [rate][1:] if rate == 0.1 else [rate], 0),
        (lambda context, **more: [*more], 0),
    ],
)
def test_a_parameter_for_the_config_has_no_default_or_is_called_config(make: Any, expected: int) -> None:
    received: list[Any] = []

    @functools.wraps(make)
    def made(*given: Any) -> Foreign:
        received.extend(make(*given))
        return Foreign()

    ask(LocalGrid(client_app(made), 1), message(1, pack({"a": np.zeros(2)})))
    assert len(received) == expected


def test_the_error_of_a_client_with_one_example_has_the_cure() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    data = [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))]
    grid = LocalGrid(client_app(lambda context: BNClient(copy.deepcopy(model), data, context=context)), 1)
    (reply,) = ask(grid, message(1, pack({key: value.numpy() for key, value in model.state_dict().items()})))
    assert "client 0 could not train" in reason(reply)
    assert "batch norm needs two: give this client more examples, leave out a last batch of one" in reason(reply)


def test_evaluation_uses_what_the_node_kept(federation: Federations) -> None:
    """Statistics that are never sent are the node's own, in evaluation as well."""
    fed = federation((8, 8))
    arrays = unpack(fed.arrays())
    shared = pack({key: value for key, value in arrays.items() if "running" not in key})
    grid = fed.grid()
    (fresh,) = ask(grid, message(1, shared, "evaluate"))
    ask(grid, message(1, shared))
    (later,) = ask(grid, message(1, shared, "evaluate"))
    assert fresh.content["metrics"]["loss"] != later.content["metrics"]["loss"]


def test_evaluation_does_not_train(federation: Federations) -> None:
    fed = federation()
    grid = fed.grid()
    arrays = fed.arrays()
    once, twice = (ask(grid, message(1, arrays, "evaluate"))[0].content["metrics"] for _ in range(2))
    assert dict(once) == dict(twice)


def test_an_evaluation_that_names_no_run_keeps_the_node_s_state(federation: Federations) -> None:
    """Flower's start() takes one config for training and one for evaluation; the second may be empty."""
    fed = federation(batches=2)
    app, clients = replaced(fed)
    first, second = (message(1, fed.arrays(), fedbn_run="a") for _ in range(2))
    ask(fed.grid(app), first, message(1, fed.arrays(), "evaluate"), second)
    assert int(clients[1].model[1].num_batches_tracked) == 4


def test_counters_that_are_sent_as_floats_are_rounded(federation: Federations) -> None:
    """Flower's own mean of ten equal integers of 16 is 15.999999999999998."""
    fed = federation(batches=2)
    state = {key: value.numpy().copy() for key, value in fed.model.state_dict().items()}
    state["1.num_batches_tracked"] = np.array(15.999999999999998)
    (reply,) = ask(fed.grid(), message(1, pack(state)))
    assert counters(unpack(reply.content["arrays"])) == [18]


# --- a NumPyClient of another project ----------------------------------------


def test_a_foreign_numpy_client_is_served() -> None:
    arrays = pack({"a": np.zeros((2, 2)), "b": np.ones(3, np.float32)})
    grid = LocalGrid(client_app(lambda context: Foreign()), 1)
    train, evaluate = ask(grid, message(1, arrays), message(1, arrays, "evaluate"))
    assert {key: value.tolist() for key, value in unpack(train.content["arrays"]).items()} == {
        "a": [[1, 1], [1, 1]],
        "b": [2, 2, 2],
    }
    assert train.content["metrics"] == MetricRecord({"num-examples": 7, "flag": 1, "score": 0.5})
    assert evaluate.content["metrics"] == MetricRecord({"loss": 0.25, "num-examples": 3, "accuracy": 0.5, "count": 4})


def test_a_foreign_client_may_know_the_name_of_the_run_and_says_that_it_cannot_freeze() -> None:
    grid, arrays = LocalGrid(client_app(lambda context: Foreign()), 1), pack({"a": np.zeros(2)})
    named, frozen = ask(grid, message(1, arrays, fedbn_run="a"), message(1, arrays, fedbn_freeze="statistics"))
    assert not named.has_error()
    assert "'fedbn.freeze'" in reason(frozen)


def test_a_foreign_client_that_returns_too_few_arrays_is_refused() -> None:
    class Short(Foreign):
        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
            return parameters[:1], 1, {}

    arrays = pack({"a": np.zeros(2), "b": np.zeros(2)})
    (reply,) = ask(LocalGrid(client_app(lambda context: Short()), 1), message(1, arrays))
    assert "fit() received 2 arrays and returned 1" in reason(reply)


# --- memory format -----------------------------------------------------------


def test_channels_last_trains_the_same_and_sends_arrays_in_order() -> None:
    """In float64 the layouts agree except for rounding; arrays are sent in the default layout."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    data = [(torch.randn(6, 3, 9, 9, dtype=torch.float64), torch.randint(0, 4, (6,))) for _ in range(3)]
    sent = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    updates = {}
    for last in (False, True):
        client = BNClient(copy.deepcopy(model), data, lr=0.1, momentum=0.9, channels_last=last)
        assert client.model[3].weight.is_contiguous(memory_format=torch.channels_last) == last
        updates[last] = client.train_round(sent, {}).arrays
    for key, value in updates[False].items():
        found = updates[True][key]
        assert found.flags.c_contiguous
        np.testing.assert_allclose(found, value, rtol=1e-10, atol=1e-12)
    assert any(updates[True][key].tobytes() != value.tobytes() for key, value in updates[False].items())


# --- random numbers, and rounds that fail ---


def shuffled(examples: int = 24) -> DataLoader[Any]:
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(examples, 3, dtype=torch.float64), torch.randint(0, 2, (examples,)))
    return DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(5))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def sent_by(client: BNClient) -> dict[str, np.ndarray]:
    return {key: value.numpy().copy() for key, value in client.model.state_dict().items() if "num_b" not in key}


def by_a_batch_sampler() -> DataLoader[Any]:
    data: Any = shuffled().dataset
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch_sampler=BatchSampler(sampler, 8, drop_last=False))


@pytest.mark.parametrize("make", [shuffled, by_a_batch_sampler])
def test_the_order_of_a_loader_with_a_generator_of_its_own_is_that_of_the_round(
    make: Callable[[], DataLoader[Any]],
) -> None:
    client = BNClient(small(), make(), steps=1)
    arrays = sent_by(client)
    first, second = (client.train_round(arrays, {"server-round": number}) for number in (1, 2))
    again = client.train_round(arrays, {"server-round": 1})
    assert same(dict(first.arrays), dict(again.arrays))
    assert not same(dict(first.arrays), dict(second.arrays))


def test_statistics_that_the_server_asks_for_do_not_depend_on_earlier_draws() -> None:
    data = shuffled().dataset
    client = BNClient(small(), DataLoader(data, 8, shuffle=True))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(dict(client.statistics_round(sent_by(client), {"server-round": 1}).arrays))
    assert same(*found)


@pytest.mark.parametrize("has_generator", [False, True])
def test_evaluations_are_functions_of_seed_and_round(has_generator: bool) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            inputs, target = super().__getitem__(index)
            return inputs + torch.randn(3), target

    torch.manual_seed(5)
    data = Noisy(torch.randn(24, 3, dtype=torch.float64), torch.randint(0, 2, (24,)))
    loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator() if has_generator else None)
    client = BNClient(small(), shuffled(), loader)
    found = []
    for seed, number in ((1, 1), (2, 1), (3, 2)):
        torch.manual_seed(seed)
        expected = torch.rand(2)
        torch.manual_seed(seed)
        found.append(client.evaluate_round(sent_by(client), {"server-round": number})["loss"])
        assert torch.rand(2).equal(expected), "the global generator is left as it was"
    assert found[0] == found[1] != found[2]


def test_data_of_ready_batches_without_a_number_of_examples_are_refused() -> None:
    """Its length is that of batches."""
    batches = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))] * 3
    with pytest.raises(TypeError, match="the number of examples in train_data, a DataLoader, is unknown"):
        _ = BNClient(small(), DataLoader(batches, batch_size=None)).num_examples  # type: ignore[arg-type]


def test_a_first_round_that_fails_leaves_the_client_s_own_values_as_they_were() -> None:
    good = [(torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,)))]
    bad = [(torch.full((8, 3), torch.nan, dtype=torch.float64), good[0][1])]
    model = small()
    client, twin = BNClient(model, bad, steps=1), BNClient(small(), good, steps=1)
    sent = {key: value for key, value in sent_by(client).items() if key.startswith(("0.", "2."))}
    with pytest.raises(MessageError, match="the client keeps its state from before this round"):
        client.train_round(sent, {})
    client.train_data = good
    client.train_round(sent, {})
    twin.train_round(sent, {})
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.model.state_dict().values(), strict=True)
    )


def test_a_client_rule_that_fails_at_the_end_leaves_the_client_s_own_values_as_they_were() -> None:
    class Failing(ClientRule):
        keys: ClassVar[dict[str, Key]] = {"test.failing": Key("true", "a test's key")}

        def finish(self, *_: object) -> None:
            raise ValueError("no space left")

    client = BNClient(small(), shuffled(), steps=1)
    sent = {key: value for key, value in sent_by(client).items() if key.startswith(("0.", "2."))}
    client.train_round(sent, {})
    before = client.state.load(LOCAL_ARRAYS)
    with pytest.raises(ValueError, match="no space left"):
        client.train_round(sent, {"test.failing": True})
    after = client.state.load(LOCAL_ARRAYS)
    assert before
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_clients_share_a_model_that_computes_with_its_counters() -> None:
    model = small()
    model[1].momentum = None  # a cumulative mean
    twins, found = (copy.deepcopy(model), copy.deepcopy(model)), []
    for models in ((model, model), twins):
        clients = [BNClient(each, shuffled(), context=context(number)) for number, each in enumerate(models)]
        sent = sent_by(clients[0])
        found.append([client.train_round(sent, {}).arrays for _ in range(2) for client in clients])
    assert all(map(same, *found))


# --- a loaded round is a value ---


def by_hand(rounds: Sequence[Training]) -> list[Trained]:
    """A trainer of its own, from what a `Training` has; it takes a step of each round in turn."""
    begun = [seeded_batches(each) for each in rounds]
    memos: list[list[Memo]] = [[] for _ in rounds]
    ends: list[list[Tensor]] = [[] for _ in rounds]
    for number in range(max(map(len, begun))):
        for training, batches, own, losses in zip(rounds, begun, memos, ends, strict=True):
            inputs, targets = batches[number]
            training.optimizer.zero_grad()
            losses.append(training.gradient(training.model, inputs, targets, training.loss))
            w = training.optimizer.parameters
            with torch.no_grad():
                own += [] if number else [rule.begin(w) for rule in training.rules]
                for rule, each in zip(training.rules, own, strict=True):
                    rule.adjust(w, {name: p.grad for name, p in w.items()}, each)
            training.optimizer.step()
    return [
        Trained(float(torch.stack(losses).mean()), 8, len(losses), own) for losses, own in zip(ends, memos, strict=True)
    ]


@contextmanager
def trained_by(trainer: Trainer) -> Iterator[None]:
    before = TRAINER.set(trainer)
    yield
    TRAINER.reset(before)


def seeded_batches(training: Training) -> list[Any]:
    with seeding.streams(training.seed):
        return list(training.batches)


@pytest.mark.parametrize("config", [{}, {"fedbn.control": True}, {"proximal-mu": 0.5, "fedbn.control": True}])
def test_another_trainer_trains_the_rounds_of_a_client(config: dict[str, Any]) -> None:
    """Model, loss and control variates are those of `train`, bit for bit."""
    clients = [BNClient(small(), shuffled(), epochs=2, lr=0.2, momentum=0.9) for _ in range(2)]
    seen: list[Training] = []

    def trainer(training: Training) -> Trained:
        seen.append(training)
        return by_hand([training])[0]

    for number in (1, 2):
        message = {"server-round": number, **config}
        one = clients[0].train_round(sent_by(clients[0]), message)
        with trained_by(trainer):
            two = clients[1].train_round(sent_by(clients[1]), message)
        assert same(dict(one.arrays), dict(two.arrays))
        assert one.metrics == pytest.approx(two.metrics, rel=1e-12)
        assert [*one.extras] == [*two.extras] == (["control"] if "fedbn.control" in config else [])
        assert all(same(dict(one.extras[name]), dict(two.extras[name])) for name in one.extras)
    assert [each.device.type for each in seen] == ["cpu", "cpu"]


def test_exchanges_need_a_client_app() -> None:
    client = BNClient(small(), shuffled())
    with pytest.raises(MessageError, match="exchanges with the other clients need a ClientApp made by fedbn_flwr"):
        client.fit(client.get_parameters({}), {"fedbn.exchange": "fused", "fedbn.exchange-min-batch": 2})


def test_a_trainer_may_train_clients_together() -> None:
    """Two loaded rounds in one call, their steps in turn: each has the values that it has alone."""
    loaded: list[Training] = []

    def load(training: Training) -> Trained:
        loaded.append(training)
        raise NotImplementedError

    clients = [BNClient(small(), shuffled(), lr=0.1 * (1 + i), context=context(i)) for i in range(2)]
    alone = [BNClient(small(), shuffled(), lr=0.1 * (1 + i), context=context(i)) for i in range(2)]
    for client in clients:
        with trained_by(load), pytest.raises(NotImplementedError):
            client.train_round(sent_by(client), {"proximal-mu": 0.5})
    together = by_hand(loaded)
    for client, twin, trained in zip(clients, alone, together, strict=True):
        update = twin.train_round(sent_by(twin), {"proximal-mu": 0.5})
        assert same(sent_by(client), dict(update.arrays))
        assert trained.loss == pytest.approx(update.metrics["train-loss"], rel=1e-12)


def test_a_round_leaves_no_cycle_that_would_keep_its_tensors_in_memory() -> None:
    client = BNClient(small(), shuffled(), momentum=0.9, keep_momentum=True)
    alive = weakref.ref(client.model)
    gc.collect()
    gc.disable()
    try:
        client.train_round(sent_by(client), {"proximal-mu": 0.5, "fedbn.control": True, "fedbn.freeze": "statistics"})
        del client
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("config", [{"fedbn.freeze": "statistics"}, {}])
def test_frozen_batch_norms_have_no_statistics_to_exchange(config: dict[str, Any]) -> None:
    def exchange(contribution: Contribution) -> Agreement:
        raise InterruptedError(contribution.kind)

    client = BNClient(small(), shuffled())
    words = "normalises with the statistics of its batch" if config else "moments"
    with pytest.raises(MessageError if config else InterruptedError, match=words):
        client.train_round(
            sent_by(client), {"fedbn.exchange": "fused", "fedbn.exchange-min-batch": 2, **config}, {}, exchange
        )


def context(partition: int) -> Context:
    return Context(
        run_id=0, node_id=partition + 1, node_config={"partition-id": partition}, state=RecordDict(), run_config={}
    )
