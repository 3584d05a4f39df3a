"""Flower's own strategies as `strategy.name` of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.commands.cli import main
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.registry import FLOWER, build_strategy
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.strategies import as_rule
from strategies.meanstatistics import median
from tests.support.experiments import read
from tests.support.records import between

from .test_own_parts import session

OPTIONS: dict[str, dict[str, Any]] = {
    "FedAdam": {"eta": 0.01},
    "FedYogi": {"eta": 0.01},
    "FedAdagrad": {"eta": 0.01},
    "FedAvgM": {"server_momentum": 0.9, "server_learning_rate": 0.5},
    "FedTrimmedAvg": {"beta": 0.34},
    "MultiKrum": {"num_nodes_to_select": 2},
}
ROBUST = [name for name, about in FLOWER.items() if about.robust]


def settings(name: str) -> dict[str, Any]:
    return {
        "rounds": 3,
        "clients": 3,
        "train": {"lr": 0.05, "steps": 2, "batch_size": 16},
        "evaluate": {"every": 3},
        "engine": {"device": "cpu"},
        "strategy": {"name": name, **OPTIONS.get(name, {})},
    }


def poisoned(app: ClientApp) -> ClientApp:
    """The app, but the client of partition 0 returns enormous statistics."""

    def enlarge(_: RecordDict, reply: RecordDict, partition: int) -> None:
        arrays, large = unpack(reply["arrays"]), 0 if partition else 1e10
        reply["arrays"] = pack({key: value + large * ("running" in key) for key, value in arrays.items()})

    return between(app, enlarge)


def largest(record: ArrayRecord) -> float:
    return max(float(np.abs(value).max()) for key, value in unpack(record).items() if "running" in key)


@pytest.mark.parametrize("name", [*ROBUST, "FedAvgM"])
def test_one_client_cannot_set_the_statistics_of_a_robust_rule(name: str, federation: Callable[..., Any]) -> None:
    fed = federation((8, 8, 8))
    rule = build_strategy({"name": name, **OPTIONS.get(name, {}), "fraction_evaluate": 0.0}, seed=0)
    result = rule.start(fed.grid(poisoned(fed.app())), fed.arrays(), num_rounds=1)
    sent = unpack(fed.arrays())
    assert {key: value.dtype for key, value in unpack(result.arrays).items()} == {k: v.dtype for k, v in sent.items()}
    assert (largest(result.arrays) < 100) == (name in ROBUST)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("{name: FedAdamm}", "'FedAdamm' is not a strategy; did you mean 'FedAdam'.* or module:callable for your own"),
        ("{name: FedAdam, eat: 1}", r"strategy\.eat \(= 1\) is not an argument of FedAdam; did you mean 'eta'"),
        ("{name: FedAdam, eta: much}", r"strategy\.eta of FedAdam is 'much'; expected a number > 0"),
        (
            "{name: FedTrimmedAvg, beta: 0.5}",
            r"strategy\.beta of FedTrimmedAvg is 0\.5; expected a number >= 0 and < 0\.5",
        ),
        ("{name: Krum, num_malicious_nodes: 2}", "with num_malicious_nodes=2 needs 7 clients; clients is 5"),
        ("{name: FixBN, freeze_round: 2, base: {name: Bulyan, num_malicious_nodes: 1}}", "needs 7 clients"),
        ("{name: Krum, num_malicious_nodes: -1}", "is -1; expected an integer >= 0"),
        ("{name: 'collections:OrderedDict'}", "returned a OrderedDict; expected a flwr"),
        ("{name: 'math:sqrt', x: 4}", r"strategy\.name='math:sqrt' "),
    ],
)
def test_a_wrong_strategy_is_one_message(strategy: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_rule(read(f"{{rounds: 4, clients: 5, strategy: {strategy}}}"))


def test_fixbn_wraps_a_server_optimiser_by_name(tmp_path: Path) -> None:
    strategy = {"name": "FixBN", "freeze_round": 1, "base": {"name": "FedAdam", "eta": 0.01}}
    _, _, summary = session(settings("FedAdam") | {"strategy": strategy}, tmp_path / "run")
    assert (summary["strategy"], summary["freeze_round"], summary["norm_statistics"]) == ("FixBN(FedAdam)", 1, "mean")


def test_the_list_of_strategies_tells_flower_s_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "strategies"]) == 0
    lines = capsys.readouterr().out.partition("Flower's own\n")[2].splitlines()
    assert {line.split()[0] for line in lines} == set(FLOWER)
    assert main(["list", "strategies", "FedAdam"]) == 0
    assert "eta : float, optional" in capsys.readouterr().out


def test_an_experiment_names_its_strategy_in_the_label() -> None:
    assert read(yaml.safe_dump(settings("Krum"))).label == "Krum"


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_the_median_keeps_dtypes_and_shapes(count: int, dtype: type) -> None:
    rows: np.ndarray = np.random.default_rng(0).uniform(0, 1e4, size=(count, 3)).astype(dtype)
    for shape in ((3,), (3, 1)):
        found = median([{"bn.running_var": row.reshape(shape)} for row in rows])["bn.running_var"]
        middle = [sorted(column.tolist())[(count - 1) // 2 : count // 2 + 1] for column in rows.T]
        twin = np.array([(each[0] + each[-1]) / 2 for each in middle])
        expected: np.ndarray = (np.rint(twin) if dtype is np.int64 else twin).astype(dtype).reshape(shape)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)
    assert median([{"n": np.array(value)} for value in (3, 5, 10**9)])["n"].tolist() == 5


def test_mean_statistics_around_a_strategy_of_flower_wraps_it_once() -> None:
    section = {"name": "MeanStatistics", "statistics": "pooled", "base": {"name": "FedMedian"}}
    rule = as_rule(build_strategy(section, seed=0))
    assert [*map(str, rule.chain)] == ["MeanStatistics", "FedMedian"]
    assert rule.notes()["norm_statistics"] == "pooled"
