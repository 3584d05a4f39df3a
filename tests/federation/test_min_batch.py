"""FedTAN's smallest batch: a client refuses before it sends a statistic, an experiment before it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.data import shares_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.preview import explain
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.messages import protocol
from fedbn_flwr.strategies import FedAvgGlobalStats, FedTAN, FedTANII, FixBN
from tests.support.federations import Federations, last_model, same
from tests.support.plugin import RecordingGrid

REFUSES = (
    r"(client 1|node 2).* the batch of this client has 31 examples, and it refuses .* of fewer than 32 examples, which"
)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda **k: FedTAN(**k),
        lambda **k: FedAvgGlobalStats(exchange="paper", **k),
        lambda **k: FedTANII(fedtan_rounds=1, **k),
        lambda **k: FixBN(FedTAN(**k), freeze_round=1),
    ],
    ids=["FedTAN", "forward only", "FedTANII", "FixBN"],
)
def test_a_client_with_a_small_batch_sends_no_array(
    federation: Federations, strategy: Callable[..., Any], flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((32, 31, 40), batches=1, steps=1)
    noting = RecordingGrid(fed.app(), 3)
    last_model(fed, strategy(fraction_evaluate=0.0), 1, noting)
    of_small = [reply for reply in noting.replies if reply.metadata.src_node_id == 2]
    assert not any(reply.content.array_records for reply in of_small if reply.has_content())
    small = [reply for reply in of_small if reply.metadata.message_type == protocol.EXCHANGE_QUERY]
    assert [reply.has_error() for reply in small] == [True]
    assert all(reply.has_content() for reply in noting.replies if reply not in small)
    assert len(noting.replies) > len(small)
    assert "use larger batches, or lower the strategy's min_batch (32)" in flower_log.text
    assert "min-batch in this node's config" not in flower_log.text, "the client allows every batch"


def test_a_run_of_which_too_few_clients_are_left_names_them(federation: Federations) -> None:
    fed = federation((32, 31), batches=1, steps=1)
    with pytest.raises(RunFailed, match=REFUSES), fed.grid(workers=2) as grid:
        last_model(fed, FedTAN(fraction_evaluate=0.0), 1, grid)


def test_a_smaller_batch_trains_if_it_is_allowed(federation: Federations) -> None:
    fed = federation((32, 31), batches=1, steps=1)
    by_limit = [last_model(fed, FedTAN(fraction_evaluate=0.0, min_batch=limit), 1) for limit in (31, 1)]
    assert same(*by_limit)


def test_a_client_s_own_limit_is_above_what_the_strategy_allows(federation: Federations) -> None:
    fed = federation((6, 6), batches=1, steps=1)

    def make(context: Any) -> BNClient:
        client: BNClient = fed.make_client(context)
        client.min_batch = 8 if context.node_config["partition-id"] == 1 else 1
        return client

    message = r"client 1 .* fewer than 8 examples, .* or lower min-batch in this node's config or .* \(8\)"
    with pytest.raises(RunFailed, match=message):
        last_model(fed, FedTAN(fraction_evaluate=0.0, min_batch=6), 1, fed.grid(client_app(make)))


EXPERIMENT = """
rounds: 1
clients: 3
train: {steps: 1, batch_size: 40}
engine: {workers: 0, device: cpu}
strategy: {name: FixBN, freeze_round: 1, base: {name: FedTAN}}
"""


def test_an_experiment_with_small_batches_is_refused(tmp_path: Any) -> None:
    experiment = load_experiment(EXPERIMENT, ["train.batch_size=31"])
    message = r"train\.batch_size is 31, but strategy FixBN\(FedTAN\) doesn.t exchange .* strategy\.min_batch: 31"
    with pytest.raises(SettingsError, match=message):
        prepare(experiment)


@pytest.mark.parametrize(
    "changes",
    [["clients=100"], ["clients=40", "evaluate.validation=0.2"]],
    ids=["few examples", "few examples without validation"],
)
def test_clients_with_few_images_are_refused_before_training(tmp_path: Any, changes: list[str]) -> None:
    experiment = load_experiment(EXPERIMENT, changes)
    message = r"clients have fewer than 32 training examples with seed 0: 0 \(\d+\), .*; change clients or data"
    with pytest.raises(SettingsError, match=message):
        explain(experiment)
    with pytest.raises(SettingsError, match=message):
        carry_out(experiment, tmp_path, resume=False)
    assert not [*tmp_path.rglob("*.jsonl")]


SEEDS = (
    EXPERIMENT.replace("strategy: {name: FixBN, freeze_round: 1, base: {name: FedTAN}}", "")
    + """
seeds: [0, 1, 2]
data: {partition: {kind: dirichlet, alpha: 1.0}}
runs: {FedAvg: {}, FedTAN: {strategy: FedTAN}, FixBN: {strategy: {name: FixBN, freeze_round: 2}}}
"""
)


@pytest.mark.slow
def test_partitions_of_all_seeds_are_checked_before_the_first_run_trains(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seeds.yaml").write_text(SEEDS)
    words = [str(tmp_path / "seeds.yaml"), "clients=30", "rounds=1"]
    assert cli.main(["run", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert not [*tmp_path.rglob("*.jsonl")]
    parts = [shares_of(load_experiment(words[0], words[1:]).runs[0].data, 30, seed, "cpu")[0] for seed in (0, 1, 2)]
    sizes = [len(part) for of_seed in parts for part in of_seed]
    small = [sum(len(each) < 32 for each in part) for part in parts]
    seed = next(seed for seed, count in enumerate(small) if count)  # the first with a fault
    assert f"run 'FedTAN': {small[seed]} of 30 clients have fewer than 32 training examples with seed {seed}: " in error
    assert f"strategy.min_batch: {min(map(len, parts[seed]))}" in error
    assert (
        cli.main(["run", *words, f"strategy.min_batch={min(sizes)}", "only=FedTAN", "--out", str(tmp_path / "o")]) == 0
    )
