"""The client by hand-made messages, and through client_app on the local grid."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.client.rule import BY_KEY, ClientRule, Key
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.messages.arrays import pack, unpack
from tests.support.federations import Federations, failing, near, replaced, same


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


def test_fit_and_evaluate_equal_sgd_by_hand(federation: Federations) -> None:
    fed = federation()
    twin = copy.deepcopy(fed.model).train()
    how: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], fed.data[1], epochs=2, channels_last=False, **how)
    assert isinstance(client, NumPyClient)
    result, num_examples, metrics = client.fit(client.get_parameters({}), {})
    assert (num_examples, [*metrics]) == (8, ["train-loss"])
    optimizer = torch.optim.SGD(twin.parameters(), **how)
    for inputs, targets in fed.data[0].batches * 2:
        optimizer.zero_grad()
        F.cross_entropy(twin(inputs), targets).backward()
        optimizer.step()
    state = {key: value for key, value in twin.state_dict().items() if not key.endswith("num_batches_tracked")}
    near(state, dict(zip(state, result, strict=True)))
    inputs, targets = map(torch.cat, zip(*fed.data[1].batches, strict=True))
    logits = twin.eval()(inputs)
    loss, num_examples, metrics = client.evaluate(result, {})
    assert (num_examples, metrics["accuracy"]) == (12, float((logits.argmax(1) == targets).double().mean()))
    assert loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)


def test_what_it_returned_does_not_change_as_it_trains_on(federation: Federations) -> None:
    fed = federation()
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], lr=0.2)
    first, _, _ = client.fit(client.get_parameters({}), {})
    before = copy.deepcopy(first)
    client.fit(first, {})
    assert all(map(np.array_equal, first, before))


def test_arrays_by_position_may_include_the_counters_and_must_be_as_many(federation: Federations) -> None:
    fed = federation()
    client = BNClient(copy.deepcopy(fed.model), fed.data[0])
    result, _, _ = client.fit([value.numpy().copy() for value in fed.model.state_dict().values()], {})
    assert (len(result), result[5]) == (8, 2), "two batches later"
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


# --- refusals ----------------------------------------------------------------


def changed(arrays: ArrayRecord, **changes: np.ndarray | None) -> ArrayRecord:
    new = unpack(arrays) | {key.replace("_", ".", 1).lstrip("n"): value for key, value in changes.items()}
    return pack({key: value for key, value in new.items() if value is not None})


FREZE = ["asks for 'fedbn.fixbn-freze' (= 'statistics')", "mean 'fedbn.fixbn-freeze'?"]
# Messages, and words of the errors with which the client replies.
REFUSED: dict[str, tuple[Callable[[ArrayRecord], Message], list[str]]] = {
    "a key": (lambda arrays: message(1, arrays, fedbn_fixbn_freze="statistics"), FREZE),
    "a key in evaluation": (lambda arrays: message(1, arrays, "evaluate", fedbn_fixbn_freze="statistics"), FREZE),
    "a role": (
        lambda arrays: message(1, arrays, fedbn_fixbn_freeze="statistics,weights"),
        ["fedbn.fixbn-freeze names 'weights'; known: affine, statistics"],
    ),
    "a mistyped role": (
        lambda arrays: message(1, arrays, fedbn_fixbn_freeze="statistic"),
        ["did you mean 'statistics'?"],
    ),
    "a shape": (
        lambda arrays: message(2, changed(arrays, n0_weight=np.zeros((4, 2, 5, 5), np.float32))),
        ["client 1 could not train", "'0.weight'", "(4, 2, 5, 5)", "(4, 2, 3, 3)"],
    ),
    "an array more": (
        lambda arrays: message(2, changed(arrays, n7_weight=np.zeros(1, np.float32))),
        ["client 1 could not train", "'7.weight', which this client's model does not have", "0.weight"],
    ),
    "an array less": (
        lambda arrays: message(2, changed(arrays, n4_bias=None)),
        [
            "client 1 could not train",
            "did not send '4.bias' (1 keys of weights are missing)",
            "the client's state does not have it",
        ],
    ),
    "no arrays": (lambda arrays: Message(RecordDict(), 1, "train"), ["expected an ArrayRecord 'arrays'; found 0"]),
    "arrays of two names": (
        lambda arrays: Message(RecordDict({"record 0": arrays, "record 1": arrays}), 1, "train"),
        ["expected an ArrayRecord 'arrays'; found 2 ArrayRecords: ['record 0', 'record 1']"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_in_a_message_is_named(federation: Federations, name: str) -> None:
    (made, words), fed = REFUSED[name], federation()
    (reply,) = ask(fed.grid(), made(fed.arrays()))
    found = " ".join(reason(reply).split())
    assert [each for each in words if each not in found] == [], found


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
    (exits,) = ask(federation(loss=lambda logits, targets: sys.exit(3)).grid(), message(1, arrays))
    assert "client 0 could not train: SystemExit: 3" in reason(exits), "while it trains"


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


# --- the node's state --------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "counters"),
    [
        ([(1, "train", None)] * 3 + [(2, "train", None)], (2, 4, 6, 2)),
        ([(1, "train", name) for name in "aaba"], (2, 4, 2, 2)),
        ([(1, "train", "a"), (1, "evaluate", None), (1, "train", "a")], (2, 2, 4)),
    ],
    ids=["two nodes", "two runs", "an evaluation that names no run"],
)
def test_counters_stay_on_their_node_for_a_run(
    federation: Federations, messages: list[tuple[int, str, str | None]], counters: tuple[int, ...]
) -> None:
    """Each message makes a new client. Flower's start() takes a config for evaluation, too, which may be empty."""
    fed = federation(batches=2)
    app, clients = replaced(fed)
    grid = fed.grid(app)
    for (node, kind, run), expected in zip(messages, counters, strict=True):
        ask(grid, message(node, fed.arrays(), kind, **({"fedbn_run": run} if run else {})))
        assert int(clients[node].model[1].num_batches_tracked) == expected


def test_a_model_that_is_kept_for_the_next_run_begins_anew(federation: Federations) -> None:
    """It has the batch norm of the first run, which the server does not send."""
    fed = federation(batches=2)
    shared, model, found = without_statistics(fed.arrays()), copy.deepcopy(fed.model), []
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


class FailingClient(ClientRule):
    keys: ClassVar[dict[str, Key]] = {"test.failing": Key("true", "fail at the end of the round")}

    def finish(self, *_: object) -> None:
        raise ValueError("no space left")


def failing_mod(message: Message, context: Context, call_next: Any) -> Message:
    reply: Message = call_next(message, context)
    if "spoiled" in message.content["config"]:
        raise ValueError("no mask")
    return reply


@pytest.mark.parametrize("spoiled", [1, 2])
@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("batch norm", "its train-loss is nan .* the client keeps its state from before this round"),
        ("momentum", "its train-loss is nan"),
        ("a mod", "ValueError: no mask"),
        ("a mod, and a folder", "ValueError: no mask"),
        ("a rule", "ValueError: no space left"),
    ],
)
def test_a_client_that_fails_in_a_round_has_the_state_from_before(
    federation: Federations, case: str, problem: str, spoiled: int, tmp_path: Path
) -> None:
    """It diverges, or a rule or a mod fails after training; the other rounds are as if there were no such round."""
    fed = federation(batches=2, lr=0.1, **({"momentum": 0.9, "keep_momentum": True} if case == "momentum" else {}))
    bad = [(torch.full_like(inputs, torch.nan), targets) for inputs, targets in fed.data[0].epoch(1, 0)]
    local = {key for key in unpack(fed.arrays()) if key.startswith("1.") and case != "momentum"}
    arrays = pack({key: value for key, value in unpack(fed.arrays()).items() if key not in local})
    own = {"fedbn_run": "a", "fedbn_run_token": "0" * 32, **({"fedbn_kept": "affine,statistics"} if local else {})}
    fault = {"test.failing": True} if case == "a rule" else {"spoiled": True}

    def make(context: Context, config: Any) -> BNClient:
        data = bad if "spoiled" in config and "mod" not in case else fed.data[0]
        return BNClient(copy.deepcopy(fed.model), data, context=context, **fed.options)

    found = []
    for rounds in ([1, 2, 3], [number for number in (1, 2, 3) if number != spoiled]):
        grid = LocalGrid(
            client_app(make, mods={"train": [failing_mod] if "mod" in case else []}), 1,
            node_config={"state": str(tmp_path / str(len(rounds)))} if "folder" in case else {},
        )  # fmt: skip
        replies = [
            ask(grid, message(1, arrays, server_round=n, **own, **(fault if n == spoiled else {})))[0] for n in rounds
        ]
        if spoiled in rounds:
            assert re.search(problem, reason(replies.pop(spoiled - 1)))
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
    def made(*given: Any) -> Any:
        received.extend(make(*given))

    ask(LocalGrid(client_app(made), 1), message(1, pack({"a": np.zeros(2)})))
    assert len(received) == expected


def test_the_error_of_a_client_with_one_example_has_the_cure() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    data = [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))]
    grid = LocalGrid(client_app(lambda context: BNClient(copy.deepcopy(model), data, context=context)), 1)
    (reply,) = ask(grid, message(1, pack({key: value.numpy() for key, value in model.state_dict().items()})))
    assert "client 0 could not train" in reason(reply)
    assert (
        "batch norm needs two: give this client more examples or larger batches, leave out a last batch of one"
        in reason(reply)
    )


def test_evaluation_uses_what_the_node_kept_and_does_not_train(federation: Federations) -> None:
    """Statistics that are never sent are the node's own, in evaluation as well."""
    fed = federation((8, 8))
    shared, grid = without_statistics(fed.arrays()), fed.grid()
    sent = [message(1, shared, kind) for kind in ("evaluate", "evaluate", "train", "evaluate")]
    fresh, again, _, later = (dict(reply.content["metrics"]) for reply in ask(grid, *sent))
    assert fresh == again != later


def test_counters_that_are_sent_as_floats_are_rounded(federation: Federations) -> None:
    """Flower's own mean of ten equal integers of 16 is 15.999999999999998."""
    fed = federation(batches=2)
    state = {key: value.numpy().copy() for key, value in fed.model.state_dict().items()}
    state["1.num_batches_tracked"] = np.array(15.999999999999998)
    (reply,) = ask(fed.grid(), message(1, pack(state)))
    assert counters(unpack(reply.content["arrays"])) == [18]


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


@pytest.mark.parametrize(
    "make", [shuffled, by_a_batch_sampler, lambda: DataLoader(shuffled().dataset, 8, shuffle=True)]
)
def test_the_order_of_a_loader_depends_on_seed_and_round_alone(make: Callable[[], DataLoader[Any]]) -> None:
    """And no draw changes the global generator."""
    clients = [BNClient(small(), make(), steps=1, seed=seed) for seed in (0, 1)]
    arrays = sent_by(clients[0])

    def values(client: BNClient, server_round: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        torch.seed()
        before, config = torch.get_rng_state(), {"server-round": server_round}
        found = dict(client.train_round(arrays, config).arrays), dict(client.statistics_round(arrays, config).arrays)
        assert torch.get_rng_state().equal(before)
        return found

    first, again, later, other = (values(clients[i], number) for i, number in ((0, 1), (0, 1), (0, 2), (1, 1)))
    assert all(map(same, first, again))
    assert not any(same(first[0], each[0]) for each in (later, other))
    assert clients[0].num_examples == 24


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


def test_clients_share_a_model_that_computes_with_its_counters() -> None:
    model = small()
    model[1].momentum = None  # a cumulative mean
    twins, found = (copy.deepcopy(model), copy.deepcopy(model)), []
    for models in ((model, model), twins):
        clients = [BNClient(each, shuffled(), context=context(number)) for number, each in enumerate(models)]
        sent = sent_by(clients[0])
        found.append([client.train_round(sent, {}).arrays for _ in range(2) for client in clients])
    assert all(map(same, *found))


def test_the_parameters_of_a_client_are_those_of_its_own_last_fit() -> None:
    model = small()
    clients = [BNClient(model, shuffled(), lr=0.5, context=context(number)) for number in range(3)]
    initial = clients[0].get_parameters({})
    results = [client.fit([value + number for value in initial], {})[0] for number, client in enumerate(clients[:2])]
    for client, expected in zip(clients, [*results, initial], strict=True):
        assert all(map(np.array_equal, client.get_parameters({}), expected))


def test_exchanges_need_a_client_app() -> None:
    client = BNClient(small(), shuffled())
    with pytest.raises(MessageError, match="exchanges with the other clients need a ClientApp made by fedbn_flwr"):
        client.fit(client.get_parameters({}), {"fedbn.exchange": "fused", "fedbn.exchange-min-batch": 2})


def test_a_round_leaves_no_cycle_that_would_keep_its_tensors_in_memory() -> None:
    client = BNClient(small(), shuffled(), momentum=0.9, keep_momentum=True)
    alive = weakref.ref(client.model)
    gc.collect()
    gc.disable()
    try:
        client.train_round(
            sent_by(client), {"proximal-mu": 0.5, "fedbn.scaffold": True, "fedbn.fixbn-freeze": "statistics"}
        )
        del client
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("config", [{"fedbn.fixbn-freeze": "statistics"}, {}])
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
