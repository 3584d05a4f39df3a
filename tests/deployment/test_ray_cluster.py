"""The Ray engine on a cluster of Ray nodes on this machine: one that lasts, and one that is killed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

import fedbn_flwr
import fedbn_flwr.extensions.ray.start
from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.extensions.ray.actors import ActorPool, ActorWorker, fits, machines
from fedbn_flwr.extensions.ray.cluster import Cluster
from fedbn_flwr.messages.arrays import pack, unpack
from tests.support import sessions
from tests.support.command import PATIENCE, ROOT, environment, fedbn

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

READY = 300  # seconds until all actors are ready, less than the limit of a test
CACHE = str(Path(tempfile.gettempdir()) / "fedbn-pycache")
RAY = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": CACHE}  # or every actor compiles PyTorch again


def free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        return int(unbound.getsockname()[1])


@contextmanager
def ray_node(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node of a Ray cluster. Its processes are a group."""
    # Short, for the paths of sockets. Ray also notes its address there, where other runs do not look for it.
    folder = tempfile.mkdtemp(prefix="ray-")
    words = ["start", "--block", "--disable-usage-stats", *options]
    log = Path(folder) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), *words],
            env=environment(RAY_TMPDIR=folder, **RAY),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"not started after {PATIENCE} s\n{log.read_text()}"
            time.sleep(0.1)
        yield process
    finally:
        kill(process, signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            kill(process, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def kill(process: subprocess.Popen[bytes], sent: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, sent)


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node at once, as when its machine fails."""
    found = [process.pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    for each in found:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of one node, which declares two cores and a GPU."""
    address = f"127.0.0.1:{free_port()}"
    options = [f"--port={address.rpartition(':')[2]}", "--num-cpus=2", "--num-gpus=1", "--include-dashboard=false"]
    with ray_node("--head", *options):
        yield address


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[Cluster]:
    """A connection of this process to the cluster, and the actors that its tests leave to the next."""
    with Cluster(address, PATIENCE) as cluster:
        cluster.connect([__name__])
        yield cluster


def app() -> ClientApp:
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        return count(message, context)

    @made.query("echo")
    def echo(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return made


def count(message: Message, context: Context) -> Message:
    """Count this node's messages; where the config asks for it, end the process or sleep instead."""
    import ray

    machine = ray.get_runtime_context().get_node_id()
    do = message.content.config_records["config"]["do"]
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do in ("sleep", f"sleep on {machine}"):
        time.sleep(PATIENCE)
    if do == "pause":
        time.sleep(0.2)
    had = context.state.metric_records.get("had", MetricRecord({"count": 0}))["count"]
    assert isinstance(had, int)
    context.state["had"] = MetricRecord({"count": had + 1})
    where = {
        "machine": machine,
        "process": os.getpid(),
        "file": fedbn_flwr.__file__,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "none"),
    }
    content = RecordDict({"metrics": MetricRecord({"count": had + 1}), "where": ConfigRecord(where)})
    return Message(content, reply_to=message)


def to(node: int, do: str = "") -> Message:
    return Message(RecordDict({"config": ConfigRecord({"do": do})}), node, "train")


def until_ready(grid: LocalGrid, nodes: int) -> list[Message]:
    """Send short messages to as many nodes as the grid has actors, until each actor answers one."""
    deadline, processes = time.monotonic() + READY, set[Any]()
    while len(processes) < nodes:  # for a while: an actor that is ready could answer a second message
        assert time.monotonic() < deadline, f"{len(processes)} of {nodes} actors after {READY} s"
        replies = list(grid.send_and_receive([to(node, "pause") for node in range(1, nodes + 1)]))
        processes = {reply.content["where"]["process"] for reply in replies}
    return replies


def unpack_code_on(node: str) -> None:
    """Start a process on a Ray node, which unpacks the code of this connection for it.

    Two nodes on one machine have one folder for it: the second one deletes the folder and makes it again, and processes
    of the first one that start meanwhile die, for which Ray waits as long as for slow ones.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(ray.remote(lambda: None).options(num_cpus=0, scheduling_strategy=there).remote(), timeout=READY)


def counts(replies: Any) -> list[Any]:
    return [reply.content["metrics"]["count"] if reply.has_content() else "error" for reply in replies]


def test_actors_have_the_code_of_this_process_and_what_they_declare(cluster: Cluster) -> None:
    with LocalGrid(app(), 4, pool=cluster.pool(gpus=0.5)) as grid:
        assert grid.start() == 2, "half of the GPU each"
        replies = list(grid.send_and_receive(map(to, (1, 2, 3, 4)), timeout=PATIENCE))
    for reply in replies:
        where = reply.content["where"]
        assert where["gpus"] == "0"
        assert not Path(where["file"]).is_relative_to(ROOT)
    assert fits({"CPU": 0.5, "GPU": 0.25}) == 4
    needs = r"each needs 64 CPUs and 1 GPUs, and the machines have 2 CPUs and 1 GPUs"
    with pytest.raises(RunFailed, match=f"no machine of the Ray cluster has room for an actor: {needs}"):
        cluster.pool(cpus=64, gpus=1)
    pool = functools.partial(ActorPool, actors=[ActorWorker({"CPU": 64})], start_timeout=1, arrive=tuple)
    with LocalGrid(app(), 1, pool=pool) as grid:
        with pytest.raises(RunFailed, match="no actor has started on the Ray cluster for 1 s; each needs 64 CPUs"):
            grid.start()


def test_arrays_arrive_as_they_were_sent(cluster: Cluster) -> None:
    """Those of a large model go through the object store."""
    sent = [np.arange(size, dtype=np.float32) for size in (3, 200_000)]
    content = RecordDict({str(i): pack({"values": values}) for i, values in enumerate(sent)})
    with LocalGrid(app(), 3, pool=cluster.pool()) as grid:
        for reply in grid.send_and_receive([Message(content, node, "query.echo") for node in (1, 2, 3)]):
            assert reply.metadata.message_type == "query.echo"
            for i, values in enumerate(sent):
                assert np.array_equal(unpack(reply.content.array_records[str(i)])["values"], values)


def test_a_client_that_ends_its_process_loses_no_state(cluster: Cluster) -> None:
    with LocalGrid(app(), 4, pool=cluster.pool()) as grid:
        assert counts(grid.send_and_receive(map(to, (1, 2, 3, 4)))) == [1, 1, 1, 1]
        replies = list(grid.send_and_receive([to(1), to(2, "die"), to(3), to(4)]))
        assert counts(replies) == [2, "error", 2, 2]
        assert replies[1].error.code == ErrorCode.CLIENT_APP_CRASHED
        reason = r"was lost \(Actor(Died|Unavailable)Error: .*\); its node has the state from before this message"
        assert re.search(reason, replies[1].error.reason)
        assert counts(grid.send_and_receive(map(to, (1, 2, 3, 4)))) == [3, 2, 3, 3]
        assert grid.contexts()[2].state["had"]["count"] == 2


def test_a_late_client_is_left_out_and_ends_with_the_grid(cluster: Cluster) -> None:
    with LocalGrid(app(), 2, pool=cluster.pool(2)) as grid:
        before = counts(until_ready(grid, 2))[0]
        began = time.monotonic()
        assert counts(grid.send_and_receive([to(1), to(2, "sleep")], timeout=20)) == [before + 1]
        assert grid.contexts()[2].state["had"]["count"] == before
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("case", ["FedAvg", "FedBN", "FedTAN"])
def test_a_resumed_run_has_the_arrays_of_the_local_engine(case: str, cluster: Cluster, tmp_path: Path) -> None:
    """On one actor, so that it keeps several parked rounds of FedTAN."""
    run_config = {"experiment": sessions.BASE, "set": " ".join(f"'{word}'" for word in sessions.overrides(case))}
    sessions.session(case, tmp_path / "local")
    for stop in (2, 0):
        with LocalGrid(client_app(make_client), 3, pool=cluster.pool(1), run_config=run_config) as grid:
            sessions.session(case, tmp_path / "ray", stop, grid=grid)
    assert sessions.outcome(tmp_path / "ray") == sessions.outcome(tmp_path / "local")


def test_a_machine_that_is_lost_in_a_round_costs_its_clients_this_round(cluster: Cluster, address: str) -> None:
    first = {node["NodeID"] for node in machines()}
    with ExitStack() as stack:
        machine = stack.enter_context(ray_node(f"--address={address}", "--num-cpus=1"))
        (second,) = {node["NodeID"] for node in machines()} - first
        unpack_code_on(second)
        # Other needs than before, so that all actors are new.
        grid = stack.enter_context(LocalGrid(app(), 3, pool=cluster.pool(3, cpus=0.9)))
        replies = until_ready(grid, 3)
        before = counts(replies)[0]
        where = [str(reply.content["where"]["machine"]) for reply in replies]
        assert where.count(second) == 1
        killer = threading.Timer(1, lose, (machine,))
        killer.start()
        replies = list(grid.send_and_receive([to(node, f"sleep on {second}") for node in (1, 2, 3)], timeout=PATIENCE))
        killer.join()
        assert sorted(map(str, counts(replies))) == [str(before + 1)] * 2 + ["error"]
        (lost,) = (node for node, reply in enumerate(replies, 1) if reply.has_error())
        expected = [before + 1 if node == lost else before + 2 for node in (1, 2, 3)]
        assert counts(grid.send_and_receive(map(to, (1, 2, 3)), timeout=PATIENCE)) == expected


PARTS = """
from my_layers import layer
from torch import nn

def net(num_classes, in_channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), layer(num_classes))
"""
EXPERIMENT = """
rounds: 2
model: {name: "my_parts:net"}
train: {lr: 0.05, batch_size: 32, steps: 3}
engine: {device: cpu}
runs: {three: {clients: 3}, two: {clients: 2}}
"""


SCRIPT = """
import sys
from torch import nn
from fedbn_flwr import run

def of_width(width):
    return lambda num_classes: nn.Sequential(nn.Flatten(), Layer(width), nn.BatchNorm1d(width), nn.ReLU(),
                                             nn.Linear(width, num_classes))

class Layer(nn.Linear):
    def __init__(self, width):
        super().__init__(64, width)

engine = {"name": "ray", "address": sys.argv[1], "node_timeout": float(sys.argv[2])}
run("mine.yaml", only="two", model=of_width(8), engine=engine, out="script", progress=False)
"""


def test_an_experiment_with_parts_of_the_user_has_the_arrays_of_the_local_engine(
    cluster: Cluster, address: str, tmp_path: Path
) -> None:
    """The runs have different numbers of clients, and the second machine would have to import the user's files.

    A closure of a script, which no machine can import, makes the same network.
    """
    cluster.close()  # the actors of the tests above have the room that the commands below need
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "my_layers.py").write_text("from torch import nn\n\ndef layer(n):\n    return nn.Linear(8, n)\n")
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    cluster = [f"engine.address={address}", f"engine.node_timeout={PATIENCE}", "--engine", "ray", "--out", "ray"]
    for words in (["--out", "local"], cluster):
        done = fedbn("run", "mine.yaml", *words, cwd=tmp_path, **RAY)
        assert done.returncode == 0, done.stdout + done.stderr
    for run in ("three", "two"):
        local, ray = ((tmp_path / engine / run / "model.safetensors").read_bytes() for engine in ("local", "ray"))
        assert local == ray
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", address, str(PATIENCE)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(**RAY), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "script" / "two" / "model.safetensors").read_bytes() == ray
    with socket.socket() as attempt:
        host, _, port = address.rpartition(":")
        assert attempt.connect_ex((host, int(port))) == 0, "the cluster outlives the run"


# --- a loaded machine ---

# The command line, with a raylet that begins to start after sys.argv[1] seconds. Ray itself must not be imported here.
SLOW = """
import subprocess, sys

class Slow(subprocess.Popen):
    def __init__(self, words, **more):
        if isinstance(words, list) and str(words[0]).endswith("raylet/raylet"):
            words = ["sh", "-c", f'sleep {sys.argv[1]}; exec "$@"', "sh", *words]
        super().__init__(words, **more)

subprocess.Popen = Slow
from fedbn_flwr.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.nightly
def test_ray_may_start_slowly(tmp_path: Path) -> None:
    """Ray itself waits for 30 seconds."""
    words = ["run", "quick", "rounds=1", "strategy.freeze_round=1", "--engine", "ray", "--out", str(tmp_path / "out")]
    # The limit is set where none is given, and tests have one.
    kept = {key: value for key, value in environment(**RAY).items() if not key.startswith("RAY_")}
    program = [sys.executable, "-c", SLOW, "40", *words]
    done = subprocess.run(program, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
