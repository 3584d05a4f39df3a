"""`fedbn metrics`: serves metrics of runs and sites to Prometheus.

A service beside the runs, and not a part of their processes: Flower starts a process for each run and for each message,
so theirs would be unreachable in between, and several would need one port. It only reads files.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedbn_flwr.commands.common import Commands, add_command, default_folder
from fedbn_flwr.errors import SettingsError, UserError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

T = TypeVar("T")

_KEPT = 5.0  # seconds for which an answer is used again, so that many requests cost no more than one
_CHECKED = 30.0  # seconds between two connections to the SuperLink
_REQUEST = 5  # seconds that a client may take to send its request


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "metrics",
        metrics,
        summary="serve metrics of runs and sites to Prometheus",
        description=(
            "Serve metrics in Prometheus' text format at http://HOST:PORT/metrics, from run folders and the state "
            "folders of nodes. Training is not affected: the command only reads files."
        ),
        epilog="Example: fedbn metrics runs --superlink fl.example.org:8000",
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="DIR",
        help="run folders, or their parent folders ($FEDBN_OUT or runs; none if --states is given)",
    )  # fmt: skip
    parser.add_argument("--states", type=Path, metavar="DIR", help="state folder of a node, for metrics of the site")
    parser.add_argument(
        "--superlink", metavar="HOST:PORT", help="also whether it accepts connections, and its certificate"
    )
    parser.add_argument(
        "--certificate", type=Path, action="append", default=[], metavar="FILE", help="also this one, such as ca.crt"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="address to serve at ($FEDBN_METRICS_ADDRESS or 127.0.0.1:8002)"
    )
    parser.add_argument("--once", action="store_true", help="print the metrics and end, for a textfile collector")


def metrics(arguments: argparse.Namespace) -> None:
    text = _collector(arguments)
    if arguments.once:
        print(text(), end="")
        return
    variable = os.environ.get("FEDBN_METRICS_ADDRESS")
    address = arguments.listen or variable or "127.0.0.1:8002"
    host, port = _address(address, "--listen" if arguments.listen else "FEDBN_METRICS_ADDRESS")
    try:
        server = make_server(host, port, text)
    except OSError as error:
        raise UserError(f"cannot serve at {address}: {error.strerror}") from None
    with server:
        print(f"metrics: http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics", flush=True)
        server.serve_forever()


def make_server(host: str, port: int, text: Callable[[], str]) -> ThreadingHTTPServer:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST

        def do_GET(self) -> None:
            if self.path.partition("?")[0].rstrip("/") != "/metrics":
                self.send_error(404, "expected /metrics")
                return
            try:
                body = text().encode()
            except Exception as error:  # a folder that cannot be read now may be readable at the next request
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


def _collector(arguments: argparse.Namespace) -> Callable[[], str]:
    """A function that returns the current text."""
    from .samples import (
        Sample,
        exposition,
        samples_of_certificate,
        samples_of_runs,
        samples_of_server,
        samples_of_site,
    )

    folders = arguments.folders or ([] if arguments.states else [default_folder()])
    states = arguments.states
    if states and (arguments.once or states.exists()) and not os.access(states, os.R_OK | os.X_OK):
        raise UserError(f"--states: {str(states)!r} does not exist, or this user cannot read it")
    superlink = _address(arguments.superlink, "--superlink") if arguments.superlink else None

    def of_server() -> list[Sample]:
        assert superlink is not None
        return samples_of_server(*superlink)

    server = _kept(of_server, _CHECKED)

    def collect() -> str:
        samples = list(samples_of_runs(folder for folder in folders if folder.is_dir()))  # the first run makes it
        if states:
            samples += samples_of_site(states)
        samples += map(samples_of_certificate, arguments.certificate)
        if superlink is not None:
            samples += server()
        return exposition(samples)

    return _kept(collect, _KEPT)


def _kept(function: Callable[[], T], seconds: float) -> Callable[[], T]:
    """The function, whose value is used again for some seconds; one thread computes it."""
    lock = threading.Lock()
    kept: list[tuple[float, T]] = []

    def call() -> T:
        with lock:
            if not kept or time.monotonic() - kept[0][0] > seconds:
                kept[:] = [(time.monotonic(), function())]
            return kept[0][1]

    return call


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        raise SettingsError(f"{option} is {text!r}; expected HOST:PORT, for instance 127.0.0.1:8002")
    return host.strip("[]") or "127.0.0.1", int(port)
