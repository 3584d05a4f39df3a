"""SCAFFOLD against a derivation by hand: one weight, two clients."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.client.node_state import NodeState
from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.serialization import parse
from fedbn_flwr.storage import Rounds
from fedbn_flwr.strategies import FedAvg, FedTAN, FixBN, GlobalMomentum, Round, Scaffold, restore, state_of
from strategies.fedwon import CLIP
from tests.support.federations import Arrays, Change, Changed, Federations, failing, models_of, replaced, same
from tests.support.fixtures import Batches, Federation
from tests.support.marks import slow_except
from tests.support.plugin import RecordingGrid
from tests.support.records import BAD_RECORDS, between

HAND = ((1.0, 0.0), (2.0, 8.0))  # x and s of each client


def one_weight(
    images: tuple[int, ...] = (1, 1),
    cases: tuple[tuple[float, float], ...] = HAND,
    lr: float = 0.125,
    epochs: int = 2,
) -> Federation:
    """The loss of each client is (x w - s)^2/2, by default w^2/2 and (2w - 8)^2/2; all begin at w = 0."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)

    def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).square().mean()

    data = [
        Batches([(torch.full((count, 1), x, dtype=torch.float64), torch.full((count, 1), s, dtype=torch.float64))])
        for count, (x, s) in zip(images, cases, strict=True)
    ]
    return Federation(model, data, {"lr": lr, "epochs": epochs, "loss": half_square})


def strategy(**options: Any) -> Scaffold:
    return Scaffold(fraction_evaluate=0.0, **{"min_train_nodes": 1, "min_available_nodes": 1, **options})


def weights(models: list[Arrays]) -> list[float]:
    """The weight after each round."""
    return [float(model["weight"].item()) for model in models[1:]]


def test_two_clients_with_one_weight_by_hand() -> None:
    """The gradients are g_0(y) = y and g_1(y) = 4 (y - 4); a step is y <- y - (g(y) + c - c_i) / 8.

    Round 1, x = 0, c = c_0 = c_1 = 0:
      client 0: g = 0, y = 0; g = 0, y = 0.                         c_0 = 0
      client 1: g = -16, y = 2; g = -8, y = 3.                      c_1 = -12
      x = (0 + 3)/2 = 1.5; c = 0 + (0 - 12)/2 = -6
    Round 2:
      client 0: c - c_0 = -6; g = 1.5, y = 2.0625; g = 2.0625, y = 2.5546875.     c_0 = 1.78125
      client 1: c - c_1 = 6; g = -10, y = 2; g = -8, y = 2.25.                    c_1 = -9
      x = (2.5546875 + 2.25)/2 = 2.40234375; c = -6 + (1.78125 + 3)/2 = -3.609375
    Round 3:
      client 0: c - c_0 = -5.390625; g = 2.40234375, y = 2.77587890625;
                g = 2.77587890625, y = 3.10272216796875.
      client 1: c - c_1 = 5.390625; g = -6.390625, y = 2.52734375; g = -5.890625, y = 2.58984375.
      x = (3.10272216796875 + 2.58984375)/2 = 2.846282958984375
    """
    assert weights(models_of(one_weight(), strategy(), 3)) == [1.5, 2.40234375, 2.846282958984375]
    assert weights(models_of(one_weight(), FedAvg(fraction_evaluate=0.0), 2))[1] != 2.40234375


def test_it_ends_where_the_mean_loss_is_least_and_fedavg_does_not() -> None:
    """The mean of the gradients, (w + 4 (w - 4))/2, is zero at 3.2; FedAvg's fixed point is 1.5/0.4921875."""
    assert weights(models_of(one_weight(), strategy(), 60))[-1] == pytest.approx(3.2, abs=1e-6)
    assert weights(models_of(one_weight(), FedAvg(fraction_evaluate=0.0), 60))[-1] == pytest.approx(3.0476190, abs=1e-6)


def test_x_is_weighted_by_examples_and_c_is_not() -> None:
    """Three images on client 1: round 1 has x = (0 + 3*3)/4 = 2.25 and c = -6 as above; in round 2
    client 0 has c - c_0 = -6 and takes 2.25 to 2.71875 and 3.12890625,
    client 1 has c - c_1 = 6 and takes 2.25 to 2.375 and 2.4375; x = (3.12890625 + 3 * 2.4375)/4.
    """
    assert weights(models_of(one_weight((1, 3)), strategy(), 2)) == [2.25, (3.12890625 + 3 * 2.4375) / 4]


def test_control_variates_are_means_of_the_gradients_before_clipping(federation: Federations) -> None:
    """In the first round there is nothing to correct, and the only step of each client begins at the same model."""

    class Clipped(Scaffold):
        def config(self, round: Round) -> dict[str, Any]:
            return {**super().config(round), CLIP: 1e-3}

    fed, plain, clipped = federation((8, 12), batches=1), strategy(), Clipped(fraction_evaluate=0.0)
    models = [models_of(fed, rule, 1)[-1] for rule in (plain, clipped)]
    assert not same(*models)
    assert same(plain.memory.total, clipped.memory.total)


def held(state: NodeState, rule: Scaffold, partition: int) -> Arrays:
    """c_i, the control variate with which a client begins its next round."""
    return dict(state.load(f"fedbn.scaffold.{rule.memory.added.get(partition, 0)}"))


def by_hand(present: list[set[int]], forgotten: Collection[tuple[int, int]] = ()) -> list[float]:
    """x after each round, in which only these clients take part; N = 2. Some have forgotten their c_i (round, i)."""
    gradients = [lambda y: y, lambda y: 4 * (y - 4)]
    x, c, own, found = 0.0, 0.0, [0.0, 0.0], []
    for number, clients in enumerate(present, start=1):
        ends, changes = [], []
        for i in sorted(clients):
            y, seen = x, []
            if (number, i) in forgotten:  # only the server still has it, and takes it out of c after the round
                changes.append(-own[i])
                own[i] = 0.0
            for _ in range(2):
                seen.append(gradients[i](y))
                y -= (seen[-1] + c - own[i]) / 8
            ends.append(y)
            changes.append(sum(seen) / 2 - own[i])
            own[i] += changes[-1]
        x, c = sum(ends) / len(ends), c + sum(changes) / 2
        found.append(x)
    return found


def absent(fed: Federation, partition: int, rounds: set[int]) -> ClientApp:
    return failing(
        fed, lambda client, config: client == partition and config["server-round"] in rounds, OSError("gone")
    )


@pytest.mark.parametrize(("partition", "rounds"), [(0, {2}), (1, {1}), (1, {1, 3}), (0, {2, 3})])
def test_a_client_that_misses_rounds_keeps_its_control_variate(partition: int, rounds: set[int]) -> None:
    """Its share of c does not change: c moves by |S|/N of the mean change."""
    present = [{0, 1} - ({partition} if number in rounds else set()) for number in range(1, 6)]
    fed = one_weight()
    found = weights(models_of(fed, strategy(), 5, absent(fed, partition, rounds)))
    assert found == pytest.approx(by_hand(present), rel=1e-13)
    assert found != pytest.approx(by_hand([{0, 1}] * 5), rel=1e-3)


class Away(GridAround):
    """In some rounds, counted from 1, the last node is not connected."""

    def __init__(self, grid: LocalGrid, rounds: range) -> None:
        super().__init__(grid)
        self.rounds, self.number = rounds, 0

    def get_node_ids(self) -> list[int]:
        ids = list(super().get_node_ids())
        return ids[:-1] if self.number + 1 in self.rounds else ids

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        found = super().send_and_receive(list(messages), timeout=timeout)
        self.number += 1
        return found


THREE = ((1.0, 2.0), (2.0, 8.0), (1.5, 1.0))


@pytest.mark.parametrize("rounds", slow_except([range(1, 6)], [range(1, 6), range(6, 9)]), ids=["joins", "is offline"])
def test_a_client_that_is_away_for_some_rounds_does_not_change_the_optimum(rounds: range) -> None:
    """It is the sum of x s divided by the sum of x^2."""
    fed = one_weight((1, 1, 1), THREE, lr=0.05, epochs=3)
    grid = Away(LocalGrid(fed.app(), 3), rounds)
    result = strategy().start(grid, fed.arrays(), num_rounds=120)
    optimum = sum(x * s for x, s in THREE) / sum(x**2 for x, _ in THREE)
    assert unpack(result.arrays)["weight"].item() == pytest.approx(optimum, abs=1e-9)


def test_the_first_round_is_fedavg_s(federation: Federations) -> None:
    fed = federation((8, 12), momentum=0.9)
    (_, ours), (_, theirs) = models_of(fed, strategy(), 1), models_of(fed, FedAvg(), 1)
    assert same(theirs, ours)


@pytest.mark.parametrize(
    "make",
    [
        Scaffold,
        lambda **options: FixBN(Scaffold(**options), freeze_round=1),
        lambda **options: GlobalMomentum(FedAvg(**options)),
        lambda **options: GlobalMomentum(FedTAN(min_batch=2, **options)),
    ],
)
def test_the_record_of_the_model_may_have_another_name(federation: Federations, make: Callable[..., Any]) -> None:
    """From round 2 on its messages have a second record."""
    fed = federation((8, 12), momentum=0.9)
    named, plain = models_of(fed, make(arrayrecord_key="model"), 3), models_of(fed, make(), 3)
    assert all(same(one, other) for one, other in zip(named, plain, strict=True))


def test_only_parameters_have_control_variates(federation: Federations) -> None:
    fed, seen = federation((8, 12)), []

    def look(message: RecordDict, reply: RecordDict, partition: int) -> None:
        seen.append((message["config"]["server-round"], set(message.array_records), set(reply["control"])))
        if "control" in message:
            assert set(message["control"]) == set(reply["control"])

    models_of(fed, strategy(), 2, between(fed.app(), look))
    parameters = {name for name, _ in fed.model.named_parameters()}
    assert [round_ for round_, _, _ in seen] == [1, 1, 2, 2]
    assert [records for _, records, _ in seen] == [{"arrays"}] * 2 + [{"arrays", "control"}] * 2
    assert all(keys == parameters for _, _, keys in seen)


@pytest.mark.parametrize("name", BAD_RECORDS)
@pytest.mark.parametrize(
    ("make", "record"), [(Scaffold, "control"), (lambda: GlobalMomentum(FedAvg(fraction_evaluate=0.0)), "momentum")]
)
def test_an_unusable_record_is_as_if_its_client_had_been_absent_and_is_named(
    federation: Federations, flower_log: pytest.LogCaptureFixture, name: str, make: Any, record: str
) -> None:
    """The next round begins with the mean of the records of the others."""
    fed, (spoil, words) = federation((8, 12, 6), momentum=0.9), BAD_RECORDS[name]

    def hook(message: RecordDict, reply: RecordDict, partition: int) -> None:
        if (message["config"]["server-round"], partition) == (1, 1):
            spoil(record)(reply)

    found = models_of(fed, make(), 2, between(fed.app(), hook))
    (line,) = [each.getMessage() for each in flower_log.records if "left out" in each.getMessage()]
    assert f"(node 2): its record '{record}'" in line
    assert words in line
    assert same(models_of(fed, make(), 2, absent(fed, 1, {1}))[-1], found[-1])


def test_frozen_affine_parameters_keep_their_control_variates(federation: Federations) -> None:
    """Inside FixBN a frozen parameter has no gradient, so its c and c_i do not change."""
    fed, kept = federation((8, 12)), []
    app, clients = replaced(fed)

    class Noting(Scaffold):
        def after_round(self, *given: Any) -> None:
            super().after_round(*given)
            kept.append((self.memory.total, held(clients[1].state, self, 0)))

    inner = Noting(fraction_evaluate=0.0)
    models_of(fed, FixBN(inner, freeze_round=1, freeze=["affine"]), 3, app)
    for first, second, third in zip(*kept, strict=True):  # c, then c_0
        assert set(first) == set(third) == {name for name, _ in fed.model.named_parameters()}
        for key in ("1.weight", "1.bias"):
            assert first[key].tobytes() == third[key].tobytes()
        assert second["0.weight"].tobytes() != third["0.weight"].tobytes()


def test_a_client_that_does_not_repeat_its_partition_is_counted_once(federation: Federations) -> None:
    fed, rule = federation((8, 12)), strategy()

    def silence(message: RecordDict, reply: RecordDict, partition: int) -> None:
        if message["config"]["server-round"] == 2:
            del reply["client"]

    rule.start(fed.grid(between(fed.app(), silence), node_ids=[1, 101]), fed.arrays(), num_rounds=3)
    assert rule.memory.added == {0: 3, 1: 3}


def test_a_client_that_is_not_connected_keeps_its_share_of_c() -> None:
    fed = one_weight()
    grid = Away(fed.grid(), range(5, 13))  # from round 3 on: each round sends twice
    found = weights(models_of(fed, strategy(), 6, grid=grid))
    assert found == pytest.approx(by_hand([{0, 1}] * 2 + [{0}] * 4), rel=1e-13)


# --- replies that the server does not use ----------------------------------------

OPTIMUM = 3.2  # where the mean of the gradients w and 4 (w - 4) is zero
LOST = [{2}, {1}, {1, 2, 3}]


def trained_round(messages: list[Message]) -> int:
    """The round in which these messages train; 0 for others."""
    is_train = messages and messages[0].metadata.message_type == "train"
    return int(messages[0].content["config"]["server-round"]) if is_train else 0


def lost(rounds: set[int]) -> Change:
    """Loses the replies of node 2 in some rounds, after the node has stored its new control variate."""

    def change(messages: list[Message], replies: list[Message]) -> list[Message]:
        return [each for each in replies if each.metadata.src_node_id != 2 or trained_round(messages) not in rounds]

    return change


def refused(rounds: set[int]) -> Change:
    """The server refuses these replies instead: no model may have infinite weights."""

    def change(messages: list[Message], replies: list[Message]) -> list[Message]:
        for reply in replies:
            if reply.metadata.src_node_id == 2 and trained_round(messages) in rounds:
                reply.content["arrays"] = pack({"weight": np.full((1, 1), np.inf)})
        return replies

    return change


class Kept(Scaffold):
    """Asserts after each round that c is the mean of the c_i with which the clients begin the next one."""

    contexts: Callable[[], Mapping[int, Context]]

    def after_round(self, *given: Any) -> None:
        super().after_round(*given)
        own = [
            held(NodeState(context.state), self, int(context.node_config["partition-id"]))
            for context in self.contexts().values()
        ]
        expected = sum(each.get("weight", np.zeros((1, 1))) for each in own)
        found = self.memory.total.get("weight", np.zeros((1, 1)))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def kept(grid: LocalGrid, **options: Any) -> Kept:
    rule = Kept(fraction_evaluate=0.0, **{"min_train_nodes": 1, "min_available_nodes": 1, **options})
    rule.contexts = grid.contexts
    return rule


@pytest.mark.parametrize("rounds", LOST, ids=str)
@pytest.mark.parametrize("losing", [lost, refused])
def test_a_reply_that_the_server_does_not_use_is_as_if_its_client_had_been_absent(
    losing: Callable[[set[int]], Change], rounds: set[int]
) -> None:
    """The client's next steps are along c - c_i with the c_i that is in c, not with the one that the server never got:
    with that one the run ends at 3.8 (round 2 lost), 0.8 (round 1) or 0.05 (three rounds).
    """
    fed, grid = one_weight(), one_weight().grid()
    found = weights(models_of(fed, kept(grid), 60, grid=Changed(grid, losing(rounds))))
    present = [{0} if number in rounds else {0, 1} for number in range(1, 61)]
    assert found == pytest.approx(by_hand(present), rel=1e-12)
    assert found[-1] == pytest.approx(OPTIMUM, abs=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_with_losses_and_a_return_to_a_checkpoint_it_equals_the_twin_that_has_every_control_variate(
    stop: int, tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    """A reply is lost, a node loses its folder, and the server is killed a round after its checkpoint.

    Then the nodes have other ids. The server takes the lost c_i out of c, and the other one's stays.
    """
    fed, nodes, found = one_weight(), tmp_path / "nodes", list[float]()

    def train(rule: Scaffold, ids: list[int], x: ArrayRecord, rounds: range) -> ArrayRecord:
        """The model of the last round; the latest checkpoint is the one of the round before the first."""
        rule.folder = tmp_path / "server"
        grid = Changed(fed.grid(node_config={"state": str(nodes)}, node_ids=ids), lost({2}))
        for number in rounds:
            if number == 5:
                shutil.rmtree(next(nodes.glob("*/client-1")))
            run = {protocol.RUN: "a run", protocol.TOKEN: "0" * 32, protocol.CHECKPOINT_ROUND: rounds.start - 1}
            messages = rule.configure_train(number, x, ConfigRecord(run), grid)
            arrays, _ = rule.aggregate_train(number, grid.send_and_receive(messages))
            assert arrays is not None
            found.append(float(unpack(x := arrays)["weight"].item()))
        return x

    before, after, x = strategy(), strategy(), fed.arrays()
    before.begin(60, x)
    after.begin(60, x)
    x = train(before, [1, 2], x, range(1, stop + 1))
    restore(after, state_of(before))
    train(before, [1, 2], x, range(stop + 1, stop + 2))
    found.pop()
    train(after, [1, 2] if stop == 1 else [7, 9], x, range(stop + 1, 61))
    assert found == pytest.approx(by_hand([{0, 1}, {0}, *[{0, 1}] * 58], {(5, 1)}), rel=1e-12)
    assert found[-1] == pytest.approx(OPTIMUM, abs=1e-6)
    assert "has lost its control variate, which begins at zero again" in flower_log.text
    assert len([*(tmp_path / "server").rglob("round-*")]) <= 6, "of each client the checkpoint's and the last two"


def test_a_checkpoint_has_no_arrays_for_each_client(federation: Federations) -> None:
    sizes = []
    for clients in (2, 6):
        fed, rule = federation((6,) * clients), strategy()
        models_of(fed, rule, 1)
        sizes.append(len(state_of(rule)))
    assert sizes[1] - sizes[0] < 4 * 64, "bytes: a client's number and the round of its control variate"


def test_with_partial_participation_lost_replies_do_not_change_the_optimum() -> None:
    """Two of three clients a round; the optimum is the sum of x s divided by the sum of x^2, (2 + 16 + 1.5)/7.25."""
    fed = one_weight((1, 1, 1), THREE, lr=0.05, epochs=3)
    grid = fed.grid()
    rule = kept(grid, fraction_train=0.67)
    found = weights(models_of(fed, rule, 120, grid=Changed(grid, lost({1, 2, 5, 6, 7, 40}))))
    assert found[-1] == pytest.approx(19.5 / 7.25, abs=1e-9)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_client_alone_in_a_round_that_lost_its_state_does_not_change_the_others(has_file: bool) -> None:
    """One of three clients trains in each round; after the loss the other two have what they had.

    If the server has lost the client's file too, all begin at zero again.
    """
    fed = one_weight((1, 1, 1), THREE, lr=0.05, epochs=3)
    whole, losses = fed.app(), list[int]()

    class Forgetful(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train" and message.content["config"]["server-round"] == 23:
                losses.append(int(context.node_config["partition-id"]))
                context.state.clear()
                if not has_file:
                    shutil.rmtree(rule.folder)
            reply: Message = whole(message, context)
            return reply

    grid = fed.grid(Forgetful())
    rule = kept(grid, fraction_train=0.34)  # compares c with the sum of what the clients have, after each round
    models_of(fed, rule, 24, grid=grid)
    assert len(losses) == 1
    assert len(rule.memory.added) == (3 if has_file else 1), "one client has trained since"


def test_a_client_that_always_reports_a_loss_does_not_change_the_others(flower_log: pytest.LogCaptureFixture) -> None:
    """It says so in each round, and has lost nothing."""

    def lie(message: RecordDict, reply: RecordDict, partition: int) -> None:
        if partition == 2:
            reply["metrics"]["control-lost"] = 1

    class Noting(Scaffold):
        def after_round(self, *given: Any) -> None:
            super().after_round(*given)
            for partition in range(2):
                stored = Rounds(self.folder / f"client-{partition}").read(self.memory.added[partition])
                own = held(NodeState(grid.contexts()[partition + 1].state), self, partition)["weight"]
                np.testing.assert_allclose(parse(stored, dict)["weight"], own, rtol=1e-12)

    fed = one_weight((1, 1, 1), THREE, lr=0.05, epochs=3)
    grid, rule = fed.grid(between(fed.app(), lie)), Noting(fraction_evaluate=0.0)
    models_of(fed, rule, 4, grid=grid)
    assert rule.memory.added == dict.fromkeys(range(3), 4)
    logged = [each for each in flower_log.records if "begins at zero again" in each.getMessage()]
    assert len(logged) == 1, "once, however often it says so"


def test_a_client_that_returns_under_another_node_id_keeps_its_control_variate(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    """As a SuperNode that was restarted. The server asks the unknown node for its partition."""
    fed = one_weight()
    grids = [fed.grid(node_config={"state": str(tmp_path)}, node_ids=ids) for ids in ([1, 2], [1, 77])]

    grid = GridAround(grids[0])
    run = ConfigRecord({protocol.RUN: "a run", protocol.TOKEN: "0" * 32, protocol.CHECKPOINT_ROUND: 0})
    models: list[float] = []

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        models.append(float(unpack(arrays)["weight"].item()))
        grid.inner = grids[server_round >= 2]

    strategy().start(grid, fed.arrays(), num_rounds=8, train_config=run, evaluate_fn=keep)
    assert models[1:] == pytest.approx(by_hand([{0, 1}] * 8), rel=1e-12)
    assert "not connected" not in flower_log.text, "it is asked for its partition first"


def test_nodes_without_a_partition_are_not_asked_for_it(federation: Federations) -> None:
    """Their replies to the first round have told that there is none."""
    fed = federation((6, 9))
    grid = RecordingGrid(client_app(lambda context: BNClient(copy.deepcopy(fed.model), fed.data[0], lr=0.1)), 2)
    for context in grid.contexts().values():
        context.node_config.clear()
    Scaffold().start(grid, fed.arrays(), num_rounds=3)
    assert grid.count(protocol.PARTITION_QUERY) == 0
