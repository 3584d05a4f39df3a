"""`fedbn flwr run --engine local`: apps that know nothing of this library, without Ray and without a SuperLink."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.command import FEDBN, python

PYPROJECT = """
[project]
name = "noise"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "noise:server"
clientapp = "noise:client"
[tool.flwr.app.config]
rounds = 2
fail = ""
"""
# Both draw from global generators that they never seed, as templates do.
NEW = """
import os, random, numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()

@client.train()
@client.evaluate()
def answer(message, context):
    if context.run_config["fail"] == "client" and context.node_config["partition-id"] == 1:
        raise ZeroDivisionError("no examples")
    seen = context.state.setdefault("seen", MetricRecord({"messages": 0}))
    seen["messages"] += 1
    arrays = [message.content["arrays"].to_numpy_ndarrays()[0] + np.random.randn(3) + random.random()]
    metrics = MetricRecord({"num-examples": 1, "pid": os.getpid(), "messages": seen["messages"]})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

@server.main()
def main(grid, context):
    if context.run_config["fail"] == "server":
        raise KeyError("lr")
    strategy = FedAvg(fraction_train=0.5, min_train_nodes=1)  # draws its clients
    result = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=context.run_config["rounds"])
    print("model", result.arrays.to_numpy_ndarrays()[0].tolist(), "server", os.getpid())
    print("clients", result.evaluate_metrics_clientapp[2])
"""
OLD = """
import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

class Client(NumPyClient):
    def fit(self, parameters, config):
        return [parameters[0] + np.random.randn(3)], 1, {}

class Printed(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        assert not failures
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        print("model", parameters)
        return parameters, metrics

def components(context):
    strategy = Printed(fraction_evaluate=0, initial_parameters=ndarrays_to_parameters([np.zeros(3)]))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=context.run_config["rounds"]))

client, server = ClientApp(lambda context: Client().to_client()), ServerApp(server_fn=components)
"""


def run(folder: Path, app: str, *words: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("pyproject.toml").write_text(PYPROJECT)
    folder.joinpath("noise.py").write_text(app)
    nodes = ("--federation-config", "num-supernodes=4")
    return python(FEDBN, "flwr", "run", ".", "--engine", "local", *nodes, *words, cwd=folder)


def lines(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


@pytest.mark.slow
@pytest.mark.parametrize("app", [NEW, OLD], ids=["new", "old"])
def test_two_runs_have_equal_models_however_many_workers_serve(app: str, tmp_path: Path) -> None:
    first, second, alone = (run(tmp_path, app, "--workers", number) for number in ("3", "3", "0"))
    models = [[line.split(" server")[0] for line in lines(done, "model")] for done in (first, second, alone)]
    assert models[0]
    assert models[0] == models[1] == models[2]


@pytest.mark.slow
def test_a_debugger_can_stop_in_a_client_without_workers(tmp_path: Path) -> None:
    done = run(tmp_path, NEW, "--workers", "0")
    (pid,) = {line.rpartition(" ")[2] for line in lines(done, "model")}
    assert f"'pid': {float(pid)}" in lines(done, "clients")[0]


@pytest.mark.slow
def test_a_node_keeps_its_state_and_the_run_config_is_changed(tmp_path: Path) -> None:
    (found,) = lines(run(tmp_path, NEW, "--run-config", "rounds=3"), "clients")
    # Each node evaluates in each round, and trains in some.
    assert 2 <= float(found.partition("'messages': ")[2].rstrip("}")) <= 4


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("client", ["ZeroDivisionError: no examples", "messages to clients failed: client 1, "]),
        ("server", ["KeyError: 'lr'"]),
    ],
)
def test_a_failure_has_an_exit_code_and_says_where_it_happened(who: str, said: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, NEW, "--run-config", f"fail='{who}'")
    assert done.returncode == 1
    assert "noise.py" in done.stderr  # the traceback
    assert [text for text in said if text not in done.stderr] == []


def test_settings_of_ray_are_not_taken(tmp_path: Path) -> None:
    done = run(tmp_path, NEW, "--federation-config", "client-resources-num-cpus=2")
    assert done.returncode == 2
    assert "client-resources-num-cpus is a setting of Ray; the local engine has --workers" in done.stderr
