"""docker-compose.yml, and the file that deploy/sites.sh writes from it, in containers of a Docker engine.

The images must exist (`docker compose build`). Every container runs as in production, so a message takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT
from tests.support.containers import Containers, docker, skip_without_an_engine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

UID = "49999"  # of Flower's images

EXPERIMENT: dict[str, Any] = {
    "rounds": 1,
    "clients": 3,
    "data": {"name": "digits", "partition": {"kind": "classes", "classes_per_client": 4}},
    "model": {"name": "mlp", "norm": "bn"},
    "train": {"lr": 0.05, "batch_size": 32, "steps": 1},
    "evaluate": {"clients": False},
    "engine": {"device": "cpu", "checkpoint_every": 1},
}
FIXBN = {"strategy": {"name": "FixBN", "freeze_round": 1}}
FEDTAN = {"strategy": {"name": "FedTAN"}}


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    skip_without_an_engine()
    found = Containers(tmp_path)
    try:
        yield found
    finally:
        found.down()


def check_owners(containers: Containers) -> None:
    """Each volume belongs to the containers' user; only that user can read a site's state and its node's key."""
    assert containers.inside("superexec-serverapp", "stat -c '%u' /runs").split() == [UID]
    written = containers.inside("superexec-serverapp", "find /runs -type f -exec stat -c '%u' {} +").split()
    assert set(written) == {UID}
    assert not containers.inside("superexec-serverapp", "find /runs -mindepth 2 -type f ! -perm 600").split()
    for site in range(3):
        app = f"superexec-clientapp-{site}"
        assert containers.inside(app, "id -u").strip() == UID
        assert containers.inside(app, "stat -c '%u %a' /state").split() == [UID, "700"]
        assert containers.inside(app, "touch /data/new 2>/dev/null || echo read-only").strip() == "read-only"
        assert containers.inside(app, "ls /keys 2>/dev/null || echo none").strip() == "none"
        node = f"supernode-{site}"
        key = containers.inside(node, "stat -c '%u %a' /keys/node.key").split()
        assert key == [UID, "600"]
        assert containers.inside(node, "touch /keys/new 2>/dev/null || echo read-only").strip() == "read-only"


def check_isolation(containers: Containers) -> None:
    """No container can write to its root, and the apps of sites are on internal networks only."""
    nodes = [f"supernode-{site}" for site in range(3)]
    apps = [f"superexec-clientapp-{site}" for site in range(3)]
    for service in ("superlink", "superexec-serverapp", *nodes, *apps):
        assert containers.inside(service, "touch /new /python/new 2>/dev/null || echo read-only").strip() == "read-only"
    for app in apps:
        for network in containers.networks(app):
            assert docker("network", "inspect", "--format", "{{.Internal}}", network).strip() == "true", network
    for name in ("superlink", "supernode-1"):
        assert containers.inside(apps[0], f"getent hosts {name} || echo unknown").strip() == "unknown"
    assert containers.inside("superexec-serverapp", "getent hosts supernode-0 || echo unknown").strip() == "unknown"


def test_three_sites_lose_a_site_and_a_server_and_continue(containers: Containers) -> None:
    containers.script("deploy/keys.sh")
    containers.up()
    containers.wait_for_nodes(3)
    for name, change in (("fixbn", FIXBN), ("fedtan", FEDTAN)):
        containers.wait_for_end(containers.submit(name, EXPERIMENT | change))
        assert [line["clients"] for line in containers.history(name)] == [3]

    # FedBN's clients keep their own norms in the volumes of their sites.
    experiment = EXPERIMENT | {"rounds": 6, "strategy": {"name": "FedBN", "min_train_nodes": 2}}
    run_id = containers.submit("fedbn", experiment)
    containers.wait_for("round 1", lambda: containers.history("fedbn"))
    containers.compose("kill", "supernode-1", "superexec-clientapp-1")
    containers.wait_for("a round without site 1", lambda: containers.history("fedbn")[-1]["clients"] == 2)
    containers.compose("start", "supernode-1", "superexec-clientapp-1")
    containers.wait_for("a round with site 1", lambda: containers.history("fedbn")[-1]["clients"] == 3)
    containers.compose("kill", "superexec-serverapp")
    containers.wait_for_end(run_id, "finished:failed")
    containers.compose("start", "superexec-serverapp")
    containers.wait_for_nodes(3)
    done = len(containers.history("fedbn"))
    assert done < 6
    containers.wait_for_end(containers.submit("fedbn", experiment, resume=True))
    assert [line["round"] for line in containers.history("fedbn")] == [1, 2, 3, 4, 5, 6]
    check_owners(containers)
    check_isolation(containers)


def test_the_documented_commands_carry_out_the_default_experiment(containers: Containers) -> None:
    """Those of docs/deployment.md for one machine, word for word, but with images that exist already."""
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    first, _, second, *_ = (text for language, text in blocks if not language)
    setup, commands = ([line.partition("  #")[0].strip() for line in text.splitlines()] for text in (first, second))
    assert setup == ["deploy/keys.sh", "docker compose up --build --detach"]
    containers.script("deploy/keys.sh")
    containers.up()
    containers.wait_for_nodes(3)
    printed = containers.user(commands[0])  # flwr run
    (run_id,) = re.findall(r"Successfully started run (\d+)", printed)
    containers.wait_for_end(run_id)
    for command in commands[1:]:
        printed += containers.user(command.replace("RUN_ID", run_id))
    assert "communication rounds" in printed, "the table of the log"
    (history,) = (containers.checkout / "runs").rglob("history.jsonl")
    assert [json.loads(line)["clients"] for line in history.read_text().splitlines()] == [3] * 5


TABLE: dict[str, Any] = EXPERIMENT | {
    "data": {"inputs": ["a", "b"], "label": "label", "class_names": ["no", "yes"]},
    "train": {"lr": 0.1, "batch_size": 10, "steps": 3},
    "evaluate": {"server": False},
}


def test_sites_measure_a_model_without_training_as_predict_does_there(containers: Containers) -> None:
    """One of them trains in a way of its own; what they measure is what `fedbn predict` says of their folders."""
    lines = []
    for i in range(3):
        folder, draw = containers.checkout / f"data-{i}", random.Random(i)
        folder.mkdir()
        for part in ("train", "test"):
            inputs = [(draw.gauss(i, 1), draw.gauss(0, 1)) for _ in range(40)]
            rows = [f"{a},{b},{'yes' if a - b + draw.gauss(0, 1) > i else 'no'}" for a, b in inputs]
            (folder / f"{part}.csv").write_text("\n".join(["a,b,label", *rows, ""]))
        own = "batch-size=20 lr-factor=0.5" if i == 1 else ""
        lines += [f"DATA_{i}={folder}", f"NODE_{i}=\"data-path='/data' survey=true {own}\""]
    (containers.checkout / ".env").write_text("\n".join([*lines, ""]))
    containers.script("deploy/keys.sh")
    containers.up()
    containers.wait_for_nodes(3)
    containers.wait_for_end(containers.submit("trained", TABLE))
    judge = {"rounds": 0, "evaluate": {"server": False, "models": ["/runs/trained/FedAvg"]}}
    containers.wait_for_end(containers.submit("judged", TABLE | judge))
    survey = {"rounds": 0, "evaluate": {"server": False, "survey": True}}
    containers.wait_for_end(containers.submit("surveyed", TABLE | survey))
    found = [
        json.loads(containers.inside("superexec-serverapp", f"cat /runs/{name}"))
        for name in ("judged/runs-trained-FedAvg/clients.jsonl", "surveyed/survey/survey.json")
    ]
    measured = found[0]["clients"]
    assert found[1]["union"]["examples"] == 120
    run = containers.checkout / "run"
    containers.compose("cp", "superexec-serverapp:/runs/trained/FedAvg", os.fspath(run))
    for i in range(3):
        printed = containers.user(f"fedbn predict run --data data-{i} --out predictions-{i}.csv")
        (right,) = re.findall(r"(\d+) of 40 labels", printed)
        assert measured[str(i)]["own_accuracy"] == pytest.approx(int(right) / 40)


def test_fedtan_exchanges_through_the_port_that_is_published_for_other_machines(containers: Containers) -> None:
    """The steps of docs/deployment.md; the sites are on this machine, but reach the service at its own address."""
    subnet = docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Subnet}}", "bridge").strip()
    address = str(next(ip_network(subnet).hosts()))  # this machine's in Docker's first network
    containers.script("deploy/keys.sh", address)
    containers.up()
    assert containers.published("superexec-serverapp", 8001) == "127.0.0.1", "nobody else reaches it by default"
    (containers.checkout / ".env").write_text(f"EXCHANGE={address}:8001\nEXCHANGE_BIND={address}\n")
    containers.up()
    assert containers.published("superexec-serverapp", 8001) == address
    assert containers.published("superlink", 8000) == "127.0.0.1", "anyone there could run code at every site"
    containers.wait_for_nodes(3)
    experiment = EXPERIMENT | FEDTAN | {"rounds": 2}
    containers.wait_for_end(containers.submit("fedtan", experiment))
    assert [line["clients"] for line in containers.history("fedtan")] == [3, 3]
