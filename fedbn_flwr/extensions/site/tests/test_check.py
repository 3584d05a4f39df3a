"""`fedbn check`, with real keys and certificates, and a real TLS server on loopback."""

from __future__ import annotations

import csv
import http.server
import importlib.metadata
import json
import re
import select
import shutil
import socket
import socketserver
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbn_flwr import __version__
from fedbn_flwr.commands import cli
from fedbn_flwr.extensions.site import needs
from tests.support.certificates import valid_until
from tests.support.images import write_pictures
from tests.support.network import make_keys, needs_tools
from tests.support.refusals import refusal

pytestmark = needs_tools
LINE = r"^(?P<status>ok     |warning|FAILED )  (?P<name>.{18}) (?P<found>.*)(\n +-> (?P<cure>.*))?$"
LONG = "x" * 300  # longer than file systems allow


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    """Keys of deploy/keys.sh in a folder that other users can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="fedbn-keys-"))
    done = make_keys(folder / "keys", "--nodes", "1")
    assert done.returncode == 0, done.stderr
    for each in (folder, folder / "keys", folder / "keys" / "site-0"):
        each.chmod(0o755)
    (folder / "keys" / "site-0" / "node.key").chmod(0o600)
    yield folder / "keys"
    shutil.rmtree(folder)


def check(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the checks by name: of several with one name, the last that is not ok."""
    code = cli.main(["check", *map(str, words)])
    lines = re.finditer(LINE, capsys.readouterr().out, re.MULTILINE)
    found = [{key: (value or "").strip() for key, value in each.groupdict().items()} for each in lines]
    assert all(bool(each["cure"]) == (each["status"] != "ok") for each in found)
    ordered = sorted(found, key=lambda each: each["status"] != "ok")
    return code, {each["name"]: each for each in ordered}


class Healthy(http.server.BaseHTTPRequestHandler):
    late = 0.0  # seconds that the server's clock is behind this machine's
    version = importlib.metadata.version("flwr")  # of the SuperLink
    protocol_version = "HTTP/1.1"  # as the SuperLink's: the connection stays open

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() - self.late)

    def do_GET(self) -> None:
        body = b"{}"
        if self.path == "/openapi.json" and self.version:
            body = json.dumps({"info": {"title": "SuperLink API", "version": self.version}}).encode()
        self.send_response(200 if self.path == "/health" or len(body) > 2 else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that rejects the certificate ends the handshake."""


@contextmanager
def served(keys: Path, certificate: Path | None = None, host: str = "127.0.0.1", *, tls: bool = True) -> Iterator[str]:
    with Server((host, 0), Healthy) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate or keys / "superlink" / "server.pem", keys / "superlink" / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_site_that_is_ready_passes(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root-certificates", keys / "site-0" / "ca.crt", "--auth-supernode-private-key"]
    words += [keys / "site-0" / "node.key", "--node-config", "partition-id=1 num-partitions=3"]
    with served(keys) as address:
        code, found = check(capsys, *words, "--superlink", address, "quick")
    assert code == 0, found
    assert {each["status"] for each in found.values()} == {"ok"}
    assert "a SuperLink, with TLS" in found["server"]["found"]
    assert "824 days" in found["server certificate"]["found"]
    assert "secp384r1" in found["key"]["found"]
    assert f"flwr {importlib.metadata.version('flwr')}" in found["versions"]["found"]
    assert "examples of shape [1, 8, 8]; classes: 0: " in found["data"]["found"]
    assert "cnn takes these examples" in found["experiment"]["found"]


class Proxy(socketserver.StreamRequestHandler):
    """An HTTP proxy for CONNECT."""

    asked: ClassVar[list[str]] = []

    def handle(self) -> None:
        address = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.asked.append(address)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as server:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            ends = {server: self.request, self.request: server}
            while data := (end := select.select([*ends], [], [])[0][0]).recv(65536):
                ends[end].sendall(data)


def test_the_server_is_reached_through_the_site_s_proxy(
    keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy, served(keys) as address:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
        code, found = check(capsys, "--root-certificates", keys / "ca.crt", "--superlink", address)
        proxy.shutdown()
        thread.join()
    assert (code, Proxy.asked) == (0, [address])
    assert "a SuperLink, with TLS" in found["server"]["found"]
    assert "824 days" in found["server certificate"]["found"], "the server's, not the proxy's"


@pytest.mark.parametrize(
    ("late", "status"),
    [(0, "ok"), (8, "FAILED"), (400, "FAILED"), (5.9, "warning"), (-8, "ok"), (-290, "ok"), (-307, "FAILED")],
)
def test_the_clocks_of_site_and_server(
    late: float, status: str, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SuperLink accepts nodes whose clock is less than 5 s ahead of its own, or less than 305 s behind."""
    monkeypatch.setattr(Healthy, "late", late)
    with served(keys) as address:
        code, found = check(capsys, "--root-certificates", keys / "ca.crt", "--superlink", address)
    assert found["clock"]["status"] == status
    assert code == (status == "FAILED")
    assert ("ahead of the server's" if late >= 0 else "behind the server's") in found["clock"]["found"]
    if status != "ok":
        assert "rejects a node 5 s ahead or 305 s behind" in found["clock"]["cure"]
        assert "NTP" in found["clock"]["cure"]


@pytest.mark.parametrize(
    ("version", "status"),
    [(Healthy.version, "ok"), ("1.36.0", "warning"), ("", None)],
)
def test_another_version_of_flower_at_the_server_is_named(
    version: str,
    status: str | None,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A SuperNode of 1.36 tries for ever to connect to a SuperLink of 1.41. A reverse proxy may not say the version."""
    here = Healthy.version
    monkeypatch.setattr(Healthy, "version", version)
    with served(keys) as address:
        code, found = check(capsys, "--root-certificates", keys / "ca.crt", "--superlink", address)
    assert code == 0
    assert (found["Flower"]["status"] if "Flower" in found else None) == status
    if status == "warning":
        assert found["Flower"]["found"] == f"{here} here, 1.36.0 at the server"
        assert "the node may never connect: install flwr==1.36.0" in found["Flower"]["cure"]


def test_code_that_is_mounted_and_not_installed_has_a_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the container of docker-compose.yml, whose image has the dependencies only."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "fedbn-flwr":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, found = check(capsys)
    assert code == 0
    assert f"fedbn-flwr {__version__}, flwr {known('flwr')}" in found["versions"]["found"]


def test_the_exchange_port_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, found = check(capsys, "--exchange", address)
        assert (code, found["exchange service"]["found"]) == (0, f"{address} answers")
    code, found = check(capsys, "--exchange", address)  # between rounds
    assert code == 0
    assert "can be reached, and is closed now" in found["exchange service"]["found"]
    code, found = check(capsys, "--exchange", "no-such-host.invalid:8001")
    assert (code, found["exchange service"]["status"]) == (1, "FAILED")


def test_a_full_disk_and_a_class_without_examples_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    node = patients(tmp_path / "site", lambda rows: rows.update(outcome=["ill"] * 40))
    code, found = check(capsys, node[0], f"{node[1]} state='{tmp_path}'", PATIENTS)
    assert code == 0
    assert found["state folder"]["status"] == "warning"
    assert "0.5 GB free" in found["state folder"]["found"]
    assert found["contents"]["status"] == "warning"
    assert found["contents"]["found"].endswith("no training examples of well")


def test_a_key_that_others_can_read_fails(keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = keys / "site-0" / "node.key"
    for mode, says in ((0o644, "-rw-r--r--"), (0o640, "-rw-r-----"), (0o600, "only for its owner")):
        key.chmod(mode)
        code, found = check(capsys, "--auth-supernode-private-key", key)
        assert code == (mode != 0o600), (oct(mode), found)
        assert says in found["key"]["found"]
    code, found = check(capsys, "--insecure", "--auth-supernode-private-key", key)
    assert code == 1, "flower-supernode exits"
    assert "in place of --insecure" in found["key"]["cure"]
    for name in ("superlink/server.key", "nodes/node-0.pub"):  # neither is a private key of ssh-keygen
        code, found = check(capsys, "--auth-supernode-private-key", keys / name)
        assert code == 1
        assert "not a private key" in found["key"]["found"]


@pytest.mark.parametrize(
    ("days", "status", "says"),
    [(-1, "FAILED", "expired"), (10.5, "warning", "(10 days)"), (31, "ok", "valid until")],
)
def test_the_validity_of_certificates_is_checked(
    days: float, status: str, says: str, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = valid_until(days, tmp_path / "server.pem", keys)
    code, found = check(capsys, "--root-certificates", certificate)
    assert code == (status == "FAILED")
    assert found["root certificate"]["status"] == status
    assert says in found["root certificate"]["found"]
    with served(keys, certificate) as address:
        code, found = check(capsys, "--root-certificates", keys / "ca.crt", "--superlink", address)
    assert code == (status == "FAILED")
    which = found["server" if status == "FAILED" else "server certificate"]
    assert which["status"] == status
    if status != "ok":
        assert "deploy/keys.sh --add --nodes N" in which["cure"]
        assert "restart proxy, and between two runs" in which["cure"], "the proxy presents it to sites"


def test_a_server_that_cannot_be_trusted_or_reached_is_named(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def server(address: str, *words: str | Path, authority: Path = keys / "ca.crt") -> dict[str, str]:
        code, found = check(capsys, "--root-certificates", authority, "--superlink", address, *words)
        assert code == 1
        return found["server"]

    with served(keys, host="127.0.0.2") as address:
        found = server(address)
        assert f"the certificate of {address} is not accepted: IP address mismatch" in found["found"], found
        assert "keys.sh --add --nodes N NAME" in found["cure"]
    assert make_keys(tmp_path / "other", "--nodes", "1").returncode == 0
    with served(keys) as address:
        assert (
            "is not accepted: unable to get local issuer certificate"
            in server(address, authority=tmp_path / "other" / "ca.crt")["found"]
        )
    with served(keys, tls=False) as address:
        assert "has no TLS" in server(address)["found"]
        code, plain = check(capsys, "--insecure", "--superlink", address)
        assert (code, plain["server"]["status"]) == (0, "warning")
        assert plain["clock"]["status"] == "ok"
    with served(keys) as address:  # it has TLS: flower-supernode --insecure would not connect
        code, plain = check(capsys, "--insecure", "--superlink", address)
        assert (code, plain["server"]["status"]) == (1, "FAILED")
        assert f"{address} does not answer HTTP requests without TLS" in plain["server"]["found"]
        assert "in place of --insecure" in plain["server"]["cure"]
    closed = server(address)
    assert "refused" in closed["found"]
    assert "(8443 for sites) and the firewall; ask the operator" in closed["cure"]
    code, missing = check(capsys, "--root-certificates", tmp_path / "no.crt", "--superlink", address)
    assert code == 1
    assert missing["root certificate"]["found"].endswith("no.crt: there is no such file")
    assert "server" not in missing
    assert "cannot resolve" in server("no-such-host.invalid:8443")["found"]
    assert "HOST:PORT" in server("localhost")["cure"]
    monkeypatch.setattr(needs, "_TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        found = server(f"127.0.0.1:{silent.getsockname()[1]}")
        assert "does not answer within 1 s" in found["found"], found


def test_data_of_a_site_are_described_and_broken_data_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        images = random.integers(0, 255, (count, 12, 10, 3), np.uint8)
        write_pictures(tmp_path / "examples" / split, images, "cat", "dog")
    config = ["--node-config", f"data-path='{tmp_path / 'examples'}' state='{tmp_path}'"]
    shutil.copytree(tmp_path / "examples", tmp_path / "broken")
    (tmp_path / "broken" / "train" / "cat" / "0.png").write_bytes(b"no image")
    broken, option = f"data-path='{tmp_path / 'broken'}'", "--node-config"
    site = ["{data: {classes: 3, channels: 3, size: [12, 10], normalise: unit}, evaluate: {server: false}}"]
    named = ["data.classes=null", "data.class_names=[cat, dog, owl]"]
    cases: list[tuple[list[str], int, str, str]] = [
        (config, 0, "data", "can be read; name the experiment too"),
        (config, 0, "state folder", "can be written to"),
        ([*config, *site], 1, "data", "data.classes is 3"),
        (
            [*config, *site, "data.classes=2", "model.name=lenet"],
            1,
            "data",
            "at least 12x12 pixels; these have 12x10",
        ),
        (
            [*config, *site, "data.classes=2"],
            0,
            "data",
            "8 training and 4 test examples of shape [3, 12, 10]; classes: cat: 4, dog: 4",
        ),
        ([*config, *site, *named], 0, "data", "owl: 0"),
        ([option, broken, *site, "data.classes=2"], 1, "data", "0.png"),
        ([option, "data-pth='/data'"], 1, "node config", "'data-path'"),
        (
            [option, "partition-id=0 num-partitions=5", "quick"],
            1,
            "data",
            "has partition-id=0 and num-partitions=5, but the experiment has clients=3;",
        ),
        (["quick"], 1, "data", "this node has no partition-id, but the experiment has clients=3; set"),
        ([option, "min-batch='x'"], 1, "node config", "min-batch='x'"),
    ]
    for words, expected, name, says in cases:
        code, found = check(capsys, *words)
        assert (code, says in found[name]["found"]) == (expected, True), found
    code, found = check(capsys, option, "data-path='/no/such/folder'")
    assert (code, found["data"]["found"]) == (1, "data-path='/no/such/folder': there is no such file or folder")
    assert "data" not in check(capsys, option, "data-pth='/data'", "quick")[1], "the same text again"
    assert "texts need quotes, such as name='text'" in refusal(capsys, "check", option, "partition-id=x")


@pytest.mark.parametrize(
    ("more", "examples", "verdict"),
    [
        (["strategy={name: FedTAN, min_batch: 1}"], 16, "fewer than 32"),
        (["strategy={name: FedTAN, min_batch: 16}", "evaluate.validation=0.2"], 16, "has 13 examples"),
        (["strategy={name: FedTAN, min_batch: 16}"], 16, ""),
        (["strategy={name: FedAvg}"], 1, ""),
    ],
)
def test_a_site_knows_before_the_run_whether_it_may_exchange_statistics(
    more: list[str], examples: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (8, 12, 10, 3), np.uint8)
    write_pictures(
        tmp_path / "examples", images, *(f"{split}/class {i}" for split in ("train", "test") for i in (0, 1))
    )
    own = "" if "min_batch: 1}" in more[0] else " min-batch=16"
    config = ["--node-config", f"data-path='{tmp_path / 'examples'}'{own}"]
    site = "{train: {batch_size: 16}, data: {classes: 2, channels: 3, size: [12, 10], normalise: unit}}"
    code, found = check(capsys, *config, site, "evaluate.server=false", *more)
    assert code == bool(verdict), found
    if verdict:
        assert verdict in found["data"]["found"]


def test_a_state_folder_may_be_below_the_home_folder_and_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for state in ("~", "~/not/yet"):
        code, found = check(capsys, "--node-config", f"state='{state}'")
        assert code == 0, found
        assert f"{tmp_path}" in found["state folder"]["found"]


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "check", "--node-config", "data-path").startswith("fedbn: error: --node-config")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "--insecure", "--root-certificates", "ca.crt"])
    assert "--root-certificates: not allowed with argument --insecure" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data-path", "state"])
def test_a_path_of_a_site_that_cannot_be_used_is_a_failed_check(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(capsys, "--node-config", f"{key}='/{LONG}'")
    assert code == 1
    assert any(each["status"] == "FAILED" and "File name too long" in each["found"] for each in found.values())


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("a..b:9092", "this machine cannot resolve the name 'a..b'"),
        ("localhost:" + "9" * 5000, "the address is 'localhost:99"),
    ],
)
def test_an_address_that_can_be_no_name_is_a_failed_check(
    address: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = check(capsys, "--superlink", address)
    assert (code, found["server"]["status"]) == (1, "FAILED")
    assert found["server"]["found"].startswith(says)


# --- tables -------------------------------------------------------------------

PATIENTS = """
{clients: 2, model: {name: mlp}, evaluate: {server: false}, data: {inputs: [age, pressure, sex], label: outcome,
 categories: {sex: [f, m]}, class_names: [ill, well], ranges: {age: [0, 120]}}}
"""


def patients(folder: Path, change: Callable[[dict[str, list[Any]]], object] = lambda rows: None) -> list[str]:
    folder.mkdir()
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        rows: dict[str, list[Any]] = {
            "age": random.integers(20, 90, 40).tolist(),
            "pressure": random.normal(120, 5, 40).round(1).tolist(),
            "sex": random.choice(["f", "m"], 40).tolist(),
            "outcome": random.choice(["ill", "well"], 40).tolist(),
            "name": [f"patient {number}" for number in range(40)],
        }
        change(rows)
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([rows, *zip(*rows.values(), strict=True)])
    return ["--node-config", f"data-path='{folder}'"]


def test_a_table_that_suits_the_experiment_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(capsys, *patients(tmp_path / "site"), PATIENTS)
    assert code == 0, found
    assert "40 training and 40 test examples of shape [4]; classes: ill: " in found["data"]["found"]
    assert "; other columns: outcome (data.label), name (not in data.inputs)" in found["data"]["found"]
    assert "mlp takes these examples" in found["experiment"]["found"]
    assert "contents" not in found, "nothing is doubtful"


def test_a_site_sees_each_column_s_missing_values_and_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the experiment, which is not that of the file."""

    def change(rows: dict[str, list[Any]]) -> None:
        rows["age"], rows["pressure"] = [30, 80, 31, 32] * 10, [None, *[99.5] * 36, 110, 110, 130]

    inputs = ["data.inputs=[pressure, age]", "data.categories={}", "data.missing=mean"]
    assert cli.main(["check", *patients(tmp_path / "site", change), PATIENTS, *inputs]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("input "))
    assert [line.strip() for line in lines[at : at + 4]] == [
        "input     missing  lowest  median  highest  data.ranges",
        "--------  -------  ------  ------  -------  -----------",
        "pressure        2    99.5    99.5      130",
        "age             0      30      31       80     0 to 120",
    ]


def first(column: str, *values: object) -> Callable[[dict[str, list[Any]]], None]:
    """Other values in the first rows of a column."""

    def change(rows: dict[str, list[Any]]) -> None:
        rows[column][: len(values)] = values

    return change


def fewer(rows: dict[str, list[Any]]) -> None:
    rows.update({name: values[:20] for name, values in rows.items()})


UNIT = PATIENTS.replace("data: {", "data: {normalise: unit, ")
NUMBERS = PATIENTS.replace("class_names: [ill, well]", "classes: 1")


@pytest.mark.parametrize(
    ("change", "experiment", "status", "says"),
    [
        (lambda rows: rows.pop("age"), PATIENTS, "FAILED", "data.inputs='age' is not a column of"),
        (first("age", "forty", 41, 42), PATIENTS, "FAILED", "2 of 80 values of the column 'age' are not numbers"),
        (
            first("pressure", None, None, 120.5), PATIENTS, "FAILED",
            "some have no value (NaN or null) in pressure (4)",
        ),
        (first("sex", "x", "f", "x"), PATIENTS, "FAILED", "such as 'x'; known: f, m"),
        (first("outcome", "dead", "ill", "ill"), PATIENTS, "FAILED", "such as 'dead'; known: ill, well"),
        (
            first("age", 150, -3, 44), PATIENTS, "FAILED",
            "outside of data.ranges, 0 to 120; correct them, or convert their unit; here they are from",
        ),
        (
            first("pressure", "120,5", "131", *["99,5"] * 38), PATIENTS, "FAILED", "write 150.5 in place of 150,5",
        ),
        (
            first("outcome", *[0.5, 1.25] * 20), NUMBERS, "FAILED",
            "has labels for regression (numbers), but the experiment has classification",
        ),
        (fewer, PATIENTS, "FAILED", "lower min-batch in this node's config: it has 20, and min-batch is 32"),
        (fewer, UNIT, "ok", "20 training and 20 test examples"),
        (first("pressure", -999.0, -999.0), PATIENTS, "warning", "pressure is -999 in 4 rows, and in the others from "),
        (first("pressure", 16.5), PATIENTS, "warning", "pressure is 16.5 in 2 rows, and in the others from "),  # kPa
        (first("pressure", *[None] * 10), PATIENTS, "warning", "25% of the values of pressure are missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_doubtful_in_a_table_is_named(
    change: Callable[[dict[str, list[Any]]], object], experiment: str, status: str, says: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ["data.missing=mean"] if status == "warning" else []
    code, found = check(capsys, *patients(tmp_path / "site", change), experiment, *words)
    about = found["contents" if status == "warning" else "data"]
    assert (code, about["status"]) == (status == "FAILED", status), found
    assert says in about["found"]


def test_a_site_may_allow_fewer_examples_and_repeated_rows_are_doubtful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, config = patients(tmp_path / "few", fewer)
    assert check(capsys, option, config + " min-batch=20", PATIENTS)[0] == 0
    node = patients(tmp_path / "site")
    for numbers in ("", " partition-id=1 num-partitions=2"):  # without an experiment only rights are checked
        code, found = check(capsys, option, node[1] + numbers)
        assert code == 0, found
        assert found["data"]["found"].startswith(f"{tmp_path / 'site'}: can be read;")
    shutil.copy(tmp_path / "site" / "train.csv", tmp_path / "site" / "test.csv")
    code, found = check(capsys, *node, PATIENTS)
    assert (code, found["contents"]["status"]) == (0, "warning")
    assert "40 of 40 test examples are training examples too" in found["contents"]["found"]
