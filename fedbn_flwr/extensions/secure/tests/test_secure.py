"""Secure aggregation: equal to the open run, with clients that drop out at any stage, and what the server receives."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, Krum, QFedAvg, Strategy
from torch import nn

from fedbn_flwr import LocalGrid, client_app, convert_norm
from fedbn_flwr.client.node_state import NodeState
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.extensions.secure import client as secure
from fedbn_flwr.extensions.secure.tests.attacks import (
    HONEST,
    KEYS,
    LATER,
    MASKED,
    SHARES,
    UNKNOWN,
    Attack,
    Hostile,
    absent,
    added,
    arrays_as,
    attacks,
    named_as_records,
    only,
    random,
    zeros,
)
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedBS,
    FedProx,
    FedWon,
    FixBN,
    GlobalMomentum,
    HeteroBN,
    MeanStatistics,
    Scaffold,
    Secure,
    SiloBN,
    Standalone,
    restore,
    state_of,
)
from tests.support.bounds import Equal
from tests.support.experiments import read
from tests.support.federations import Arrays, Changed, Federations, last_model, models_of, same
from tests.support.hostile import kept_log
from tests.support.models import two_norms
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII

NO_EVALUATION: dict[str, Any] = {"fraction_evaluate": 0.0}


def double(federation: Federations, sizes: tuple[int, ...] = (6, 8, 10), **options: Any) -> Any:
    return federation(sizes, **{"model": two_norms, "dtype": torch.float64, "lr": 0.05, **options})


def distance(a: Arrays, b: Arrays) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(value - b[key]).max()) for key, value in a.items())


def without_norms() -> nn.Module:
    return convert_norm(two_norms(), "won")


RULES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**NO_EVALUATION),
    "some clients": lambda: FedAvg(fraction_train=0.67, **NO_EVALUATION),
    "FedProx": lambda: FedProx(**NO_EVALUATION),
    "FedBN": lambda: FedBN(**NO_EVALUATION),
    "SiloBN": lambda: SiloBN(**NO_EVALUATION),
    "FedWon": lambda: FedWon(**NO_EVALUATION),
    "Scaffold": lambda: Scaffold(**NO_EVALUATION),
    "Scaffold, a record of another name": lambda: Scaffold(arrayrecord_key="model", **NO_EVALUATION),
    "weighted by the loss": lambda: FedAvg(weighted_by_key="train-loss", **NO_EVALUATION),
    "GlobalMomentum": lambda: GlobalMomentum(FedAvg(**NO_EVALUATION)),
    "FedAdam": lambda: MeanStatistics(FedAdam(eta=0.01, tau=0.1, **NO_EVALUATION)),
    "FixBN": lambda: FixBN(FedAvg(**NO_EVALUATION), freeze_round=1),
    "FixBN of FedProx, all": lambda: FixBN(FedProx(**NO_EVALUATION), freeze_round=1, freeze=["affine", "statistics"]),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_model_is_that_of_the_open_run(federation: Federations, rule: str) -> None:
    fed = double(federation, momentum=0.9, model=without_norms if rule == "FedWon" else two_norms)
    there = last_model(fed, RULES[rule](), 2)
    # A statistic's step, 2^-24 in the sum over 16 or more examples, with the rounding errors of all clients.
    assert 0 < distance(there, last_model(fed, Secure(RULES[rule]()), 2)) < 5e-8
    if rule == "FedAvg":  # smaller ranges have smaller steps
        exact = Secure(RULES[rule](), update_range=8, statistics_range=1024, max_examples=16)
        assert distance(there, last_model(fed, exact, 2)) < 1e-13


def test_frozen_statistics_keep_every_bit_and_the_sign_of_zero(federation: Federations) -> None:
    fed = federation((6, 8, 10), model=two_norms)
    fed.model[1].running_mean[0] = -0.0
    first = Secure(FixBN(FedAvg(**NO_EVALUATION), freeze_round=0))
    assert np.signbit(last_model(fed, first, 1)["1.running_mean"][0])
    models = models_of(fed, Secure(FixBN(FedAvg(**NO_EVALUATION), freeze_round=1)), 3)
    for key in models[1]:
        assert (models[1][key].tobytes() == models[3][key].tobytes()) == ("running" in key), key


def test_counters_travel_as_integers(federation: Federations) -> None:
    fed = double(federation)
    whole = pack({key: value.numpy().copy() for key, value in fed.model.state_dict().items()})
    models = []
    for rule in (FedAvg(**NO_EVALUATION), Secure(FedAvg(**NO_EVALUATION))):
        rule.start(fed.grid(), whole, num_rounds=2, evaluate_fn=lambda _, arrays: models.append(dict(unpack(arrays))))
    there, here = models[2], models[5]
    assert here["1.num_batches_tracked"].dtype == np.int64
    assert here["1.num_batches_tracked"] == there["1.num_batches_tracked"] == 4
    assert distance(there, here) < 5e-8


def test_metrics_are_the_means_of_the_open_run(federation: Federations) -> None:
    fed = double(federation)
    there, here = (
        rule.start(fed.grid(), fed.arrays(), num_rounds=2).train_metrics_clientapp
        for rule in (FedAvg(**NO_EVALUATION), Secure(FedAvg(**NO_EVALUATION)))
    )
    for number in (1, 2):
        assert here[number].keys() == there[number].keys() == {"train-loss"}
        assert here[number]["train-loss"] == pytest.approx(there[number]["train-loss"], abs=5e-8)


# --- what arrives at the server ----------------------------------------------


def kept(inner: Grid) -> tuple[Changed, list[Message]]:
    """The grid, and all replies that arrive at the server through it."""
    replies: list[Message] = []

    def keep(sent: list[Message], found: list[Message]) -> list[Message]:
        replies.extend(found)
        return found

    return Changed(inner, keep), replies


def masked_of(replies: list[Message]) -> list[Message]:
    """The replies to train messages."""
    return [reply for reply in replies if reply.metadata.message_type == "train"]


def bytes_of(replies: list[Message]) -> bytes:
    """All that arrived, as Flower sends it."""
    return b"".join(recorddict_to_proto(reply.content).SerializeToString() for reply in replies)


def values_of(reply: Message) -> dict[tuple[str, str], np.ndarray]:
    records = arrays_in(reply.content)
    return {(name, key): value for name, record in records.items() for key, value in unpack(record).items()}


def with_secrets(monkeypatch: pytest.MonkeyPatch, offset: int) -> list[bytes]:
    """Secrets of clients that the test knows; they depend on `offset` and on how many were drawn."""
    drawn: list[bytes] = []

    def token_bytes(count: int) -> bytes:
        drawn.append((1000 * offset + len(drawn)).to_bytes(count, "little"))
        return drawn[-1]

    monkeypatch.setattr(secure, "secrets", SimpleNamespace(token_bytes=token_bytes))
    return drawn


@pytest.mark.parametrize("rule", ["FedAvg", "Scaffold", "FedBN"])
def test_no_array_or_metric_of_a_client_arrives(federation: Federations, rule: str) -> None:
    fed = double(federation)
    (opened, plainly), (masked, secretly) = kept(fed.grid()), kept(fed.grid())
    last_model(fed, RULES[rule](), 1, opened)
    last_model(fed, Secure(RULES[rule]()), 1, masked)
    arrived, sent, hidden_ones = bytes_of(secretly), masked_of(plainly), masked_of(secretly)
    # The two runs send the same replies, and the open one shows what each client's values are.
    for plain, hidden in zip(sent, hidden_ones, strict=True):
        assert plain.metadata.src_node_id == hidden.metadata.src_node_id
        values, noise = values_of(plain), values_of(hidden)
        assert noise.keys() == values.keys() | {("totals", key) for _, key in noise if _ == "totals"}
        for where, value in values.items():
            assert value.tobytes() in bytes_of(plainly), where  # the search finds what is there
            assert value.tobytes() not in arrived, where
            assert value.astype(np.float32).tobytes() not in arrived, where
            assert noise[where].dtype == np.uint64
            assert noise[where].shape == value.shape
        readable = {key for record in metrics_in(hidden.content).values() for key in record}
        assert readable <= {protocol.PARTITION}
        for metrics in metrics_in(plain.content).values():
            for key in metrics.keys() - readable:
                assert ("totals", key) in noise
    bits = np.concatenate([value.reshape(-1) for reply in hidden_ones for value in values_of(reply).values()])
    share = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(share - 0.5) < 4 / np.sqrt(64 * bits.size)  # eight standard deviations
    assert len(np.unique(bits)) == bits.size


def test_masks_depend_on_the_secrets_only_and_one_of_them_hides_everything(
    federation: Federations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same secrets, other data: replies differ exactly by the difference of the values. Other secrets: everywhere."""
    arrived = []
    for data, secret in ((0, 0), (1, 0), (0, 1)):
        fed = double(federation)
        fed.data[0].batches = [(images + data, labels) for images, labels in fed.data[0].batches]
        roots = with_secrets(monkeypatch, secret)
        grid, replies = kept(fed.grid())
        # The test takes the values before they are masked; the protocol is unchanged.
        values: list[Mapping[str, Any]] = []
        mask = secure.Session.mask

        def noting(self: Any, records: Any, peers: list[int], to: Any = values, do: Any = mask) -> Any:
            to.append({place: value.copy() for place, value in records.items()})
            return do(self, records, peers)

        monkeypatch.setattr(secure.Session, "mask", noting)
        last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 1, grid)
        monkeypatch.setattr(secure.Session, "mask", mask)
        assert len(roots) == 3
        arrived.append((values, [values_of(reply) for reply in masked_of(replies)]))
    (plain, first), (moved, second), (_, third) = arrived
    for client in range(3):
        for where in first[client]:
            difference = second[client][where] - first[client][where]
            assert (difference == moved[client][where] - plain[client][where]).all()
            if first[client][where].size > 1:
                assert (third[client][where] != first[client][where]).all()
    changed = [any((first[i][where] != second[i][where]).any() for where in first[i]) for i in range(3)]
    assert changed == [True, False, False]
    # What is left of client 0's reply without the masks that it shares with one or both of the others is noise, too.
    for where, value in plain[0].items():
        assert (first[0][where] != value).all()
        assert (first[0][where] + first[1][where] != value + plain[1][where]).all()


# --- clients that drop out ---------------------------------------------------


def losing(inner: Grid, nodes: set[int], where: Callable[[Message], bool]) -> Changed:
    """Loses the replies of some nodes to some messages, which the nodes have handled."""

    def lose(sent: list[Message], replies: list[Message]) -> list[Message]:
        lost = {message.metadata.dst_node_id for message in sent if where(message)} & nodes
        return [reply for reply in replies if reply.metadata.src_node_id not in lost]

    return Changed(inner, lose)


def at_stage(stage: str) -> Callable[[Message], bool]:
    def is_lost(message: Message) -> bool:
        config = config_of(message.content)
        kind = message.metadata.message_type
        is_at_stage = kind == "train" if stage == "train" else config.get(secure.STAGE) == stage
        return is_at_stage and config[protocol.ROUND] == 1

    return is_lost


@pytest.mark.parametrize("stage", ["keys", "shares", "train", "unmask"])
@pytest.mark.parametrize("rule", ["FedAvg", "Scaffold"])
def test_clients_may_drop_out_at_every_stage(federation: Federations, stage: str, rule: str) -> None:
    """And take part in the next round, Scaffold's with the control variates that the server has added."""
    fed = double(federation, (6, 8, 10, 4, 12))
    lost = {2, 5}
    masked = last_model(fed, Secure(RULES[rule]()), 3, losing(fed.grid(), lost, at_stage(stage)))
    # A client whose masked reply has arrived is in the sum, whether it answers later or not.
    twin = losing(fed.grid(), set() if stage == "unmask" else lost, at_stage("train"))
    assert distance(masked, last_model(fed, RULES[rule](), 3, twin)) < 5e-8


def test_after_a_loss_of_control_variates_all_begin_at_zero(federation: Federations) -> None:
    """The server doesn't know whose it was, nor that another client joins in the same round.

    At the end c is the sum of what the clients have.
    """

    def forget(sent: list[Message], replies: list[Message]) -> list[Message]:
        if sent and sent[0].metadata.message_type == "train" and config_of(sent[0].content)[protocol.ROUND] == 2:
            grid.contexts()[2].state = RecordDict()
            metered.hidden = set()
        return replies

    fed, rule = double(federation, (6, 8, 10, 4)), Scaffold(**NO_EVALUATION)
    grid = fed.grid()
    metered = MeteredGrid(Changed(grid, forget))
    metered.hidden = {4}
    last_model(fed, Secure(rule), 4, metered)
    own = [NodeState(context.state).load("fedbn.scaffold.4") for context in grid.contexts().values()]
    for key, total in rule.memory.total.items():
        np.testing.assert_allclose(total, sum(control[key] for control in own), atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("keys", r"round 1, secure aggregation, stage keys: 2 of 5 clients sent a usable reply, 3 are needed"),
        ("shares", r"round 1, secure aggregation, stage shares: 2 of 5 clients sent a usable reply, 3 are needed"),
        ("train", r"round 1, secure aggregation, masked replies: 2 of 5 clients sent a usable reply, 3 are needed"),
        (
            "unmask",
            r"round 1, secure aggregation, stage unmask: 2 of 5 clients .*, 3 are needed:\n.*did not answer in time",
        ),
    ],
)
def test_below_the_threshold_the_run_fails_by_name(federation: Federations, stage: str, says: str) -> None:
    fed = double(federation, (6, 8, 10, 4, 12))
    with pytest.raises(RunFailed, match=says):
        last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 1, losing(fed.grid(), {2, 4, 5}, at_stage(stage)))


def test_a_sum_of_one_client_has_a_reason_of_its_own(federation: Federations) -> None:
    single = FedAvg(min_train_nodes=1, min_available_nodes=1, **NO_EVALUATION)
    says = "round 1, secure aggregation: a sum of one client is its model; let more clients train"
    with pytest.raises(RunFailed, match=says):
        last_model(double(federation, (6,)), Secure(single), 1)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1e4, "'1.running_var' has a value of size .*raise strategy.statistics_range"), (np.nan, "its train-loss is nan")],
)
def test_a_client_out_of_range_or_diverged_drops_out_by_name(
    federation: Federations, flower_log: pytest.LogCaptureFixture, factor: float, reason: str
) -> None:
    fed = double(federation, (6, 8, 10, 4))
    fed.data[1].batches = [(factor * images, labels) for images, labels in fed.data[1].batches]
    masked = last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 1)
    assert re.search(rf"left out client 1 \(node 2\): could not train: MessageError: {reason}", flower_log.text)
    twin = last_model(fed, FedAvg(**NO_EVALUATION), 1, losing(fed.grid(), {2}, at_stage("train")))
    assert distance(masked, twin) < 5e-8


# --- hostile clients ---------------------------------------------------------

ABSENT_AT = {stage: Attack("absent", stage, absent, LATER) for stage in (KEYS, SHARES, MASKED)}
AWAY = ABSENT_AT[KEYS]
_twins: dict[Any, Arrays] = {}


def attacked(
    federation: Federations, rule: str, bad: tuple[int, ...], plan: dict[int, Attack], rounds: int
) -> tuple[Secure, Arrays, list[str], int]:
    """A run of five clients: its rule, model and log, and the number of hostile replies."""
    fed = federation((6, 8, 10, 4, 12), model=two_norms, lr=0.05)
    strategy, app = Secure(RULES[rule]()), Hostile(fed.app(), bad, plan)
    with kept_log() as lines, LocalGrid(app, 5) as grid:
        model = last_model(fed, strategy, rounds, grid)
    return strategy, model, lines, app.sent


def twin(federation: Federations, rule: str, bad: tuple[int, ...], attack: Attack) -> Arrays:
    """The model of these two rounds if the clients send errors instead, and without the first one if it is skipped."""
    plans: dict[str, tuple[int, dict[int, Attack]]] = {
        HONEST: (2, {}),
        UNKNOWN: (1, {}),
        LATER: (2, {1: ABSENT_AT.get(attack.stage, AWAY)}),
    }
    rounds, plan = plans[attack.outcome]
    key = (rule, rounds, *((bad, number, each.stage) for number, each in plan.items()))
    if key not in _twins:
        _twins[key] = attacked(federation, rule, bad, plan, rounds)[1]
    return _twins[key]


def named_in(lines: Iterable[str]) -> set[int]:
    """The partitions of all clients that these lines name; here they are the node ids less one."""
    text = "\n".join(lines)
    return {int(n) - 1 for n in re.findall(r"\bnode (\d+)", text)} | {
        int(n) for n in re.findall(r"\bclient (\d+)", text)
    }


# With two hostile clients, and nightly with one.
TABLE = [
    pytest.param(bad, attack, id=f"{len(bad)}, {attack.stage}: {attack.name}", marks=marks)
    for bad, marks in [((2, 4), ()), ((2,), pytest.mark.nightly)]
    for attack in attacks()
]
# The server makes its records from those of the first reply.
TABLE.append(pytest.param((0,), Attack("configs under the names of records", MASKED, named_as_records, HONEST)))


@pytest.mark.parametrize(("bad", "attack"), TABLE)
def test_an_attack_ends_no_run_and_blames_no_honest_client(
    federation: Federations, bad: tuple[int, ...], attack: Attack
) -> None:
    """In the first of two rounds; the model is bit for bit that of `twin`."""
    strategy, model, lines, sent = attacked(federation, "FedAvg", bad, {1: attack}, 2)
    assert sent >= len(bad)
    assert same(model, twin(federation, "FedAvg", bad, attack))
    is_skipped = attack.outcome == UNKNOWN
    assert any("round 1 is skipped, the model stays as it is" in line for line in lines) == is_skipped
    assert strategy.memory.skipped == [1] * is_skipped
    assert named_in(lines) <= set(bad)
    if is_skipped:
        assert any("the masks hide which client is at fault" in line for line in lines)


ZEROS = Attack("zeros", MASKED, arrays_as(zeros), UNKNOWN)


def test_three_skipped_rounds_in_a_row_end_the_run_and_name_no_client(federation: Federations) -> None:
    strategy, *_ = attacked(federation, "FedAvg", (2,), dict.fromkeys((1, 2, 4, 5), ZEROS), 5)
    assert strategy.memory.skipped == [1, 2, 4, 5], "a good round between them"
    says = "rounds 3, 4, 5 were skipped; the last one: .*the masks hide which client is at fault"
    with pytest.raises(RunFailed, match=says) as error:
        attacked(federation, "FedAvg", (2,), dict.fromkeys((1, 3, 4, 5), ZEROS), 5)
    assert not named_in([str(error.value)])


def test_a_frozen_array_that_a_reply_changes_skips_the_round(federation: Federations) -> None:
    """A change in range: the rule inside would refuse the mean, and with it the reply of each client."""
    little = Attack("frozen", MASKED, arrays_as(added(2**20), only("arrays", "running_mean")), UNKNOWN)
    strategy, _, lines, sent = attacked(federation, "FixBN", (2,), {2: little}, 3)
    assert strategy.memory.skipped == [2]
    assert sent == 1
    assert not named_in(lines)


def test_a_running_variance_of_zero_is_no_negative_one(federation: Federations) -> None:
    """The sums of changes are rounded, so that variances which become zero may be below it."""

    def constant() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32, momentum=1.0), nn.Linear(32, 3))
        model[1].running_var.uniform_(0, 0.01)  # type: ignore[index,union-attr,operator]
        return model

    fed = double(federation, (5, 6, 7), model=constant)
    for each in fed.data:
        each.batches = [(torch.ones_like(images), labels) for images, labels in each.batches]
    after = last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 2)
    assert distance(after, last_model(fed, FedAvg(**NO_EVALUATION), 2)) < 5e-8
    assert (after["1.running_var"] >= 0).all()


def test_history_and_summary_have_skipped_rounds(tmp_path: Path) -> None:
    experiment = load_experiment(
        "rounds: 2\nclients: 5\ndata: {name: digits, partition: {kind: iid}}\nmodel: {name: mlp}\n"
        "strategy: {name: Secure, base: {name: FedAvg}}\ntrain: {steps: 1}\nengine: {workers: 0, device: cpu}"
    )
    (prepared,) = prepare(experiment)
    folder = RunFolder(tmp_path / "run")
    folder.begin(prepared.run.model_dump(mode="json"))
    app = Hostile(client_app(ClientMaker(experiment)), (2,), {1: Attack("shares", SHARES, arrays_as(random), UNKNOWN)})
    with LocalGrid(app, 5) as grid:
        run_one(prepared, grid, folder, Reporter(), 0)
    first, second = folder.history()
    assert (first["skipped"], first["clients"], second["clients"]) == (1, 0, 5)
    assert "skipped" not in second
    summary = folder.summary()
    assert summary is not None
    assert summary.notes["secure_skipped"] == [1]
    again = make_rule(prepared.run)
    again.begin(2, prepared.rule._round.arrays)
    restore(again, state_of(prepared.rule))
    assert again.memory == prepared.rule.memory


# --- a client reveals no more than the protocol needs ------------------------


def asking(inner: Grid, change: Callable[[Message], list[Message]]) -> tuple[Changed, list[Message]]:
    """Repeats the server's requests to reveal shares, with changes, and keeps the answers."""
    answers: list[Message] = []

    def ask(sent: list[Message], replies: list[Message]) -> list[Message]:
        for message in sent:
            for asked in change(message):
                answers.extend(inner.send_and_receive([asked]))
        return replies

    return Changed(inner, ask), answers


def unmask_of(message: Message, change: Callable[[dict[str, np.ndarray]], None]) -> list[Message]:
    config = config_of(message.content)
    if config.get(secure.STAGE) != "unmask":
        return []
    arrays = dict(unpack(message.content["secure"]))  # type: ignore[arg-type]
    change(arrays)
    content = RecordDict({"config": config, "secure": pack(arrays)})
    return [Message(content, message.metadata.dst_node_id, secure.QUERY)]


def test_a_client_never_reveals_both_shares_of_another(federation: Federations) -> None:
    """A second request with another set of survivors."""

    def without_last(arrays: dict[str, np.ndarray]) -> None:
        arrays["survivors"] = arrays["survivors"][:-1]

    fed = double(federation, (6, 8, 10, 4))
    grid, answers = asking(fed.grid(), lambda message: unmask_of(message, without_last))
    last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 1, grid)
    assert len(answers) == 4
    assert all("this client has no secrets for the server's session" in reply.error.reason for reply in answers)


@pytest.mark.parametrize(
    ("survivors", "says"),
    [
        ([1, 2, 3, 5], "of other clients than this client made its masks for"),
        ([2, 3, 4], "of other clients than this client"),
        ([1, 2], "the sum of 2 clients; expected at least 3"),
        ([1, 2, 2], "the sum of 2 clients; expected at least 3"),
    ],
)
def test_a_client_refuses_to_open_other_sums(federation: Federations, survivors: list[int], says: str) -> None:
    fed = double(federation, (6, 8, 10, 4))
    grid = fed.grid()
    rule = Secure(FedAvg(**NO_EVALUATION))
    rule.begin(1, fed.arrays())
    messages = list(rule.configure_train(1, fed.arrays(), ConfigRecord(), grid))
    assert not any(reply.has_error() for reply in grid.send_and_receive(messages))
    asked = configs_in(messages[0].content)["config"]
    about = pack({"survivors": np.array(survivors, np.uint64)})
    content = RecordDict({"config": ConfigRecord({**asked, secure.STAGE: "unmask"}), "secure": about})
    (reply,) = grid.send_and_receive([Message(content, 1, secure.QUERY)])
    assert says in reply.error.reason


def test_a_reply_is_masked_once(federation: Federations) -> None:
    """Two replies under the same masks would reveal their difference."""
    fed = double(federation, (6, 8, 10))
    grid, answers = asking(fed.grid(), lambda message: masked_of([message]))
    last_model(fed, Secure(FedAvg(**NO_EVALUATION)), 1, grid)
    assert len(answers) == 3
    assert all("asks for masks of a session again" in reply.error.reason for reply in answers)


def test_an_app_that_cannot_mask_refuses(federation: Federations) -> None:
    fed = double(federation)
    client = fed.make_client(Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    with pytest.raises(MessageError, match=r"'fedbn\.secure' needs a ClientApp made by fedbn_flwr\.client_app"):
        client.fit([value.numpy() for value in fed.model.state_dict().values()], {secure.SESSION: "0" * 32})


# --- secrets stay in memory --------------------------------------------------


def test_secrets_are_neither_written_nor_logged(
    federation: Federations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fed = double(federation)
    roots = with_secrets(monkeypatch, 77_000_000_000)
    grid = fed.grid(node_config={"state": str(tmp_path)})
    rule = Secure(Scaffold(**NO_EVALUATION))
    run = ConfigRecord({protocol.RUN: "a run", protocol.TOKEN: "0" * 32, protocol.CHECKPOINT_ROUND: 0})
    rule.start(grid, fed.arrays(), num_rounds=2, train_config=run)
    assert len(roots) == 6
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"fedbn.arrays.fedbn.scaffold" in written  # the client's state is there
    for root in roots:
        assert root not in written
        assert base64.b64encode(root) not in written
        assert root.hex() not in caplog.text
        assert repr(root) not in caplog.text
    for node in (1, 2, 3):  # and deleted when the round has ended
        assert secure.SECRET not in grid.contexts()[node].state
    assert secure.SECRET.encode() not in dump(RecordDict({secure.SECRET: ConfigRecord({"root": b"x"})}))
    grid.close()


# --- what is refused before training -----------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (FedTAN, "exchanges statistics of batches, which Secure does not mask"),
        (FedAvgGlobalStats, "exchanges statistics of batches"),
        (FedTANII, "exchanges statistics of batches"),
        (lambda: FixBN(FedTAN()), "exchanges statistics of batches"),
        (lambda: FedBS(), "FedBS weights the clients by the loss of each"),
        (lambda: HeteroBN(statistics="query"), "HeteroBN queries the statistics of each client's data"),
        (lambda: FixBN(FedBS(), freeze_round=1), "loss of each"),
        (lambda: FedAvg(bounds=Equal()), "FedAvg compares the replies of single clients"),
        (lambda: FixBN(FedAvg(bounds=Equal())), "FedAvg compares the replies of single clients"),
        (lambda: MeanStatistics(Krum()), "Krum compares the clients' models"),
        (lambda: MeanStatistics(FedAdam(), statistics="median"), "MeanStatistics takes the median of the clients'"),
        (lambda: QFedAvg(0.1, train_loss_key="train-loss"), "QFedAvg weights the clients by the loss"),
        (
            lambda: DifferentialPrivacyServerSideFixedClipping(FedAdam(), 1.0, 1.0, 3),
            "FixedClipping clips the changes",
        ),
        (lambda: FixBN(Secure(FedAvg())), r"FixBN cannot wrap it; expected Secure\(FixBN\(...\), ...\)"),
        (
            lambda: make_rule(
                read("model: {name: cnn}\nstrategy: {name: Secure, base: {name: FedBN}}\nevaluate: {dynamics: true}")
            ),
            r"evaluate\.dynamics is true and reads",
        ),
        (lambda: Secure(FedAvg(), threshold=0.4), "threshold is 0.4; expected a share of the clients from 0.5"),
        (lambda: Secure(FedAvg(), threshold=1.0), "threshold is 1.0"),
        (lambda: Secure(FedAvg(), update_range=0), "update_range is 0"),
        (lambda: Secure(FedAvg(), statistics_range=2**30), "range is 1073741824 and max_examples is 1048576"),
        (lambda: Secure(FedAvg(), max_examples=2.0**40), "max_examples is"),
        (lambda: Secure(FedAvg(), timeout=0), "timeout is 0"),
    ],
)
def test_wrong_arguments_and_what_needs_single_replies_are_refused(make: Callable[[], Strategy], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Secure(make())


def test_a_client_does_not_mask_a_round_with_exchanges(federation: Federations) -> None:
    """A server could read the contributions, which are not masked."""
    fed = double(federation)
    content = RecordDict(
        {"arrays": fed.arrays(), "config": ConfigRecord({secure.SESSION: "0" * 32, protocol.EXCHANGE: "fused"})}
    )
    (reply,) = fed.grid().send_and_receive([Message(content, 1, "train")])
    assert "the exchanges of 'fedbn.exchange' are not masked" in reply.error.reason


def test_a_rule_that_sends_no_arrays(federation: Federations) -> None:
    fed = double(federation)
    assert same(last_model(fed, Secure(Standalone(**NO_EVALUATION)), 1), dict(unpack(fed.arrays())))


# --- the documentation -------------------------------------------------------
