"""FedAP against a twin in float64: what clients measure, the weights of their mixes, and who gets which mix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedbn_flwr.strategies.fedap import mix  # type: ignore[import-untyped]
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, client_app, run
from fedbn_flwr.client.rule import MODEL
from fedbn_flwr.errors import RunFailed, SettingsError, UserError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.messages.serialization import parse
from fedbn_flwr.strategies import FedAP, FedAvg, FedBN, FedRDN, FixBN, Private, Scaffold, Secure
from tests.support.federations import Arrays, Federations, failing, models_of, near, noted_losses, replaced, same
from tests.support.fixtures import Batches
from tests.support.plugin import RecordingGrid
from tests.support.twins import by_hand, share

SIZES = (6, 9, 14)
LR = 0.2
OWN = {"1.running_mean", "1.running_var", "1.weight", "1.bias", "5.running_mean", "5.running_var", "5.weight", "5.bias"}


def two_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, 3),
    )  # fmt: skip


# --- the twin ---


def inputs_of_norms(state: dict[str, NDArray[Any]], images: NDArray[Any]) -> list[NDArray[Any]]:
    """What the two batch norms normalise in evaluation mode, [values, channels] each."""
    patches = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(2, 3))  # [N, 2, 2, 2, 3, 3]
    first = np.einsum("ncxyij,ocij->nxyo", patches, state["0.weight"]) + state["0.bias"]
    scaled = (first - state["1.running_mean"]) / np.sqrt(state["1.running_var"] + 1e-5)
    hidden = np.maximum(scaled * state["1.weight"] + state["1.bias"], 0).transpose(0, 3, 1, 2).reshape(len(images), -1)
    return [first.reshape(-1, 4), hidden @ state["4.weight"].T + state["4.bias"]]


def weights_by_hand(fed: Any, state: dict[str, NDArray[Any]], own_share: float) -> NDArray[Any]:
    """W of the paper and its rows of weights, from the moments of all values of each client."""
    moments = []
    for data in fed.data:
        images = np.concatenate([inputs.numpy() for inputs, _ in data.batches])
        moments.append([(values.mean(0), values.std(0)) for values in inputs_of_norms(state, images)])
    count = len(moments)
    w = np.zeros((count, count))
    for i in range(count):
        for j in range(count):
            for (mu_i, s_i), (mu_j, s_j) in zip(moments[i], moments[j], strict=True):
                w[i, j] += np.sqrt(sum((mu_i - mu_j) ** 2) + sum((s_i - s_j) ** 2))
    rows = np.zeros_like(w)
    for i in range(count):
        rest = [j for j in range(count) if j != i]
        for j in rest:
            rows[i, j] = (1 - own_share) / w[i, j] / sum(1 / w[i, k] for k in rest)
        rows[i, i] = own_share
    return rows


def as_numpy(state: Any) -> dict[str, NDArray[Any]]:
    return {key: value.detach().numpy().copy() for key, value in state.items()}


def twin(fed: Any, rounds: int, warmup: int, own_share: float) -> tuple[list[Any], list[nn.Module]]:
    """The global model after each round, and each client's model at the end."""
    models = [copy.deepcopy(fed.model).train() for _ in fed.data]
    sizes, means = [data.num_examples for data in fed.data], [as_numpy(fed.model.state_dict())]
    rows = None
    for number in range(1, rounds + 1):
        if number > warmup and rows is None:
            rows = weights_by_hand(fed, means[-1], own_share)
        for model, data in zip(models, fed.data, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for inputs, labels in data.batches:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        sent = [as_numpy(model.state_dict()) for model in models]
        means.append(as_numpy(share(models, sizes, OWN)))
        for i, model in enumerate(models if rows is not None else []):
            assert rows is not None
            mixed = {key: sum(rows[i, j] * each[key] for j, each in enumerate(sent)) for key in sent[0]}
            model.load_state_dict(
                {key: torch.from_numpy(np.asarray(value)) for key, value in mixed.items()
                 if key not in OWN and "num_batches" not in key}, strict=False,
            )  # fmt: skip
    return means, models


@pytest.mark.parametrize(("warmup", "own_share"), [(0, 0.5), (1, 0.5), (2, 0.2)])
def test_rounds_and_evaluations_equal_the_method_by_hand(
    federation: Federations, warmup: int, own_share: float
) -> None:
    fed = federation(SIZES, model=two_norms, dtype=torch.float64, lr=LR)
    losses, mean = noted_losses()
    rule = FedAP(own_share=own_share, warmup_rounds=warmup, evaluate_metrics_aggr_fn=mean)
    found = models_of(fed, rule, 4)
    means, models = twin(fed, 4, warmup, own_share)
    for ours, theirs in zip(found, means, strict=True):
        near(ours, theirs, rtol=1e-10, atol=1e-11)
    for loss, model, data in zip(losses, models, fed.data, strict=True):
        inputs, labels = (torch.cat([batch[i] for batch in data.batches]) for i in (0, 1))
        np.testing.assert_allclose(loss, F.cross_entropy(model.eval()(inputs), labels).item(), rtol=1e-10)


def test_before_the_warm_up_has_ended_it_is_fedbn(federation: Federations) -> None:
    fed = federation(SIZES, model=two_norms, lr=LR)
    assert same(models_of(fed, FedAP(warmup_rounds=3), 3)[-1], models_of(fed, FedBN(), 3)[-1])
    assert not same(models_of(fed, FedAP(warmup_rounds=1), 3)[-1], models_of(fed, FedBN(), 3)[-1])
    assert by_hand(fed, 1, OWN)[0].keys() == fed.model.state_dict().keys()


# --- the weights ---


def at(mean: float, variance: float = 1.0) -> Arrays:
    return {"n.running_mean": np.array([mean]), "n.running_var": np.array([variance])}


def test_weights_that_a_person_can_verify() -> None:
    """Distances of 1 and 3 from client 0: shares of 3 to 1 in the half that is not its own."""
    statistics = {0: at(0), 1: at(1), 2: at(0, 16)}
    assert mix(0, statistics, [0, 1, 2], 0.5) == pytest.approx({1: 0.375, 2: 0.125, 0: 0.5})
    assert mix(0, statistics, [1, 2], 0.5) == pytest.approx({1: 0.375, 2: 0.125}), "its own model is not known"
    assert mix(0, statistics, [0, 2], 0.9) == pytest.approx({2: 0.1, 0: 0.9})
    assert mix(0, statistics, [0], 0.5) == {0: 0.5}, "alone"
    assert mix(0, {1: at(1), 2: at(3)}, [0, 1, 2], 0.5) == {}, "its statistics are not known"
    assert mix(0, {0: at(0), 1: at(1)}, [0, 1, 2], 0.5) == pytest.approx({1: 0.5, 0: 0.5}), "those of 2 are not known"


def test_equal_clients_share_equally_and_no_distance_gives_nan() -> None:
    alike = mix(0, {0: at(0), 1: at(0), 2: at(0), 3: at(1)}, range(4), 0.5)
    assert alike == pytest.approx({1: 0.25, 2: 0.25, 3: 0, 0: 0.5}, abs=1e-13)
    for far in (1e200, -1e279):
        found = mix(0, {0: at(0), 1: at(far)}, [0, 1], 0.5)
        assert found == {1: 0.5, 0: 0.5}
        assert mix(0, {0: at(0), 1: at(far), 2: at(1)}, [0, 1, 2], 0.5) == pytest.approx({1: 0, 2: 0.5, 0: 0.5})


# --- who gets what ---


def watched(fed: Any, absent: Callable[[int, int], bool]) -> tuple[Any, dict[tuple[int, int], Arrays]]:
    """An app whose clients fail where `absent(client, round)`, and the arrays with which they begin rounds."""
    begun: dict[tuple[int, int], Arrays] = {}

    class Watched(BNClient):
        def train_round(self, arrays: Any, config: Any, *rest: Any) -> Any:
            begun[self.identity["partition-id"], config["server-round"]] = {k: v.copy() for k, v in arrays.items()}
            return super().train_round(arrays, config, *rest)

    def make(context: Any, config: Any) -> BNClient:
        if absent(context.node_config["partition-id"], config.get("server-round", 0)):
            raise OSError("not there")
        plain = fed.make_client(context)
        return Watched(plain.model, plain.train_data, plain.eval_data, lr=plain.recipe.lr, context=context)

    return client_app(make), begun


def mean_of(some: Sequence[Arrays], weights: Sequence[float], key: str) -> NDArray[Any]:
    total = sum(w * each[key] for w, each in zip(weights, some, strict=True))
    return np.asarray(total / sum(weights))


def test_newcomers_get_the_mix_of_the_others_and_lost_clients_stay_in_the_mixes(federation: Federations) -> None:
    """Client 2 comes in round 3, client 0 is lost from round 4 on."""
    fed = federation(SIZES, model=two_norms, dtype=torch.float64, lr=LR)
    app, begun = watched(fed, lambda client, number: (client == 2 and number < 3) or (client == 0 and number > 3))
    rule = FedAP(warmup_rounds=0, min_train_nodes=1, fraction_evaluate=0.0)
    sent: list[dict[int, Arrays]] = []
    after_round = rule.after_round

    def keep(*arguments: Any) -> None:
        after_round(*arguments)
        sent.append({client: {**arrays} for client, arrays in rule.memory.models.items()})

    rule.after_round = keep
    models_of(fed, rule, 5, app)
    rows = weights_by_hand(fed, as_numpy(fed.model.state_dict()), 0.5)
    key = "0.weight"
    np.testing.assert_allclose(
        begun[0, 2][key], mean_of([sent[0][0], sent[0][1]], [0.5, 0.5], key), rtol=1e-12, err_msg="two clients"
    )
    np.testing.assert_allclose(
        begun[2, 3][key], mean_of([sent[1][0], sent[1][1]], [rows[2, 0], rows[2, 1]], key), rtol=1e-12
    )
    assert sent[4][0] is not sent[2][0]
    np.testing.assert_array_equal(sent[4][0][key], sent[2][0][key])
    expected = mean_of([sent[3][j] for j in range(3)], [*rows[1]], key)
    np.testing.assert_allclose(begun[1, 5][key], expected, rtol=1e-12)
    assert OWN.isdisjoint(begun[1, 5])


def test_a_client_without_measured_statistics_trains_as_in_fedbn(federation: Federations) -> None:
    """Client 0 has 6 examples and measures none of fewer than 8; it is in no mix."""
    fed = federation(SIZES, model=two_norms, dtype=torch.float64, lr=LR, min_batch=8)
    rule = FedAP(warmup_rounds=0, fraction_evaluate=0.0)
    models = models_of(fed, rule, 2)
    assert sorted(rule.memory.statistics) == [1, 2]
    assert sorted(rule.memory.models) == [0, 1, 2]
    sent = rule.sent(fed.arrays())
    assert rule.sent_to(0, sent) is sent
    assert rule.sent_to(1, sent) is not sent
    assert not same(models[-1], models[0])
    with pytest.raises(RunFailed, match=r"no client sent mean and variance .*(.|\n)*fewer than 20"):
        FedAP(warmup_rounds=0).start(federation(SIZES, min_batch=20).grid(), fed.arrays(), num_rounds=1)


def test_clients_measure_when_they_connect_and_not_when_they_are_chosen(federation: Federations) -> None:
    fed = federation(SIZES, model=two_norms, lr=LR)
    rule = FedAP(warmup_rounds=1, fraction_train=0.34, min_train_nodes=1, fraction_evaluate=0.0)
    models_of(fed, rule, 2)
    assert (sorted(rule.memory.statistics), len(rule.memory.models)) == ([0, 1, 2], 1)


def test_a_measurement_leaves_the_client_as_it_was(federation: Federations) -> None:
    """The clients' own batch norm begins with other values than the server's; FedBN has no measurement."""
    fed = federation(SIZES, model=two_norms, dtype=torch.float64, lr=LR)
    app, begun = replaced(fed)
    models_of(fed, FedAP(warmup_rounds=0, fraction_evaluate=0.0), 1, app)
    ours = {node: as_numpy(client.model.state_dict()) for node, client in begun.items()}
    app, begun = replaced(fed)
    models_of(fed, FedBN(fraction_evaluate=0.0), 1, app)
    for node, client in begun.items():
        assert same(ours[node], as_numpy(client.model.state_dict()))


def own_normalised(images: NDArray[Any]) -> NDArray[Any]:
    """As FedRDN tests a client: with the mean over its images of each image's mean, and of its deviation."""
    pixels = images.reshape(*images.shape[:2], -1)
    mean, deviation = pixels.mean(2).mean(0), pixels.std(2, ddof=1).mean(0)
    return np.asarray((images - mean[:, None, None]) / deviation[:, None, None])


def test_a_layer_that_a_batch_skips_keeps_the_model_s_statistics() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.always(inputs)
            return self.sometimes(outputs) if len(inputs) > 2 else outputs

    rows = torch.randn(10, 3)
    for batches in ([rows[:8], rows[8:]], [rows[8:], rows[:8]]):
        client = BNClient(model := Skipping(), Batches([(each, torch.zeros(len(each))) for each in batches]))
        model.sometimes.running_mean += 7
        found = client.measure_round({"fedbn.norm-inputs": True}, {MODEL: as_numpy(model.state_dict())}).arrays
        np.testing.assert_allclose(found["always.running_mean"], rows.mean(0), atol=1e-6)
        np.testing.assert_array_equal(found["sometimes.running_mean"], [7, 7, 7])


def test_inside_fedrdn_clients_measure_the_inputs_that_it_normalises(federation: Federations) -> None:
    """Client 2's inputs are twice as large and brighter, which their own pair takes away."""
    fed = federation(SIZES, model=two_norms, dtype=torch.float64, lr=LR)
    fed.data[2] = Batches([(2 * inputs + 1, labels) for inputs, labels in fed.data[2].batches])
    rule = FedAP(warmup_rounds=0, fraction_evaluate=0.0)
    models_of(fed, FedRDN(rule), 1)
    state = as_numpy(fed.model.state_dict())
    for client, data in enumerate(fed.data):
        images = own_normalised(np.concatenate([inputs.numpy() for inputs, _ in data.batches]))
        for layer, values in zip("15", inputs_of_norms(state, images), strict=True):
            found = rule.memory.statistics[client]
            np.testing.assert_allclose(found[f"{layer}.running_mean"], values.mean(0), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found[f"{layer}.running_var"], values.var(0), rtol=1e-10, atol=1e-12)


def test_a_client_under_another_node_id_is_not_asked_again(federation: Federations) -> None:
    """The server has forgotten which node is which client, as after a resumed run, whose node ids are new."""
    fed = federation(SIZES, model=two_norms, lr=LR)
    for rule in (FedAP(warmup_rounds=0), FedRDN(FedAvg())):
        grid, arrays = RecordingGrid(fed.app(), 3), fed.arrays()
        rule.begin(2, arrays)
        for number in (1, 2):
            messages = [*rule.configure_train(number, arrays, ConfigRecord(), grid)]
            arrays, _ = rule.aggregate_train(number, grid.send_and_receive(messages))
            assert (grid.count(protocol.MEASURE_QUERY), grid.count("train")) == (3, 3 * number)
            rule.base.memory.partitions.clear()


# --- errors and composition ---


def test_what_does_not_compose_is_an_error_before_training() -> None:
    for outer in (Secure, Private):
        with pytest.raises(SettingsError, match="FedAP sends each client a model of its own"):
            outer(FedAP())
    for bounds in ({"max_share": 0.5}, {"clip_norm": 1.0}, {"clip_factor": 2.0}):
        with pytest.raises(SettingsError, match=f"bounds.{next(iter(bounds))} is .*a model of its own"):
            FedAP(bounds=bounds)
    with pytest.raises(SettingsError, match="global_norm is 'initial' and warmup_rounds 1"):
        FedAP(global_norm="initial")
    for share_ in (0.0, 1.0):
        with pytest.raises(SettingsError, match="own_share"):
            FedAP(own_share=share_)


@pytest.mark.parametrize("around", [FedRDN, lambda rule: FixBN(rule, freeze_round=1)])
def test_it_may_be_inside_others_and_send_no_batch_norm(federation: Federations, around: Any) -> None:
    fed = federation(SIZES, model=two_norms, lr=LR)
    rule = FedAP(global_norm="initial", warmup_rounds=0)
    last = models_of(fed, around(rule), 2)[-1]
    assert all(np.isfinite(value).all() for value in last.values())
    assert sorted(rule.memory.models) == [0, 1, 2]
    assert OWN.isdisjoint(rule.memory.models[0])


def test_a_client_s_model_of_an_experiment_is_its_own_mix(tmp_path: Path) -> None:
    result = run("quick", strategy={"name": "FedAP"}, rounds=2, out=tmp_path)
    assert result.summary.personal
    assert result.summary.to_json()["clients_own_accuracy"] > 0.5
    state = parse(result.files.checkpoint.read().strategy or b"", list)[0]["FedAP"]
    key = next(iter(state["models"][0]))
    of_clients = [result.model(client=client).state_dict()[key].numpy() for client in range(3)]
    for client, found in enumerate(of_clients):
        weights = mix(client, state["statistics"], state["models"], 0.5)
        expected = mean_of([state["models"][j] for j in weights], [*weights.values()], key)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(of_clients[0], of_clients[1])
    path = result.files.path / "model-client-1.safetensors"
    path.write_bytes(
        (result.files.path / "model-client-0.safetensors").read_bytes().replace(b'"round":"2"', b'"round":"1"')
    )
    with pytest.raises(UserError, match="is of round 1, and the other arrays are of round 2"):
        result.model(client=1)
    path.unlink()
    with pytest.raises(UserError, match="has no 'model-client-1"):
        result.model(client=1)


class Halved(FedAvg):
    """Client 1 receives half of every value."""

    def sent_to(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        return pack({key: value / 2 for key, value in unpack(arrays).items()}) if client == 1 else arrays


def test_a_class_with_a_model_for_each_client(federation: Federations) -> None:
    """With node ids that are not partitions; both train and are evaluated with what they received."""
    fed = federation((6, 9), model=two_norms, lr=0.0)
    losses, mean = noted_losses()
    rule = Halved(evaluate_metrics_aggr_fn=mean)
    app, begun = watched(fed, lambda client, number: False)
    models = models_of(fed, rule, 1, grid=LocalGrid(app, 2, node_ids=[70, 5]))
    for key, value in models[0].items():
        np.testing.assert_array_equal(begun[0, 1][key], value)
        np.testing.assert_array_equal(begun[1, 1][key], value / 2)
    model = copy.deepcopy(fed.model).eval()
    for client, share_ in enumerate((1, 2)):
        model.load_state_dict({k: torch.from_numpy(v / share_) for k, v in models[1].items()}, strict=False)
        inputs, labels = (torch.cat([batch[i] for batch in fed.data[client].batches]) for i in (0, 1))
        np.testing.assert_allclose(losses[client], F.cross_entropy(model(inputs), labels).item(), rtol=1e-5)
    assert rule.traits.personalises
    with pytest.raises(SettingsError, match="Halved sends each client a model of its own"):
        Secure(Halved())


def test_statistics_that_are_not_plausible_are_left_out(federation: Federations) -> None:
    class Far(BNClient):
        def measure_round(self, config: Any, *rest: Any) -> Any:
            found = super().measure_round(config, *rest)
            far = self.identity["partition-id"] == 2
            found.arrays = {key: value * 1000 if far else value for key, value in found.arrays.items()}
            return found

    fed = federation(SIZES, model=two_norms, lr=LR)
    app = client_app(lambda context: Far(copy.deepcopy(fed.model), fed.data[context.node_id - 1], context=context))
    for bounds, left in (({"plausible": 10}, [0, 1]), (None, [0, 1, 2])):
        rule = FedAP(warmup_rounds=0, bounds=bounds, fraction_evaluate=0.0)
        models_of(fed, rule, 2, app)
        assert sorted(rule.memory.statistics) == left
        sent = fed.arrays()
        assert (rule.sent_to(2, sent) is sent) == (bounds is not None)


def test_a_node_whose_partition_is_not_known_yet_is_not_taken_for_the_client_of_that_number(
    federation: Federations,
) -> None:
    """Node 1, with partition 0, cannot answer in round 1; nodes 2 and 3 answer as clients 1 and 2."""
    fed, first = federation(SIZES, model=two_norms, lr=LR), True
    app = failing(fed, lambda client, config: first and client == 0, OSError("its memory is full"))
    rule, grid, arrays = FedAP(warmup_rounds=0), fed.grid(app), fed.arrays()
    rule.begin(2, arrays)
    for number, known in ((1, [1, 2]), (2, [0, 1, 2])):
        messages = [*rule.configure_train(number, arrays, ConfigRecord(), grid)]
        arrays, _ = rule.aggregate_train(number, grid.send_and_receive(messages))  # type: ignore[assignment]
        assert sorted(rule.memory.statistics) == sorted(rule.memory.models) == known
        first = False


@pytest.mark.parametrize(("strategy", "questions"), [(FedAP, len(SIZES)), (Scaffold, 0)])
def test_nodes_without_a_partition_are_asked_for_it_once_before_they_train(
    federation: Federations, strategy: Any, questions: int
) -> None:
    """Replies of training tell too that there is none: Scaffold asks from round 2 on."""
    fed = federation(SIZES, model=two_norms, lr=LR)
    grid = RecordingGrid(client_app(lambda context: BNClient(two_norms(), fed.data[0], lr=LR)), len(SIZES))
    for context in grid.contexts().values():
        context.node_config.clear()
    strategy().start(grid, fed.arrays(), num_rounds=4)
    assert grid.count(protocol.PARTITION_QUERY) == questions
