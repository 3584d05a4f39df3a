"""`fedbn flwr run`: apps that know nothing of this library, without a SuperLink."""

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
import os, random, time, numpy as np
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
    if context.run_config["fail"] == "silent" and context.node_config["partition-id"] == 1:
        time.sleep(60)
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
    timeout = 2 if context.run_config["fail"] == "silent" else 3600
    rounds = context.run_config["rounds"]
    result = strategy.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=rounds, timeout=timeout)
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
    return python(FEDBN, "flwr", "run", ".", *nodes, *words, cwd=folder)


def lines(done: subprocess.CompletedProcess[str], word: str | tuple[str, ...]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


@pytest.mark.slow
@pytest.mark.parametrize("app", [NEW, OLD], ids=["new", "old"])
def test_two_runs_have_equal_models_however_many_workers_serve(app: str, tmp_path: Path) -> None:
    options = (["--workers", "3"], ["--workers", "3"], ["--workers", "0"], ["--engine", "ray"])
    ended = [run(tmp_path, app, *words) for words in options]
    models = [[line.split(" server")[0] for line in lines(done, "model")] for done in ended]
    assert models[0]
    assert models == [models[0]] * 4


@pytest.mark.slow
def test_without_workers_a_debugger_can_stop_in_a_client_and_each_node_keeps_its_state(tmp_path: Path) -> None:
    (model, found) = lines(run(tmp_path, NEW, "--workers", "0", "--run-config", "rounds=3"), ("model", "clients"))
    assert f"'pid': {float(model.rpartition(' ')[2])}" in found
    # Each node evaluates in each round, and trains in some.
    assert 2 <= float(found.partition("'messages': ")[2].rstrip("}")) <= 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "fail='client' rounds=4",
            ["messages to clients failed: ", "client 1, evaluate (4 times): ZeroDivisionError: no examples"],
        ),
        ("fail='server'", ["KeyError: 'lr'"]),
        ("fail='silent'", ["messages to clients failed: client ", "client 1, evaluate: it did not answer within 2 s"]),
    ],
)
def test_a_failure_has_an_exit_code_and_says_where_it_happened(given: str, said: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, NEW, "--run-config", given)
    assert done.returncode == 1
    tracebacks = done.stderr.count('noise.py", line')  # of a client one for its training, and one for its evaluation
    assert (1 <= tracebacks <= 2) == ("silent" not in given)
    assert [text for text in said if text not in done.stderr] == []


# A client may start processes, set handlers of signals, and use NumPy's generators without a seed. Its module starts a
# thread, as JAX does, which a fork would leave behind.
PROBES = """
import multiprocessing, queue, random, signal, subprocess, threading, time, numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server, asked, found = ClientApp(), ServerApp(), queue.Queue(), queue.Queue()
threading.Thread(target=lambda: [found.put(asked.get()) for _ in range(9)], daemon=True).start()
at_import = random.random()

@client.query()
def answer(message, context):
    asked.put("a thread of the module")
    program = subprocess.Popen(["sleep", "60"])
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], daemon=True)
    forked.start()
    program.terminate(), forked.terminate()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = [found.get(timeout=30), str(program.wait(30)), str([forked.join(30), forked.exitcode])]
    draws = [at_import, random.random(), np.random.default_rng().random()]
    return Message(RecordDict({"c": ConfigRecord({"answers": answers, "draws": draws})}), reply_to=message)

@server.main()
def main(grid, context):
    print("nodes", len(grid.get_node_ids()))
    for reply in grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()]):
        print("answers", reply.content["c"]["answers"], reply.content["c"]["draws"])
"""


def test_a_worker_is_as_good_a_parent_as_this_process(tmp_path: Path) -> None:
    few, alone = (lines(run(tmp_path, PROBES, "--workers", number), "answers") for number in ("2", "0"))
    assert (len(few), len(alone)) == (4, 4)
    assert all(line.startswith("answers ['a thread of the module', '-15', '[None, -15]']") for line in few + alone)
    drawn = [[line.rpartition("[")[2] for line in found] for found in (few, alone)]
    assert drawn[0] == drawn[1]


FEDERATIONS = """
[tool.flwr.federations]
default = "small"
[tool.flwr.federations.small]
options.num-supernodes = 3
[tool.flwr.federations.large]
options.num-supernodes = 5
options.backend.client-resources.num-cpus = 1
"""


@pytest.mark.parametrize(
    ("words", "rc", "says"),
    [
        ([], 0, "nodes 3"),
        (["large"], 0, "nodes 5"),
        (["larger"], 2, "no federation 'larger'; did you mean 'large'?"),
    ],
)
def test_a_federation_in_pyproject_has_its_number_of_nodes(
    words: list[str], rc: int, says: str, tmp_path: Path
) -> None:
    """As older versions of Flower read it: the default one, or the one that the command names."""
    tmp_path.joinpath("pyproject.toml").write_text(PYPROJECT + FEDERATIONS)
    tmp_path.joinpath("noise.py").write_text(PROBES)
    done = python(FEDBN, "flwr", "run", ".", *words, "--workers", "0", cwd=tmp_path)
    assert done.returncode == rc
    assert says in done.stdout + done.stderr
