"""FedRDN against plain PyTorch in float64: clients' pairs, what each image is normalised with, and tests."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, client_app, run, seeding
from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.serialization import parse
from fedbn_flwr.strategies import FedAvg, FedBN, FedRDN, FedRep, FedTAN, Secure
from tests.support.federations import Federations, models_of, near, noted_losses, replaced, same
from tests.support.fixtures import Batches
from tests.support.twins import share

SIZES = (6, 9, 14)
LR = 0.1


def pairs_of(fed: Any) -> list[tuple[Tensor, Tensor]]:
    """Each client's mean and deviation, image by image and channel by channel."""
    found = []
    for data in fed.data:
        images = [image.numpy() for inputs, _ in data.batches for image in inputs]
        means = [[channel.mean() for channel in image] for image in images]
        deviations = [[channel.std(ddof=1) for channel in image] for image in images]
        found.append((torch.tensor(np.mean(means, 0)), torch.tensor(np.mean(deviations, 0))))
    return found


def normalised(image: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return torch.stack([(channel - m) / s for channel, m, s in zip(image, mean, deviation, strict=True)])


def drawn(images: Tensor, pairs: list[tuple[Tensor, Tensor]], seed: int, step: int, kind: str) -> Tensor:
    generator = seeding.generator(seed, "inputs", step)
    if kind == "batch":
        of_mean, of_deviation = torch.randint(len(pairs), (2,), generator=generator).tolist()
        return torch.stack([normalised(image, pairs[of_mean][0], pairs[of_deviation][1]) for image in images])
    chosen = torch.randint(len(pairs), (len(images),), generator=generator).tolist()
    return torch.stack([normalised(image, *pairs[client]) for image, client in zip(images, chosen, strict=True)])


def twin(fed: Any, rounds: int, kind: str) -> dict[str, Tensor]:
    pairs = pairs_of(fed)
    models = [copy.deepcopy(fed.model).train() for _ in fed.data]
    mean: dict[str, Tensor] = {}
    for number in range(1, rounds + 1):
        for client, (model, data) in enumerate(zip(models, fed.data, strict=True)):
            seed = seeding.seed_for(0, "rules", number, client)
            for step, (images, labels) in enumerate(data.batches):
                model.zero_grad()
                F.cross_entropy(model(drawn(images, pairs, seed, step, kind)), labels).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= LR * parameter.grad
        mean = share(models, [data.num_examples for data in fed.data], ())
    return mean


@pytest.mark.parametrize("kind", ["image", "batch"])
def test_rounds_equal_the_method_by_hand(federation: Federations, kind: Any) -> None:
    fed = federation(SIZES, dtype=torch.float64, lr=LR)
    near(
        models_of(fed, FedRDN(FedAvg(fraction_evaluate=0.0), drawn=kind), 3)[-1],
        twin(fed, 3, kind),
        rtol=1e-11,
        atol=1e-12,
    )


def test_every_image_has_the_pair_of_one_client_and_all_occur_in_other_draws_each_round(
    federation: Federations,
) -> None:
    fed = federation(SIZES, dtype=torch.float64, lr=0.0)
    seen: dict[tuple[int, int], list[Tensor]] = {}

    def make(context: Any, config: Any) -> BNClient:
        client = fed.make_client(context)
        place = context.node_config["partition-id"], config["server-round"]
        client.model.register_forward_pre_hook(lambda _, inputs: seen.setdefault(place, []).append(inputs[0].clone()))
        return client

    FedRDN(FedAvg(fraction_evaluate=0.0)).start(LocalGrid(client_app(make), 3), fed.arrays(), num_rounds=2)
    pairs, which = pairs_of(fed), {}
    for (client, number), batches in seen.items():
        images = [image for inputs, _ in fed.data[client].batches for image in inputs]
        which[client, number] = [
            [each for each, pair in enumerate(pairs) if torch.allclose(normalised(image, *pair), found, atol=1e-9)]
            for image, found in zip(images, torch.cat(batches), strict=True)
        ]
    assert len(which) == 6
    chosen = {place: [each for (each,) in found] for place, found in which.items()}
    assert {each for found in chosen.values() for each in found} == {0, 1, 2}
    assert chosen[2, 1] != chosen[2, 2]
    assert chosen[2, 1][: len(chosen[1, 1])] != chosen[1, 1], "clients draw on their own"


def test_clients_are_tested_with_their_own_pair(federation: Federations) -> None:
    fed = federation(SIZES, dtype=torch.float64, lr=LR)
    losses, means = noted_losses()
    model = copy.deepcopy(fed.model).eval()
    last = models_of(fed, FedRDN(FedAvg(evaluate_metrics_aggr_fn=means)), 1)[-1]
    model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in last.items()}, strict=False)
    for client, (data, pair) in enumerate(zip(fed.data, pairs_of(fed), strict=True)):
        images = torch.stack([normalised(image, *pair) for inputs, _ in data.batches for image in inputs])
        labels = torch.cat([labels for _, labels in data.batches])
        np.testing.assert_allclose(losses[client], F.cross_entropy(model(images), labels).item(), rtol=1e-12)


def test_pairs_travel_once_for_each_client_that_joins(federation: Federations) -> None:
    fed = federation(SIZES)
    asked: list[tuple[int, int]] = []
    clients: dict[int, int] = {}

    def make(context: Any, config: Any) -> BNClient:
        clients[context.node_id] = config["server-round"]
        if protocol.ROUND in config and config["server-round"] == 1 and context.node_config["partition-id"] == 2:
            raise OSError("not there yet")
        if "fedbn.inputs-own" in config:
            asked.append((context.node_config["partition-id"], config["server-round"]))
        return fed.make_client(context)

    rule = FedRDN(FedAvg(fraction_evaluate=0.0))
    rule.start(LocalGrid(client_app(make), 3), fed.arrays(), num_rounds=3)
    assert asked == [(0, 1), (1, 1), (2, 2)]
    assert sorted(rule.memory.pairs) == [0, 1, 2]


def test_a_table_has_the_deviation_of_its_columns_and_a_constant_one_has_1() -> None:
    rows = torch.tensor([[1.0, 5.0], [2.0, 5.0], [6.0, 5.0], [7.0, 5.0]], dtype=torch.float64)
    data = Batches([(rows[:2], torch.tensor([0, 1])), (rows[2:], torch.tensor([0, 1]))])
    client = BNClient(nn.Linear(2, 2).double(), data)
    found = client.measure_round({"fedbn.inputs-own": True}).arrays
    np.testing.assert_allclose(found["mean"], [4, 5])
    np.testing.assert_allclose(1 / found["scale"], [np.sqrt((9 + 4 + 4 + 9) / 3), 1])


def test_it_composes_with_strategies_whose_clients_do_more(federation: Federations) -> None:
    """FedTAN's exchanges begin before the other messages; FedRep yields more batches."""
    for inner in (FedTAN(min_batch=1), FedRep(head_epochs=1), FedBN()):
        fed = federation((8, 8), lr=LR)
        app, _ = replaced(fed)
        plain = type(inner)(**({"min_batch": 1} if isinstance(inner, FedTAN) else {}))
        ours = models_of(fed, FedRDN(inner), 2, app)[-1]
        assert all(np.isfinite(value).all() for value in ours.values())
        assert not same(ours, models_of(fed, plain, 2)[-1])


def test_a_few_examples_tokens_and_false_pairs_are_refused(federation: Federations) -> None:
    with pytest.raises(SettingsError, match="FedRDN sends the statistics of each client's inputs to all clients"):
        Secure(FedRDN(FedAvg()))
    fed = federation((6, 9), min_batch=8)
    rule = FedRDN(FedAvg(min_train_nodes=1))
    rule.start(fed.grid(), fed.arrays(), num_rounds=1)
    assert sorted(rule.memory.pairs) == [1], "client 0 has 6 examples, and its min_batch is 8"
    tokens = Batches([(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1]))])
    app = client_app(lambda context: BNClient(nn.Linear(3, 2), tokens, context=context))
    with pytest.raises(RunFailed, match=r"no client sent mean and deviation .*\n.*found \[2, 3\] of torch.int64"):
        FedRDN(FedAvg()).start(LocalGrid(app, 2), fed.arrays(), num_rounds=1)


def test_a_question_without_a_client_rule_that_measures_is_an_error() -> None:
    client = BNClient(nn.Linear(2, 2), Batches([(torch.zeros(2, 2), torch.tensor([0, 1]))]))
    with pytest.raises(MessageError, match="the message has no key of a client rule that measures"):
        client.measure_round({"fedbn.clip": 0.1})


Change = Callable[[dict[str, Any]], dict[str, Any]]


def changing(fed: Any, change: Change, of: tuple[int, ...] = (0, 1, 2), late: int | None = None) -> LocalGrid:
    """The pairs of some clients are changed; the client `late` is absent from round 1."""

    class Changed(BNClient):
        def measure_round(self, config: Any, *rest: Any) -> Any:
            found = super().measure_round(config, *rest)
            if self.identity["partition-id"] in of:
                found.arrays = {**found.arrays, **change(found.arrays)}
            return found

    def make(context: Any, config: Any) -> BNClient:
        if context.node_config["partition-id"] == late and config.get("server-round") == 1:
            raise OSError("not there yet")
        return Changed(copy.deepcopy(fed.model), fed.data[context.node_id - 1], context=context)

    return LocalGrid(client_app(make), 3)


@pytest.mark.parametrize("dtype", [np.complex64, np.int64])
def test_a_pair_that_is_not_of_floats_is_refused_also_from_the_first_client(
    federation: Federations, dtype: Any
) -> None:
    fed = federation(SIZES)
    grid = changing(fed, lambda pair: {key: np.ones_like(value, dtype) for key, value in pair.items()})
    with pytest.raises(RunFailed, match="no client sent mean and deviation of its inputs"):
        FedRDN(FedAvg()).start(grid, fed.arrays(), num_rounds=1)


def far(factor: float, *keys: str) -> Change:
    return lambda pair: {key: pair[key] * factor for key in keys}


def scale(value: float) -> Change:
    return lambda pair: {"scale": np.full_like(pair["scale"], value)}


@pytest.mark.parametrize(
    ("change", "of", "bounds", "late"),
    [
        # A scale that is not above zero in float32.
        (scale(0.0), 0, None, None),
        (scale(-1.0), 0, None, None),
        (scale(5e-324), 0, None, None),
        # A deviation so small that it would enlarge all clients' inputs; or zero in float32.
        (scale(1e6), 0, {"plausible": 10}, None),
        (scale(1e60), 0, None, None),
        # Finite and well formed, and 1,000 times too large; or absurd, also where the client is alone in its round.
        (far(1e3, "mean"), 2, {"plausible": 10}, None),
        (far(1e20, "mean"), 2, {"plausible": 10}, None),
        (far(1e20, "mean"), 2, None, None),
        (far(1e20, "mean"), 2, None, 2),
        # Each of the two is possible, but their product moves all clients' inputs 1e16 deviations away.
        (far(1e8, "mean", "scale"), 2, None, None),
    ],
)
def test_a_far_pair_is_left_out_by_plausible_and_an_absurd_one_always(
    federation: Federations, change: Change, of: int, bounds: Any, late: int | None
) -> None:
    fed = federation(SIZES)
    rule = FedRDN(FedAvg(fraction_evaluate=0.0, bounds=bounds))
    rule.start(changing(fed, change, (of,), late), fed.arrays(), num_rounds=1 if late is None else 2)
    assert sorted(rule.memory.pairs) == [client for client in range(3) if client != of]


def test_without_plausible_a_far_pair_counts(federation: Federations) -> None:
    fed, rule = federation(SIZES), FedRDN(FedAvg(fraction_evaluate=0.0))
    rule.start(changing(fed, far(1e3, "mean"), (2,)), fed.arrays(), num_rounds=1)
    assert sorted(rule.memory.pairs) == [0, 1, 2]


def test_an_experiment_tests_the_clients_of_all_its_runs(tmp_path: Path) -> None:
    result = run("quick", strategy={"name": "FedRDN", "base": {"name": "FedAvg"}}, rounds=2, out=tmp_path)
    assert result.summary.personal
    assert result.summary.to_json()["clients_own_accuracy"] > 0.5


def test_a_client_s_model_normalises_its_inputs_as_the_client_does(tmp_path: Path) -> None:
    result = run("quick", strategy={"name": "FedRDN"}, rounds=1, out=tmp_path)
    pairs = parse(result.files.checkpoint.read().strategy or b"", list)[0]["FedRDN"]["pairs"]
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for client in range(3):
        mean, scale = (torch.from_numpy(pairs[client][key])[:, None, None] for key in ("mean", "scale"))
        expected = result.model()((images - mean.float()) / (1 / scale).float())
        own = pickle.loads(pickle.dumps(result.model(client=client)))
        torch.testing.assert_close(own(images), expected)
        assert not torch.allclose(expected, result.model()(images), rtol=0.01)


def test_statistics_that_are_estimated_again_are_those_of_normalised_inputs(federation: Federations) -> None:
    """A single client draws its own pair, so FedAvg on its normalised images is the same."""
    found = []
    alone: Any = {"min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1}
    for strategy in (FedRDN(FedAvg(**alone)), FedAvg(**alone)):
        fed = federation((8,), dtype=torch.float64, lr=LR)
        if isinstance(strategy, FedAvg):
            ((mean, deviation),) = pairs_of(fed)
            batches = [
                (torch.stack([normalised(x, mean, deviation) for x in xs]), ys) for xs, ys in fed.data[0].batches
            ]
            fed.data = [Batches(batches)]
        config = ConfigRecord({"fedbn.reestimate": True})
        result = strategy.start(fed.grid(), fed.arrays(), num_rounds=2, evaluate_config=config)
        found.append(float(result.evaluate_metrics_clientapp[2]["loss"]))  # type: ignore[arg-type]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_clients_have_the_time_of_the_run_to_measure(federation: Federations) -> None:
    fed, seen = federation((8, 12)), list[float]()

    class Timed(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: Any = None) -> Any:
            messages = [*messages]
            seen.extend(timeout for each in messages if each.metadata.message_type == protocol.MEASURE_QUERY)
            return super().send_and_receive(messages, timeout=timeout)

    FedRDN(FedAvg(fraction_evaluate=0.0)).start(Timed(fed.app(), 2), fed.arrays(), num_rounds=1, timeout=60)
    assert seen == [60, 60]
