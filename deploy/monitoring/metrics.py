"""Serves metrics of runs, certificates and nodes to Prometheus.

A service beside the runs, and not a part of their processes: Flower starts a process for each run and for each message,
so theirs would be unreachable in between. It reads run folders, and needs an environment with fedbn-flwr[monitoring].
The first SuperLink is asked for its nodes, if its certificate is given.

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
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry, Metric, generate_latest, start_http_server
from prometheus_client.registry import Collector

from fedbn_flwr.results.folder.places import find_folders
from fedbn_flwr.results.read.runs import STATES, RunState, read_state
from fedbn_flwr.results.text import printable

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


class Samples(Collector):
    """What a call returns whenever Prometheus asks."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self.samples = samples

    def collect(self) -> Iterator[Metric]:
        found = {name: Metric(name, text, "gauge") for name, text in METRICS.items()}
        for name, labels, value in self.samples():
            found[name].add_sample(name, {key: printable(text) for key, text in labels.items()}, value)
        return (metric for metric in found.values() if metric.samples)


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

    @lru_cache(maxsize=1)
    def collected(_: int) -> list[Sample]:
        folders = [folder for folder in arguments.folders if folder.is_dir()]  # the first run makes it
        samples = list(samples_of_runs(folders))
        samples += [("fedbn_disk_free_ratio", {"folder": str(folder)}, _free(folder)) for folder in folders]
        samples += map(samples_of_certificate, arguments.certificate)
        for address in dict.fromkeys(arguments.superlink):
            samples += samples_of_server(*address)
        return samples

    nodes: list[Sample] = []

    def ask_for_nodes() -> None:
        if arguments.root_certificates and arguments.superlink:
            nodes[:] = samples_of_nodes(*arguments.superlink[0], arguments.root_certificates)

    def watch_nodes() -> None:
        while True:
            ask_for_nodes()
            time.sleep(_COMMAND)

    registry = CollectorRegistry()
    registry.register(Samples(lambda: [*collected(int(time.monotonic() / _KEPT)), *nodes]))
    if arguments.once:
        ask_for_nodes()
        print(generate_latest(registry).decode(), end="")
        return
    for file in arguments.certificate:
        samples_of_certificate(file)  # a wrong path ends the server before its first request
    socket.setdefaulttimeout(_REQUEST)
    host, port = arguments.listen
    server, thread = start_http_server(port, host, registry)
    print(f"metrics: port {server.server_port}, /metrics", flush=True)
    # It takes seconds, for which no scrape waits.
    threading.Thread(target=watch_nodes, daemon=True).start()
    thread.join()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r}; expected HOST:PORT, for instance 127.0.0.1:8002")
    return host.strip("[]") or "127.0.0.1", int(port)


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
