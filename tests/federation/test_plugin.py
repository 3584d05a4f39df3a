"""Our strategies in another Flower project: two changed lines in the ServerApp, and five in the ClientApp."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message

from fedbn_flwr import BNClient, client_app
from fedbn_flwr.client.layerwise import ParkedRounds
from fedbn_flwr.strategies import FedBN, Scaffold
from tests.support.command import ROOT, python_blocks
from tests.support.federations import last_model, same
from tests.support.packages import CLEAN, UV, needs_uv, run
from tests.support.plugin import CLIENTS, PROJECT, RecordingGrid, copied, imported

# The changed lines of the project's server_app.py.
SERVER = {
    "FedTAN": {
        "from flwr.serverapp.strategy import FedAvg": "from fedbn_flwr.strategies import FedTAN",
        "strategy = FedAvg(": "strategy = FedTAN(",
    },
    "FedBN": {
        "from flwr.serverapp.strategy import FedAvg": "from fedbn_flwr.strategies import FedBN",
        "strategy = FedAvg(": "strategy = FedBN(",
    },
    "FixBN": {
        "from flwr.serverapp.strategy import FedAvg": "from fedbn_flwr.strategies import FedAvg, FixBN",
        'FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])': (
            'FixBN(FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"]), freeze_round=2)'
        ),
    },
}

# Its client_app.py, without the project's two handlers.
CLIENT = '''\
"""The ClientApp: trains and evaluates on the data of one node."""

from fedbn_flwr import BNClient, client_app
from pytorchexample.task import Net, load_data


def make_client(context):
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    loaders = load_data(partition_id, num_partitions, context.run_config["batch-size"])
    return BNClient(Net(), *loaders, lr=context.run_config["learning-rate"], momentum=0.9, context=context)


app = client_app(make_client)
'''

NORMS = ("features.1.", "after_conv.")  # its batch norms
OPTIONS = ("--engine", "ray", "--federation-config", f"num-supernodes={CLIENTS}")


def changed(folder: Path, rule: str) -> Path:
    return copied(folder, {"server_app": SERVER[rule]}, client_app=CLIENT)


def scores(printed: str) -> list[str]:
    """The lines in which the project's server prints loss and accuracy of each round's model."""
    return re.findall(r"^round \d+: loss [\d.]+, accuracy [\d.]+$", printed, re.MULTILINE)


def losses(printed: str) -> list[float]:
    return [float(line.split()[3].rstrip(",")) for line in scores(printed)]


@pytest.mark.slow
def test_the_project_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with imported() as project:
        grid = project.serve()
    assert grid.errors() == []
    before, *_, after = losses(capsys.readouterr().out)
    assert after < before
    assert (tmp_path / "final_model.pt").exists()


def served(rule: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordingGrid, dict[str, torch.Tensor]]:
    """The grid after a run of the changed project on it, and the model that the project's server saved."""
    monkeypatch.chdir(folder)
    with imported(changed(folder / "project", rule)) as project:
        grid = project.serve()
        model = torch.load("final_model.pt")
        project.task.Net().load_state_dict(model)  # every key, every shape
    assert grid.errors() == []
    assert grid.count("train") == 3 * CLIENTS
    assert grid.count("evaluate") == 3 * CLIENTS / 2
    return grid, model


@pytest.mark.slow
def test_fedtan_exchanges_at_each_batch_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, _ = served("FedTAN", tmp_path, monkeypatch)
    exchanges = 2 * len(NORMS)
    assert grid.count("query.exchange") == 3 * exchanges * CLIENTS
    before, *_, after = losses(capsys.readouterr().out)
    assert after < before


@pytest.mark.slow
def test_fedbn_keeps_batch_norm_on_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, model = served("FedBN", tmp_path, monkeypatch)
    sent, *others = grid.trained(2)
    assert set(sent) == {key for key in model if not key.startswith(NORMS)}
    assert others == [sent] * (CLIENTS - 1)
    accuracies = [r.content["metrics"]["accuracy"] for r in grid.replies if r.metadata.message_type == "evaluate"]
    assert min(accuracies[-2:]) > 0.4, "each client has three or four digits, and evaluates with its own norms"


@pytest.mark.slow
def test_fixbn_freezes_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, model = served("FixBN", tmp_path, monkeypatch)
    first, second, third = (grid.trained(server_round)[0] for server_round in (1, 2, 3))
    statistics = [key for key in model if "running" in key]
    assert len(statistics) == 2 * len(NORMS)
    for key in statistics:
        assert first[key] != second[key] != third[key]
        assert third[key] == model[key].numpy().tobytes()
    assert third["after_conv.weight"] != model["after_conv.weight"].numpy().tobytes(), "gamma still trains"
    before, *_, after = losses(capsys.readouterr().out)
    assert after < before


@pytest.mark.slow
def test_fedtan_draws_the_same_in_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The project's shuffling and dropout draw from PyTorch's global generator, which all clients share.

    Each message reaches one of two caches of parked rounds, as of two Ray actors; a round left in the other is
    abandoned later, while the next round draws.
    """
    monkeypatch.chdir(tmp_path)
    with imported(changed(tmp_path / "project", "FedTAN")) as project:
        project.serve()
        expected = scores(capsys.readouterr().out)
        random, caches, drawn = Random(0), (ParkedRounds(), ParkedRounds()), set()

        def work(message: Message, context: Context) -> Message:
            cache = random.choice(caches)
            drawn.add((context.node_id, message.metadata.message_type, id(cache)))
            monkeypatch.setattr("fedbn_flwr.client.layerwise.parked_rounds", cache)
            return project.client_app(message, context)

        replace(project, client_app=work).serve()
        assert scores(capsys.readouterr().out) == expected
        exchanges = {(node, cache) for node, kind, cache in drawn if kind == "query.exchange"}
        assert len(exchanges) == 2 * CLIENTS, "both caches served exchanges of each client"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_the_lines_for_a_flower_app_work(page: str) -> None:
    code, *_ = python_blocks((ROOT / page).read_text())
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) < 10
    with imported() as project:
        # The project has a model, and data loaders for a node.
        names = {"Net": project.task.Net, "load_data": lambda partition: project.task.load_data(partition, CLIENTS, 32)}
        exec(code, names)
        grid = RecordingGrid(names["app"], CLIENTS)
        names["strategy"].start(grid, ArrayRecord(project.task.Net().state_dict()), num_rounds=2)
    assert grid.errors() == []
    assert grid.count("train") == 2 * CLIENTS


@pytest.mark.parametrize("strategy", [FedBN, Scaffold])
def test_clients_made_without_a_context_have_their_node_s_state(federation: Callable[..., Any], strategy: Any) -> None:
    fed = federation((8, 12), steps=2)

    def make_client(context: Context) -> BNClient:
        data = fed.data[int(context.node_config["partition-id"])]
        return BNClient(copy.deepcopy(fed.model), data, data, **fed.options)

    expected, found = (last_model(fed, strategy(), 3, fed.grid(app)) for app in (None, client_app(make_client)))
    assert same(found, expected)


# --- on a Ray cluster --------------------------------------------------------


@pytest.mark.slow
def test_a_ray_cluster_runs_the_project_as_it_is(tmp_path: Path) -> None:
    printed = run(sys.executable, "-m", "fedbn_flwr.commands.cli", "flwr", "run", PROJECT, *OPTIONS, cwd=tmp_path)
    assert (tmp_path / "final_model.pt").exists()
    assert len(scores(printed)) == 4


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize(
    "rule", [rule if rule == "FedTAN" else pytest.param(rule, marks=pytest.mark.nightly) for rule in SERVER]
)
def test_a_ray_cluster_with_our_wheel_equals_the_local_engine(
    rule: str,
    clean_environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served(rule, tmp_path, monkeypatch)
    here = scores(capsys.readouterr().out)
    data = ("flwr-datasets[vision]>=0.6,<0.7", "scikit-learn")  # dependencies of the project, not of the wheel
    run(str(UV), "pip", "install", "-p", clean_environment / "python", *data, cwd=tmp_path)
    there = run(clean_environment / "fedbn", "flwr", "run", tmp_path / "project", *OPTIONS, cwd=tmp_path, **CLEAN)
    assert len(here) == 4
    assert scores(there) == here
