"""Serves metrics of runs, certificates and nodes to Prometheus.

A service beside the runs, and not a part of their processes: Flower starts a process for each run and for each message,
so theirs would be unreachable in between. It reads run folders, and needs an environment with fedbn-flwr. The first
SuperLink is asked for its nodes, if its certificate is given.

    python deploy/monitoring/metrics.py runs --superlink fl.example.org:8000
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509

from fedbn_flwr.results.folder.places import find_folders
from fedbn_flwr.results.read.runs import STATES, RunState, read_state
from fedbn_flwr.text import printable

_SHOWN = 50  # runs: those that changed last
_KEPT = 5.0  # seconds for which an answer is used again, so that many requests cost no more than one
_REQUEST = 5.0  # seconds that a request or the SuperLink may take
_COMMAND = 60.0  # seconds that `flwr` may take to list the nodes, and between two lists

# All metrics are gauges: a resumed run may continue from an earlier round.
METRICS = {
    "fedbn_run_status": "1 for the status that the run has, 0 for the others",
    "fedbn_run_round": "the last finished round",
    "fedbn_run_rounds": "rounds of the whole run",
    "fedbn_run_accuracy": "accuracy after the last evaluated round",
    "fedbn_run_loss": "loss after the last evaluated round",
    "fedbn_run_clients": "clients whose reply was used in the last round",
    "fedbn_run_clients_expected": "clients of the run",
    "fedbn_run_bytes": "bytes of arrays sent in training so far, by direction",
    "fedbn_run_round_seconds": "seconds that the last round took",
    "fedbn_run_seconds_left": "estimate of the time until the last round",
    "fedbn_run_changed_timestamp_seconds": "when the run last wrote a round or its status",
    "fedbn_certificate_days": "days until a certificate expires",
    "fedbn_superlink_up": "1 if the SuperLink, or a proxy in front of it, accepts TLS connections",
    "fedbn_nodes": "registered SuperNodes, by status: online, offline, or registered if it never was online",
    "fedbn_disk_free_ratio": "share of the disk with the run folders that is free",
}

Sample = tuple[str, dict[str, str], float]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="run folders, or their parent folders")
    superlink = "also whether this SuperLink or proxy accepts connections (several times)"
    parser.add_argument("--superlink", type=_address, action="append", default=[], metavar="HOST:PORT", help=superlink)
    authority = "ca.crt of the first SuperLink: also which of its nodes are online"
    parser.add_argument("--root-certificates", type=Path, metavar="FILE", help=authority)
    parser.add_argument("--certificate", type=Path, action="append", default=[], metavar="FILE", help="also this one")
    parser.add_argument(
        "--listen", type=_address, default="127.0.0.1:8002", metavar="HOST:PORT", help="address to serve at"
    )
    parser.add_argument("--once", action="store_true", help="print the metrics and end, for a textfile collector")
    arguments = parser.parse_args(words)

    def collect() -> str:
        folders = [folder for folder in arguments.folders if folder.is_dir()]  # the first run makes it
        samples = list(samples_of_runs(folders))
        samples += [("fedbn_disk_free_ratio", {"folder": str(folder)}, _free(folder)) for folder in folders]
        samples += map(samples_of_certificate, arguments.certificate)
        for address in dict.fromkeys(arguments.superlink):
            samples += samples_of_server(*address)
        return exposition([*samples, *nodes])

    nodes: list[Sample] = []

    def ask_for_nodes() -> None:
        if arguments.root_certificates and arguments.superlink:
            nodes[:] = samples_of_nodes(*arguments.superlink[0], arguments.root_certificates)

    def watch_nodes() -> None:
        while True:
            ask_for_nodes()
            time.sleep(_COMMAND)

    if arguments.once:
        ask_for_nodes()
        print(collect(), end="")
        return
    for file in arguments.certificate:
        samples_of_certificate(file)  # a wrong path ends the server before its first request
    # It takes seconds, for which no scrape waits.
    threading.Thread(target=watch_nodes, daemon=True).start()
    with make_server(*arguments.listen, collect) as server:
        print(f"metrics: port {server.server_port}, /metrics", flush=True)
        server.serve_forever()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r}; expected HOST:PORT, for instance 127.0.0.1:8002")
    return host.strip("[]") or "127.0.0.1", int(port)


def make_server(host: str, port: int, collect: Callable[[], str]) -> ThreadingHTTPServer:
    lock, kept = threading.Lock(), [-_KEPT, ""]

    def text() -> str:
        with lock:
            if time.monotonic() - kept[0] > _KEPT:
                kept[:] = [time.monotonic(), collect()]
            return kept[1]

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST

        def do_GET(self) -> None:
            if self.path.partition("?")[0].rstrip("/") != "/metrics":
                self.send_error(404, "expected /metrics")
                return
            try:
                body = text().encode()
            except (Exception, SystemExit) as error:  # it may work at the next request
                self.send_error(500, " ".join(str(error).split()).encode("ascii", "replace").decode())
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """No line for every request."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a client that disconnects is no error of this server
                super().handle_error(request, client_address)

    return Server((host, port), Handler)


def exposition(samples: Iterable[Sample]) -> str:
    """The text of an answer: the samples by metric, each with its description."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        by_name.setdefault(name, []).append(f"{name}{{{pairs}}} {value!r}\n")
    return "".join(
        f"# HELP {name} {help_text}\n# TYPE {name} gauge\n{''.join(by_name[name])}"
        for name, help_text in METRICS.items()
        if name in by_name
    )


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def samples_of_runs(folders: Iterable[Path]) -> Iterator[Sample]:
    paths = sorted(find_folders(folders), key=_changed)[-_SHOWN:]
    for path in paths:
        if (state := read_state(path)) is not None:
            summary = state.run.summary
            yield from _samples_of_run(state, {"run": str(path), "experiment": summary.name, "label": summary.label})


def _samples_of_run(state: RunState, labels: dict[str, str]) -> Iterator[Sample]:
    summary, last = state.run.summary, state.run.lines[-1] if state.run.lines else {}
    for status in STATES:
        yield "fedbn_run_status", {**labels, "status": status}, float(state.status == status)
    for direction, count in (("down", summary.traffic.bytes_down), ("up", summary.traffic.bytes_up)):
        yield "fedbn_run_bytes", {**labels, "direction": direction}, float(count)
    figures = {
        "round": summary.rounds,
        "rounds": state.rounds,
        "accuracy": summary.accuracy,
        "loss": summary.loss,
        "clients": last.get("clients"),
        "clients_expected": state.run.config.get("clients"),
        "round_seconds": last.get("seconds"),
        "seconds_left": state.seconds_left,
        "changed_timestamp_seconds": state.changed,
    }
    for key, value in figures.items():
        if value is not None:
            yield f"fedbn_run_{key}", labels, float(value)


def samples_of_certificate(file: Path) -> Sample:
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{str(file)!r} is not a readable PEM certificate: {error}") from None
    return "fedbn_certificate_days", {"certificate": str(file)}, min(map(_days, certificates))


def samples_of_server(host: str, port: int) -> list[Sample]:
    """The certificate that a SuperLink presents, which after a renewal is the old one until it restarts."""
    labels = {"certificate": f"{host}:{port}"}
    up = {"superlink": f"{host}:{port}"}
    try:
        text = ssl.get_server_certificate((host, port), timeout=_REQUEST)  # which is not verified
        days = _days(x509.load_pem_x509_certificate(text.encode()))
    except (OSError, ValueError):
        return [("fedbn_superlink_up", up, 0.0)]
    return [("fedbn_superlink_up", up, 1.0), ("fedbn_certificate_days", labels, days)]


def samples_of_nodes(host: str, port: int, certificate: Path) -> list[Sample]:
    """The number of nodes with each status, as the operator's command shows them; none if the SuperLink is down."""
    with tempfile.TemporaryDirectory() as home:
        link = (
            f"address = {json.dumps(f'{host}:{port}')}\nroot-certificates = {json.dumps(str(certificate.absolute()))}"
        )
        Path(home, "config.toml").write_text(f"[superlink.link]\n{link}\n", encoding="utf-8")
        command = ["flwr", "supernode", "list", "link", "--format", "json"]
        env = {**os.environ, "FLWR_HOME": home}
        try:
            done = subprocess.run(command, env=env, capture_output=True, timeout=_COMMAND)
            counts = Counter(node["status"] for node in json.loads(done.stdout)["nodes"])
        except (OSError, ValueError, LookupError, subprocess.TimeoutExpired):
            return []
    return [
        ("fedbn_nodes", {"status": status}, float(counts[status])) for status in ("online", "offline", "registered")
    ]


def _free(folder: Path) -> float:
    usage = shutil.disk_usage(folder)
    return round(usage.free / usage.total, 4)


def _days(certificate: x509.Certificate) -> float:
    left = certificate.not_valid_after_utc - datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    return round(left.total_seconds() / 86400, 3)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0


if __name__ == "__main__":
    main()
