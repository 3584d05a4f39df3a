"""Processes of a deployment are killed during a run, and the others continue.

docs/operations.md ("Failures") describes for operators what these tests measure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.certificates import valid_until
from tests.support.command import PATIENCE, fedbn
from tests.support.network import Deployment, wait_for
from tests.support.runs import is_finished, saved_round

pytestmark = pytest.mark.slow

ADMITTED = "SuperNode ID:"  # a SuperNode logs this when the SuperLink has admitted it

EXPERIMENT: dict[str, Any] = {
    "name": "faults",
    "clients": 3,
    "data": {"name": "digits", "partition": {"kind": "classes", "classes_per_client": 4}},
    "model": {"name": "cnn", "norm": "bn"},
    "train": {"lr": 0.1, "batch_size": 32, "steps": 2},
    "strategy": {"name": "FedAvg", "min_train_nodes": 2},
    "engine": {"device": "cpu", "checkpoint_every": 1, "timeout": 2 * PATIENCE, "node_timeout": PATIENCE},
}


REAL = pytest.param("real_deployment", marks=pytest.mark.nightly)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Deployment:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Deployment)
    return found


class Run:
    """A run of EXPERIMENT on the deployment, watched through its folder."""

    def __init__(self, deployment: Deployment, out: Path, resume: bool = False, **changes: Any) -> None:
        self.deployment = deployment
        self.folder = RunFolder(out / "FedAvg")
        experiment = json.dumps(EXPERIMENT | changes)
        self.id = deployment.submit({"experiment": experiment, "out": str(out), "resume": resume})

    def rounds(self) -> list[dict[str, Any]]:
        return self.folder.history() if self.folder.path.exists() else []

    def wait(self, what: str, ready: Callable[[], Any]) -> None:
        wait_for(what, lambda: bool(ready()), every=0.02)

    def wait_for_round(self, number: int) -> None:
        self.wait(f"the end of round {number}", lambda: len(self.rounds()) >= number)

    def wait_for_client(self, number: int, after_round: int) -> int:
        """Wait until a client works on the round after `after_round`, and return the id of its process."""
        service = self.deployment.running[f"superexec-clientapp-{number}"]
        self.wait_for_round(after_round)
        before = service.apps()  # they have answered and are about to end
        self.wait(f"client {number}'s next process", lambda: set(service.apps()) - set(before))
        return (set(service.apps()) - set(before)).pop()

    def finish(self, expected: str = "finished:completed") -> None:
        last = self.deployment.wait_for_end(self.id)
        assert last == expected, f"{last}\n{self.deployment.log(self.id)}\n{self.deployment.outputs()}"
        print([(round(line["seconds"], 1), line["clients"]) for line in self.rounds()])

    def answers(self) -> list[int]:
        """The number of clients' models that each round averages."""
        return [line["clients"] for line in self.rounds()]


def site(deployment: Deployment, number: int) -> list[str]:
    return [name for name in deployment.services if name in (f"supernode-{number}", f"superexec-clientapp-{number}")]


def kill(deployment: Deployment, *names: str) -> None:
    """Send SIGKILL to all processes of the services, which end as in a power failure."""
    for name in names:
        deployment.running[name].kill()


def bring_back(deployment: Deployment, *names: str) -> None:
    """Start services again until they stay up, as `restart: unless-stopped` does."""
    for name in names:
        deployment.launch(name)
    admitted = {name: deployment.running[name].output().count(ADMITTED) for name in names}

    def is_up(name: str) -> bool:
        service = deployment.running[name]
        if service.has_ended():
            service.kill()
            deployment.launch(name)
            return False
        if name.startswith("supernode-"):  # it is healthy before the SuperLink admits it
            return service.output().count(ADMITTED) > admitted[name]
        with contextlib.suppress(RuntimeError):  # it ended during the check
            return "healthcheck" not in deployment.services[name] or deployment.is_healthy(name)
        return False

    wait_for(f"{', '.join(names)} to be back", lambda: all(list(map(is_up, names))), every=0.5)


def wait_for_nodes(deployment: Deployment, count: int = 3) -> None:
    """Wait until `count` sites are connected."""

    def online() -> int:
        listed = json.loads(deployment.flwr("supernode", "list", "remote", "--format", "json"))
        return sum(node["status"] == "online" for node in listed["nodes"])

    wait_for(f"{count} connected nodes", lambda: online() == count, every=1)


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves every deployment with all of its sites connected, also after a test that failed."""
    yield
    for found in request.node.funcargs.values():
        if isinstance(found, Deployment):
            started = [name for name in found.services if name in found.running and name != "register"]
            ended = [name for name in started if found.running[name].has_ended()]
            bring_back(found, *ended)
            wait_for_nodes(found)


@pytest.mark.parametrize(
    ("nodes", "moment"),
    [
        ("deployment", "before it answers"),
        pytest.param("real_deployment", "while it uploads", marks=pytest.mark.nightly),
    ],
    indirect=["nodes"],
)
def test_a_site_that_dies_is_left_out_until_it_is_back(nodes: Deployment, tmp_path: Path, moment: str) -> None:
    """In "while it uploads" its ClientApp's process has ended, and its SuperNode holds the answer.

    If the SuperNode has sent the last byte before the kill, the answer counts.
    """
    run = Run(nodes, tmp_path / "out", rounds=8)
    process = run.wait_for_client(1, after_round=1)
    if moment == "while it uploads":
        run.wait("its end", lambda: not Path(f"/proc/{process}").exists())
    kill(nodes, *site(nodes, 1))
    bring_back(nodes, *site(nodes, 1))
    run.finish()
    answers = run.answers()
    assert answers[0] == answers[-1] == 3
    assert answers[1] == 2 or moment == "while it uploads"
    assert is_finished(run.folder.path)
    assert saved_round(run.folder.path) == 8


def test_a_site_restarted_at_once_costs_its_answer_and_no_waiting(deployment: Deployment, tmp_path: Path) -> None:
    """The SuperLink never sees the site offline, so it makes no error reply for the lost message."""
    run = Run(deployment, tmp_path / "out", rounds=8)
    run.wait_for_client(1, after_round=1)
    kill(deployment, "superexec-clientapp-1")
    node = deployment.running["supernode-1"]
    node.ask_to_stop()
    assert node.exit_status() == 0, node.output()
    bring_back(deployment, *site(deployment, 1))
    run.finish()  # it gives up before the round's timeout
    answers = run.answers()
    assert answers[0] == answers[-1] == 3
    assert answers[1] == 2


def test_sites_come_back_after_an_expired_certificate_was_renewed(deployment: Deployment) -> None:
    """Flower's SuperNode never connects again after an error of TLS: its process must end, to be started again."""
    certificate = deployment.keys / "superlink" / "server.pem"
    valid = certificate.read_bytes()
    nodes = [name for name in deployment.services if name.startswith("supernode-")]
    try:
        valid_until(-1, certificate, deployment.keys)
        kill(deployment, "superlink")
        deployment.launch("superlink")
        for name in nodes:
            assert deployment.running[name].exit_status() == 1
            assert "certificate has expired" in deployment.running[name].output()
    finally:
        certificate.write_bytes(valid)
        kill(deployment, "superlink")
        bring_back(deployment, "superlink")
    bring_back(deployment, *nodes)
    wait_for_nodes(deployment)


@pytest.mark.parametrize("nodes", ["deployment", REAL], indirect=True)
def test_a_killed_serverapp_is_resumed_to_the_same_model(nodes: Deployment, tmp_path: Path) -> None:
    run = Run(nodes, tmp_path / "out", rounds=4)
    run.wait_for_round(2)
    run.wait("a checkpoint", lambda: saved_round(run.folder.path) >= 2)
    for server in nodes.running["superexec-serverapp"].apps():  # that of an earlier run may still be ending
        os.kill(server, signal.SIGKILL)
    run.finish("finished:failed")
    done = len(run.rounds())
    assert 2 <= saved_round(run.folder.path) <= done < 4
    again = Run(nodes, tmp_path / "out", resume=True, rounds=4)
    again.finish()
    assert [line["round"] for line in again.rounds()] == [1, 2, 3, 4]
    assert is_finished(again.folder.path)
    # An undisturbed run on the local engine.
    file = tmp_path / "faults.yaml"
    file.write_text(json.dumps(EXPERIMENT | {"rounds": 4}))
    local = fedbn("run", file, "--out", tmp_path / "local", cwd=tmp_path)
    assert local.returncode == 0, local.stderr
    models = [(out / "FedAvg" / "model.safetensors").read_bytes() for out in (tmp_path / "local", tmp_path / "out")]
    assert models[0] == models[1]


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", ["real_deployment"], indirect=True)
def test_a_run_outlives_the_superlink(nodes: Deployment, tmp_path: Path) -> None:
    """The SuperLink's database is on a volume, and apps run in other processes.

    A message that a site is about to receive is lost: in its database it is delivered. The round then waits for as long
    as `engine.timeout`.
    """
    run = Run(nodes, tmp_path / "out", rounds=4, engine=EXPERIMENT["engine"] | {"timeout": 300})
    run.wait_for_client(0, after_round=1)
    kill(nodes, "superlink")
    time.sleep(5)
    bring_back(nodes, "superlink")
    run.finish()
    assert [line["round"] for line in run.rounds()] == [1, 2, 3, 4]
    first, second, *others = run.answers()
    assert (first, others) == (3, [3, 3])
    assert second in (2, 3)
