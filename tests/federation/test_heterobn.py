"""HeteroBN: static batch norm in training, and statistics of all clients' data in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import Role, convert_norm
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.norms.variants import StaticBatchNorm
from fedbn_flwr.strategies import FedAvg, FixBN, HeteroBN, MeanStatistics, Round
from tests.support.federations import Changed, Federations, failing, near, only, same
from tests.support.fixtures import small_net
from tests.support.plugin import RecordingGrid

STATISTICS = {"1.running_mean", "1.running_var"}
GONE = OSError("the disk is gone")


def static_net() -> nn.Module:
    return convert_norm(small_net(), "sbn")


def tracking_twin(fed: Any, arrays: ArrayRecord) -> nn.Module:
    """The same weights with torch's batch norm that tracks the cumulative mean of its batches."""
    twin = copy.deepcopy(fed.model)
    gamma, beta = twin[1].weight, twin[1].bias
    twin[1] = nn.BatchNorm2d(4, momentum=None, dtype=gamma.dtype)
    twin[1].weight, twin[1].bias = gamma, beta
    twin.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in unpack(arrays).items()}, strict=False)
    return twin


# --- the layer ---------------------------------------------------------------


def pair(channels: int = 3) -> tuple[nn.BatchNorm2d, nn.Module]:
    """Batch norm with some gamma, beta and statistics, and the static one made of it."""
    plain = nn.BatchNorm2d(channels, eps=1e-3, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.normal_()
        plain.running_mean.normal_()
        plain.running_var.uniform_(0.5, 2)
    return plain, convert_norm(copy.deepcopy(plain), "sbn")


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 2, 2), (6, 3, 2, 2, 2)])
def test_static_batch_norm_uses_the_batch_in_training_and_evaluation(shape: tuple[int, ...]) -> None:
    _, static = pair()
    x = torch.randn(shape, dtype=torch.float64)
    expected = F.batch_norm(x, None, None, static.weight, static.bias, training=True, eps=1e-3)
    assert static.train()(x).equal(expected)
    assert static.eval()(x).equal(expected)
    with pytest.raises(ValueError, match="at least two dimensions"):
        static(x[0, :, None].flatten())


def test_it_has_gamma_and_beta_and_no_statistics() -> None:
    _, static = pair()
    assert isinstance(static, StaticBatchNorm)
    assert list(static.state_dict()) == ["weight", "bias"]
    assert set(roles(static).values()) == {Role.AFFINE}
    assert set(roles(static.state_dict()).values()) == {Role.WEIGHTS}, "arrays do not show that they are not weights"


def test_loaded_statistics_are_used_only_in_evaluation() -> None:
    plain, static = pair()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    by_batch = static.train()(x)
    state = {key: value for key, value in plain.state_dict().items() if key != "num_batches_tracked"}
    static.load_state_dict(state)  # strict: nothing is unexpected
    assert static.eval()(x).equal(plain.eval()(x))
    assert not static(x).equal(by_batch)
    assert static.train()(x).equal(by_batch)
    assert static.running_mean.equal(plain.running_mean), "training does not touch them"
    assert list(static.state_dict()) == ["weight", "bias"], "nor are they saved or sent"
    static.load_state_dict(static.state_dict())
    assert static.eval()(x).equal(by_batch), "a state without statistics removes them"


def test_what_is_loaded_is_a_copy_in_the_layer_s_dtype() -> None:
    plain, static = pair()
    state = {key: value.float() for key, value in plain.state_dict().items()}
    static.load_state_dict(state, strict=False)
    assert static.running_var.dtype == torch.float64
    kept = static.running_mean.clone()
    state["running_mean"].add_(1)
    assert static.running_mean.equal(kept)


# --- training ----------------------------------------------------------------


def test_training_equals_fedavg_with_tracked_statistics_bit_for_bit(federation: Federations) -> None:
    fed, tracking = federation((8, 12), model=static_net), federation((8, 12))
    ours = HeteroBN().start(fed.grid(), fed.arrays(), num_rounds=3).arrays
    plain = FedAvg().start(fed.grid(), fed.arrays(), num_rounds=3).arrays
    twin = FedAvg().start(tracking.grid(), tracking.arrays(), num_rounds=3).arrays
    assert list(ours) == list(plain) == [key for key in twin if key not in STATISTICS]
    for key in ours:
        assert ours[key].numpy().tobytes() == plain[key].numpy().tobytes() == twin[key].numpy().tobytes(), key


# --- the query ---------------------------------------------------------------


def test_batch_asks_no_client(federation: Federations) -> None:
    fed = federation(model=static_net)
    grid, arrays = MeteredGrid(fed.grid()), fed.arrays()
    assert HeteroBN().global_model(Round(1, arrays, ConfigRecord(), grid)) is arrays
    assert grid.take().other_messages == 0


@pytest.mark.parametrize("ids", [[1, 2, 3], [90210, 17, 4]], ids=["in order", "ids in another order"])
def test_query_equals_torch_s_cumulative_statistics_over_all_batches(federation: Federations, ids: list[int]) -> None:
    """One model with momentum=None over the batches of client 0, then 1, then 2, as HeteroFL's authors have it.

    Clients have 2, 3 and 1 batches, which are the weights of their means.
    """
    fed = federation((8, 12, 6), model=static_net, dtype=torch.float64)
    fed.data[1].batches = [(x[i::2], y[i::2]) for x, y in fed.data[1].batches for i in (0, 1)][:3]
    fed.data[2].batches = fed.data[2].batches[:1]
    strategy = HeteroBN(statistics="query")
    grid = fed.grid(node_ids=ids)
    trained = strategy.start(grid, fed.arrays(), num_rounds=2).arrays
    found = FixBN(strategy, freeze_round=2).global_model(Round(2, trained, ConfigRecord(), grid))
    assert set(found) - set(trained) == STATISTICS
    assert all(found[key].numpy().tobytes() == trained[key].numpy().tobytes() for key in trained)
    twin = tracking_twin(fed, trained).train()
    with torch.no_grad():
        for data in fed.data:
            for inputs, _ in data.batches:
                twin(inputs)
    assert int(twin[1].num_batches_tracked) == 6
    near({key: found[key].numpy() for key in STATISTICS}, twin.state_dict(), rtol=1e-13)
    # A static model with these statistics evaluates as that twin does.
    static = copy.deepcopy(fed.model)
    static.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in unpack(found).items()})
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    np.testing.assert_allclose(static.eval()(x).detach(), twin.eval()(x).detach(), rtol=1e-12)


def test_pooled_adds_the_variance_between_the_clients_means(federation: Federations) -> None:
    """With p_i the shares of the batches, 2, 1 and 1 of 4: var = sum p_i (var_i + (mu_i - mu)^2)."""
    fed = federation((8, 12, 6), model=static_net, dtype=torch.float64)
    fed.data[0].batches = [(x[i::2], y[i::2]) for x, y in fed.data[0].batches for i in (0, 1)][:2]
    for data, shift in zip(fed.data, (0.0, 3.0, -2.0), strict=True):
        data.batches = [(x + shift, y) for x, y in data.batches][: 2 if data is fed.data[0] else 1]
    mean, pooled = (
        unpack(HeteroBN(statistics=kind).global_model(Round(1, fed.arrays(), ConfigRecord(), fed.grid())))  # type: ignore[arg-type]
        for kind in ("query", "pooled")
    )
    own = []
    for data in fed.data:
        twin = tracking_twin(fed, fed.arrays()).train()
        with torch.no_grad():
            for inputs, _ in data.batches:
                twin(inputs)
        own.append((twin[1].running_mean.numpy(), twin[1].running_var.numpy()))
    shares = (0.5, 0.25, 0.25)
    mu = sum(p * each for p, (each, _) in zip(shares, own, strict=True))
    var = sum(p * (v + (each - mu) ** 2) for p, (each, v) in zip(shares, own, strict=True))
    np.testing.assert_allclose(pooled["1.running_mean"], mu, rtol=1e-12)
    np.testing.assert_allclose(pooled["1.running_var"], var, rtol=1e-12)
    assert (pooled["1.running_var"] > mean["1.running_var"]).all()


def test_the_query_is_counted_apart_from_training(federation: Federations) -> None:
    fed = federation(model=static_net)
    grid = MeteredGrid(fed.grid())
    strategy = HeteroBN(statistics="query", fraction_evaluate=0.0)
    trained = strategy.start(grid, fed.arrays(), num_rounds=1).arrays
    before = grid.take()
    strategy.global_model(Round(1, trained, ConfigRecord(), grid))
    after = grid.take()
    assert (after.communication_rounds, after.messages_down, after.bytes_down, after.broadcast_bytes) == (0, 0, 0, 0)
    assert after.other_messages == 4
    assert after.other_bytes == before.bytes_down + 2 * 2 * 4 * 4  # two clients, mean and variance, four channels


def test_the_query_keeps_the_clients_states_and_names_the_run(federation: Federations) -> None:
    """A node's state has the name of its run; a query without it would count as one of another run."""
    fed = federation(model=static_net, momentum=0.9, keep_momentum=True)
    grid = RecordingGrid(fed.app(), 2)
    strategy = HeteroBN(statistics="query", fraction_evaluate=0.0)
    strategy.start(grid, fed.arrays(), num_rounds=1, train_config=ConfigRecord({"fedbn.run": "a"}))
    state = grid.contexts()[1].state
    before = unpack(state["fedbn.arrays.fedbn.momentum"])
    strategy.global_model(Round(1, fed.arrays(), ConfigRecord({"fedbn.run": "a"}), grid))
    assert [(each.config["fedbn.run"], each.config["server-round"]) for each in grid.sent] == [("a", 1)] * 4
    assert same(unpack(state["fedbn.arrays.fedbn.momentum"]), before)


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: MeanStatistics(rule)], ids=["bare", "wrapped"])
def test_evaluate_fn_receives_the_queried_statistics(federation: Federations, wrap: Any) -> None:
    """A project's own evaluation loads the global model."""
    fed, seen = federation(model=static_net, dtype=torch.float64), dict[int, ArrayRecord]()
    rule = HeteroBN(statistics="query")
    result = wrap(rule).start(fed.grid(), fed.arrays(), num_rounds=2, evaluate_fn=seen.__setitem__)
    assert {*seen} == {0, 1, 2}
    for number, arrays in {0: fed.arrays(), 2: result.arrays}.items():
        asked = rule.global_model(Round(1, arrays, ConfigRecord(), fed.grid()))
        assert {*asked} == {*arrays} | STATISTICS
        assert same(unpack(asked), unpack(seen[number]))
    assert STATISTICS.isdisjoint(result.arrays)


def test_a_client_whose_statistics_do_not_fit_is_left_out_by_name(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 12, 6, 4), model=static_net)

    def change(replies: list[Message]) -> list[Message]:
        arrays: list[Any] = [each.content["arrays"] if each.has_content() else {} for each in replies]
        arrays[1]["1.running_mean"] = Array(np.full(4, np.nan, np.float32))
        arrays[3]["4.bias"] = Array(np.zeros(3, np.float32))
        return replies

    grid = Changed(fed.grid(failing(fed, lambda client, _: client == 0, GONE)), only(protocol.STATISTICS_QUERY, change))
    strategy = HeteroBN(statistics="query", min_train_nodes=1)
    found = strategy.global_model(Round(4, fed.arrays(), ConfigRecord(), grid))
    assert "round 4, statistics: left out" in flower_log.text
    assert "client 1 (node 2): '1.running_mean' has 4 of 4 values that are not finite" in flower_log.text
    assert "the disk is gone" in flower_log.text
    assert "client 3 (node 4): it sent '4.bias'; expected only statistics of batch norm" in flower_log.text
    means = [fed.model[0](inputs).mean((0, 2, 3)) for inputs, _ in fed.data[2].batches]
    np.testing.assert_allclose(
        found["1.running_mean"].numpy(), (sum(means) / len(means)).detach().numpy(), rtol=1e-3, atol=1e-3
    )


def test_the_query_leaves_the_training_s_clients_as_they_are(federation: Federations) -> None:
    """Client 2 does not train, client 0 does not answer the query."""
    fed, absent = federation((8, 12, 6), model=static_net), 2
    strategy = HeteroBN(statistics="query", min_train_nodes=1)
    grid = fed.grid(failing(fed, lambda client, _: client == absent, GONE))
    strategy.begin(1, fed.arrays())
    replies = grid.send_and_receive(strategy.configure_train(1, fed.arrays(), ConfigRecord(), grid))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    training = strategy.training
    before = [*training.left], [*training.left_out], [*training.refused]
    assert before[0] == [1, 2]
    assert ["the disk is gone" in reason for reason in before[1]] == [True]
    absent = 0
    assert "1.running_mean" in strategy.global_model(Round(1, arrays, ConfigRecord(), grid))
    assert strategy.training is training
    assert ([*training.left], [*training.left_out], [*training.refused]) == before


def test_too_few_answers_end_the_run(federation: Federations) -> None:
    fed = federation(model=static_net)
    grid = fed.grid(failing(fed, lambda client, _: client == 0, GONE))
    words = r"round 4, statistics: 1 of 2 clients sent a usable reply, 2 are needed:(.|\n)*disk is gone"
    with pytest.raises(RunFailed, match=words):
        HeteroBN(statistics="query").global_model(Round(4, fed.arrays(), ConfigRecord(), grid))


def test_another_metric_of_training_may_weight_the_models(federation: Federations) -> None:
    """Answers to the query have no such metric: their weights are their numbers of batches."""
    fed = federation((8, 12, 6), model=static_net, dtype=torch.float64)
    round = Round(1, fed.arrays(), ConfigRecord(), fed.grid())
    found, expected = (
        HeteroBN(statistics="query", **options).global_model(round)
        for options in ({"weighted_by_key": "train-loss"}, {})
    )
    assert all(found[key].numpy().tobytes() == expected[key].numpy().tobytes() for key in STATISTICS)
