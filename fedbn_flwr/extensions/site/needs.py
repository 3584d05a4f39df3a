"""Checks what a site needs: its key, the certificates, the server, versions, data and GPU. `fedbn check` prints them.

A check yields its answers, and may end with an error, which `asked` turns into an answer. No wait is unlimited.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import shutil
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, RecordDict

from fedbn_flwr import __version__, named
from fedbn_flwr.data.disclosed import check_number
from fedbn_flwr.errors import FedbnError
from fedbn_flwr.exchange.step import check_batch
from fedbn_flwr.experiment.node import ClientParts, min_batch_of, own_training
from fedbn_flwr.experiment.parts import choose_device, make_model
from fedbn_flwr.experiment.prepare import make_rule, try_model
from fedbn_flwr.experiment.settings import Experiment, Settings
from fedbn_flwr.internals import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.storage import check_rights, writing

from .findings import describe, doubts

_TIMEOUT = 5  # seconds
_LITTLE = 1e9  # bytes of a disk
_SOON = 30  # days in which a certificate should be renewed
_BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE  # seconds that a node's clock may be behind
_RESTART = "docker compose restart proxy, and between two runs superlink superexec-serverapp"
_NEW_KEY = "give the file node.key that deploy/keys.sh created for this site"


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warning or FAILED
    found: str
    cure: str = ""  # what to do, which is shown unless the status is ok


class Failed(Exception):
    """Ends a check with what was found, and perhaps a cure for this case."""


def asked(name: str, answers: Iterable[Check], cure: str) -> Iterator[Check]:
    """The check's answers. If it ends with an error, the last answer describes it and suggests `cure`."""
    try:
        yield from answers
    except Failed as failed:
        found, *own = failed.args
        yield Check(name, "FAILED", found, *own or [cure])
    except FileNotFoundError as error:
        yield Check(name, "FAILED", f"{error.filename}: there is no such file", cure)
    except (OSError, FedbnError) as error:
        yield Check(name, "FAILED", str(error), cure)


def check_key(file: Path, *, insecure: bool = False) -> Iterator[Check]:
    """Whether a node's private key is valid, and whether only its owner can read it."""
    if insecure:
        raise Failed(
            "flower-supernode refuses a key with --insecure", "give --root-certificates in place of --insecure"
        )
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)  # as the SuperNode reads it
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = str(error).split(". ")[0].split("\n")[0]
        raise Failed(f"{file}: not a private key from ssh-keygen without a passphrase ({reason})", _NEW_KEY) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Failed(f"{file}: not an elliptic-curve key, which the SuperNode needs", _NEW_KEY)
    if stat.S_IMODE(mode := file.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        cure = f"run chmod 600 {file}; if others may have read it, have the node's key replaced"
        raise Failed(f"{file}: other users have access to it ({stat.filemode(mode)})", cure)
    yield Check("key", "ok", f"{file}: {key.curve.name}, only for its owner")


def check_authority(file: Path) -> Iterator[Check]:
    """Whether the root certificates in a file are valid, and for how long."""
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except ValueError:
        raise Failed(f"{file}: not a PEM certificate") from None
    first = min(certificates, key=lambda certificate: certificate.not_valid_after_utc)
    yield _validity("root certificate", first, str(file), "have the operator of the server create a new authority")


def check_server(address: str, authority: Path | None, *, insecure: bool = False) -> Iterator[Check]:
    """Whether a SuperLink can be reached at HOST:PORT, and whether its certificate is valid for that host."""
    host, port = _host_and_port(address)
    if insecure:
        connection = HTTPConnection(host, port, timeout=_TIMEOUT)
    else:
        context = ssl.create_default_context(cafile=str(authority) if authority else None)
        proxy = urlsplit("" if proxy_bypass(host) else getproxies().get("https", ""))  # as the SuperNode's
        connection = HTTPSConnection(proxy.hostname or host, proxy.port or port, timeout=_TIMEOUT, context=context)
        if proxy.hostname:
            connection.set_tunnel(host, port)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise _tls_problem(error, address) from None
        except (OSError, UnicodeError) as error:
            cure = "check host and port (8443 for sites) and the firewall; ask the operator whether the server runs"
            raise _unreachable(error, address, cure) from None
        der = None if insecure else connection.sock.getpeercert(binary_form=True)  # type: ignore[union-attr]
        yield from _health(address, connection, insecure=insecure)
    if der is not None:
        renew = f"have the operator renew it: deploy/keys.sh --add --nodes N for N sites, then {_RESTART}"
        yield _validity("server certificate", x509.load_der_x509_certificate(der), f"of {address}", renew)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        raise Failed(f"the address is {address!r}", "give HOST:PORT, such as fl.example.org:8443")
    return host, int(port)


def _unreachable(error: Exception, address: str, cure: str) -> Failed:
    if isinstance(error, socket.gaierror | UnicodeError):  # UnicodeError for an impossible name: a..b
        host = address.rpartition(":")[0]
        return Failed(f"this machine cannot resolve the name {host!r}", "check the name, and DNS at this site")
    why = (
        f"does not answer within {_TIMEOUT} s" if isinstance(error, TimeoutError) else getattr(error, "strerror", error)
    )
    return Failed(f"{address}: {why or error}", cure)


def _health(address: str, connection: HTTPConnection, *, insecure: bool) -> Iterator[Check]:
    begin = time.time()
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if insecure and answer.status == 400:  # of a reverse proxy that expects TLS
            raise HTTPException("status 400")
    except (OSError, HTTPException) as error:
        if insecure:
            cure = "give --root-certificates in place of --insecure, or correct the port"
            raise Failed(f"{address} does not answer HTTP requests without TLS ({error})", cure) from None
        found = f"{address} has TLS, but does not answer HTTP requests ({error})"
        cure = "check that this is the port for sites (8443), not that of the exchange service"
        yield Check("server", "warning", found, cure)
        return
    # A reverse proxy may offer only the paths of sites, which are below /v1/fleet/.
    what = "a SuperLink, with TLS" if answer.status == 200 else f"TLS, and an HTTP server (status {answer.status})"
    what, status = ("no TLS", "warning") if insecure else (what, "ok")
    yield Check("server", status, f"{address}: {what}", "use TLS unless this is the same machine")
    with contextlib.suppress(TypeError, ValueError):  # the answer has no date
        yield _clock(begin - parsedate_to_datetime(answer.headers["Date"]).timestamp())
    with contextlib.suppress(OSError, HTTPException, ValueError, LookupError, TypeError):  # a proxy may not offer it
        connection.request("GET", "/openapi.json")
        yield from _flower(str(json.load(connection.getresponse())["info"]["version"]))


def _flower(of_server: str) -> Iterator[Check]:
    """Compare Flower's versions here and at the server: a SuperNode that is too old tries to connect forever."""
    here = importlib.metadata.version("flwr")
    status = "ok" if of_server.split(".")[:2] == here.split(".")[:2] else "warning"
    cure = f"the node may never connect: install flwr=={of_server}, or the image of that version"
    yield Check("Flower", status, f"{here} here, {of_server} at the server", cure)


def _clock(ahead: float) -> Check:
    """Whether a SuperLink accepts the times that the node signs. `ahead` may be 2 s too large, as dates arrive late."""
    found = f"this machine's clock is about {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    rejected = ahead - 2 >= SYSTEM_TIME_TOLERANCE or ahead <= -_BEHIND
    status = "FAILED" if rejected else "ok" if ahead < SYSTEM_TIME_TOLERANCE else "warning"
    limits = f"a SuperLink rejects a node {SYSTEM_TIME_TOLERANCE} s ahead or {_BEHIND} s behind"
    return Check("clock", status, found, f"set both clocks by NTP: {limits}")


def _tls_problem(error: ssl.SSLError, address: str) -> Failed:
    if isinstance(error, ssl.SSLCertVerificationError):
        cure = (
            "connect by a name in the certificate, or have the operator add it or renew the certificate "
            f"(deploy/keys.sh --add --nodes N NAME for N sites, then {_RESTART}); or get ca.crt again"
        )
        return Failed(f"the certificate of {address} is not accepted: {error.verify_message}", cure)
    if "WRONG_VERSION_NUMBER" in str(error) or "record layer" in str(error):
        return Failed(f"{address} has no TLS", "check the port; the SuperLink needs its certificates (deploy/keys.sh)")
    return Failed(f"{address}: TLS failed ({str(error).split('] ')[-1]})", "check that this is the SuperLink's address")


def _validity(name: str, certificate: x509.Certificate, where: str, cure: str) -> Check:
    now = datetime.datetime.now(datetime.UTC)
    end, begin = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if begin > now:
        clock = f"set this machine's clock, which says {now:%Y-%m-%d %H:%M} UTC"
        raise Failed(f"{where}: valid only from {begin:%Y-%m-%d %H:%M} UTC", clock)
    if end < now:
        raise Failed(f"{where}: expired on {end:%Y-%m-%d}", cure)
    days = (end - now).days
    found = f"{where}: valid until {end:%Y-%m-%d} ({days} days)"
    return Check(name, "warning" if days < _SOON else "ok", found, cure)


def check_exchange_service(address: str) -> Iterator[Check]:
    """Whether FedTAN's exchange service can be reached. It is open only during the exchanges of a round."""
    host, port = _host_and_port(address)
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT).close()
        found = "answers"
    except ConnectionRefusedError:
        found = "can be reached, and is closed now: it is open only during FedTAN's exchanges"
    except (OSError, UnicodeError) as error:
        cure = f"let the app's container connect to port {port}; or direct: false"
        raise _unreachable(error, address, cure) from None
    yield Check("exchange service", "ok", f"{address} {found}")


def check_versions() -> Iterator[Check]:
    """The versions of Python and of the packages on which server and sites must agree."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("flwr", "torch", "torchvision")]
    ours = f"fedbn-flwr {__version__}"  # not installed in a container: its code is mounted
    yield Check("versions", "ok", ", ".join([f"python {platform.python_version()}", ours, *versions]))


def check_node_config(node: Config) -> Iterator[Check]:
    min_batch_of(node)
    own_training(Settings(), 0, node)
    yield from ()


def check_state(folder: Path) -> Iterator[Check]:
    """Whether the node's state folder can be written to."""
    # The client creates what is missing below it.
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    with writing(folder):
        tempfile.TemporaryFile(dir=there).close()
    free = shutil.disk_usage(there).free
    found = f"{folder}: can be written to, {free / 1e9:.1f} GB free"
    cure = "make room: a state is as large as the arrays that the client keeps"
    yield Check("state folder", "warning" if free < _LITTLE else "ok", found, cure)


def check_data(experiment: Experiment | None, node: Config) -> Iterator[Check]:
    """Whether the site's data can be read and fit the experiment, without which nobody knows how to read them."""
    if "data-path" in node:
        folder = named.path_of(given := str(node["data-path"]))
        check_rights(folder, *folder.rglob("*"))
        if not folder.exists():
            raise Failed(f"data-path={given!r}: there is no such file or folder")
        if experiment is None:
            yield Check("data", "ok", f"{given}: can be read; name the experiment too, to check the data for it")
    for run in experiment.runs if experiment is not None else ():
        yield from _data_of_run(run, node)


def _data_of_run(run: Settings, node: Config) -> Iterator[Check]:
    run = run.model_copy(update={"engine": run.engine.model_copy(update={"device": "cpu"})})
    parts = ClientParts.of(run, Context(run_id=0, node_id=0, node_config=dict(node), state=RecordDict(), run_config={}))
    dataset, (train, test) = parts.dataset, parts.rows
    splits, where = (dataset.train.select(train), dataset.test.select(test)), node.get("data-path", run.data.name)
    yield Check("data", "ok", f"{where}: {describe(dataset, *splits, run.data.ranges)}")
    for found, cure in doubts(dataset, *splits, is_own="data-path" in node):
        yield Check("contents", "warning", f"{where}: {found}", cure)
    try_model(run, make_model(run, dataset), dataset, torch.device("cpu"))
    yield Check("experiment", "ok", f"{run.name}: {run.model.name} takes these examples")
    if min_batch := make_rule(run).traits.min_batch:
        examples = min(run.train.batch_size, len(parts.split[0]))
        check_batch(examples, min_batch=min_batch, own_min_batch=parts.min_batch)
        yield Check(
            "exchange", "ok", f"batches of {examples} examples; at least {max(min_batch, parts.min_batch)} needed"
        )
    if parts.sends_sums:
        check_number(splits[0], parts.min_batch)


def check_gpu(experiment: Experiment | None, node: Config) -> Iterator[Check]:
    for run in experiment.runs if experiment is not None else ():
        choose_device(str(node.get("device", run.engine.device)))
    found = "none: the client trains on the CPU"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found = f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    yield Check("GPU", "ok", found)
