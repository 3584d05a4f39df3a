"""deploy/proxy: sites that reach the server only through it train, and can do nothing else."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from tests.deployment.test_network import EXPERIMENT
from tests.support.command import PATIENCE
from tests.support.network import Deployment, read_compose


class WithProxy(Deployment):
    """The services of the compose file and `proxy`, which the SuperNodes take for the SuperLink."""

    def __init__(self, folder: Path) -> None:
        variables = {"SUPERLINK": "proxy:8443"}
        super().__init__(folder, variables=variables)
        self.services["proxy"] = read_compose(variables)["services"]["proxy"]

    def mounts(self, service: str) -> dict[str, Path]:
        found = super().mounts(service)
        if service == "proxy":
            found["/tmp"] = self.folder / "volumes" / "tmp"
            rewritten = self.folder / "nginx.conf"
            file = found["/proxy/nginx.conf"]
            rewritten.write_text(self.rewrite(file.read_text(encoding="utf-8"), service, found, service))
            found["/proxy/nginx.conf"] = rewritten
        return found


@pytest.fixture(scope="module")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithProxy]:
    if shutil.which("nginx") is None:
        pytest.skip("not installed: nginx")
    with WithProxy(tmp_path_factory.mktemp("proxy")) as running:
        yield running


def ask(deployment: Deployment, method: str, path: str) -> int:
    """The status of the proxy's answer; `path` is sent as it is."""
    context = ssl.create_default_context(cafile=str(deployment.keys / "ca.crt"))
    connection = HTTPSConnection("127.0.0.1", deployment.port("proxy", 8443), context=context, timeout=PATIENCE)
    connection.request(method, path)
    return connection.getresponse().status


@pytest.mark.slow
def test_sites_behind_the_proxy_train(behind_proxy: WithProxy) -> None:
    run = behind_proxy.run_app({"experiment": json.dumps(EXPERIMENT)})
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["clients"]) == ("finished", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["ls", "proxy"], ["supernode", "list", "proxy"], ["run", ".", "proxy"], ["supernode", "unregister", "1"]]
)
def test_a_site_can_neither_submit_runs_nor_see_or_remove_nodes(behind_proxy: WithProxy, words: list[str]) -> None:
    behind_proxy.flwr("ls", "remote")  # the SuperLink itself permits it
    config = behind_proxy.folder / "site"
    config.mkdir(exist_ok=True)
    (config / "config.toml").write_text(
        f'[superlink]\ndefault = "proxy"\n[superlink.proxy]\n'
        f'address = "127.0.0.1:{behind_proxy.port("proxy", 8443)}"\n'
        f"root-certificates = {json.dumps(str(behind_proxy.keys / 'ca.crt'))}\n"
    )
    environment = behind_proxy.environment({"FLWR_HOME": str(config), "FLWR_TELEMETRY_ENABLED": "0"}, config)
    app = behind_proxy.folder / "fedbn-flwr"
    done = subprocess.run(
        ["flwr", *words],
        cwd=app if app.exists() else config,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode != 0, done.stdout
    assert "403" in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_paths_are_compared_as_the_superlink_gets_them(behind_proxy: WithProxy) -> None:
    assert ask(behind_proxy, "GET", "/health") == 200
    assert ask(behind_proxy, "POST", "/v1/fleet/pull-messages") not in (403, 404, 502), "the SuperLink answers"
    for path in (
        "/v1/control/list-runs",
        "/v1/runtime/get-nodes",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/x%2f..%2f..%2fcontrol/list-runs",
        "//v1/control/list-runs",
        "/docs",
    ):
        assert ask(behind_proxy, "POST", path) == 403, path
