"""Checks what a site needs to connect to a SuperLink: its key, the certificates, and the server itself.

Every check returns a `Check` and raises nothing; each wait has a bound.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

_SOON = 30  # days in which a certificate should be renewed
_BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE  # seconds that a node's clock may be late
_NEW_KEY = "give the file node.key that deploy/keys.sh created for this site"


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    cure: str = ""  # what to do, unless the status is ok


def check_key(file: Path) -> Check:
    """Whether a node's private key can be used, and by this user only."""

    def failed(found: str, cure: str) -> Check:
        return Check("key", "failed", f"{file}: {found}", cure)

    try:
        content = file.read_bytes()
    except OSError as error:
        return failed(
            error.strerror or "not readable", "copy the site's folder from deploy/keys of the server, for this user"
        )
    try:
        key = load_ssh_private_key(content, password=None)  # as the SuperNode reads it
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = str(error).split(". ")[0].split("\n")[0]
        return failed(f"no private key of ssh-keygen without a passphrase ({reason})", _NEW_KEY)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return failed("not an elliptic-curve key, which the SuperNode needs", _NEW_KEY)
    if by := readable_by(file):
        return failed(f"readable by {by}", f"chmod 600 {file}; if they may have read it, have the node's key replaced")
    return Check("key", "ok", f"{file}: {key.curve.name}, readable by its owner only")


def readable_by(file: Path) -> str:
    """The other users who can read a file: its mode and those of all folders above it permit it."""
    folders = [parent.stat().st_mode for parent in file.resolve().parents]
    mode = file.stat().st_mode
    classes = {"all users": (stat.S_IROTH, stat.S_IXOTH), "its group": (stat.S_IRGRP, stat.S_IXGRP)}
    for name, (reading, passing) in classes.items():
        if mode & reading and all(folder & (passing | stat.S_IXOTH) for folder in folders):
            return name
    return ""


def check_authority(file: Path) -> Check:
    """Whether the certificates of a file with root certificates are valid, and for how long."""
    name = "root certificate"
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except OSError as error:
        return Check(name, "failed", f"{file}: {error.strerror}", "copy ca.crt from the server's deploy/keys")
    except ValueError:
        return Check(name, "failed", f"{file}: not a PEM certificate", "copy ca.crt from the server")
    first = min(certificates, key=lambda each: each.not_valid_after_utc)
    return _validity(name, first, str(file), "have the operator of the server create a new authority")


def check_server(address: str, authority: Path | None, timeout: float, *, insecure: bool = False) -> list[Check]:
    """Whether a SuperLink can be reached at HOST:PORT, and whether its certificate is valid for that host."""

    def failed(found: str, cure: str) -> list[Check]:
        return [Check("server", "failed", found, cure)]

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) >= 2**16:
        return failed(f"the address is {address!r}", "give HOST:PORT, as fl.example.org:8000")
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except (socket.gaierror, UnicodeError):  # the latter for what cannot be a name: a..b
        return failed(f"the name {host!r} is unknown here", "check the name, and DNS at this site")
    except TimeoutError:
        return failed(
            f"{address} does not answer within {timeout:g} s",
            f"let this machine connect to port {port}: a firewall drops it, or the server is off",
        )
    except OSError as error:
        return failed(f"{address}: {error.strerror or str(error)}", "start the SuperLink; check the port")
    if insecure:
        return [Check("server", "warning", f"{address} accepts connections", "use TLS unless this is the same machine")]
    try:
        context = ssl.create_default_context(cafile=str(authority) if authority else None)
    except OSError:
        return failed(f"{address} cannot be verified", "correct the root certificate first")
    with contextlib.closing(HTTPSConnection(host, int(port), timeout=timeout, context=context)) as connection:
        try:
            connection.connect()
        except ssl.SSLError as error:
            return failed(*_tls_problem(error, host, int(port), timeout, authority))
        except OSError as error:
            return failed(f"{address} ends the connection: {error}", "check that a SuperLink listens there")
        certificate = x509.load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"")
        health = _health(address, connection)
    renew = "have the operator renew it: deploy/keys.sh --add, then restart the SuperLink"
    return [*health, _validity("server certificate", certificate, f"for {', '.join(_names(certificate))}", renew)]


def _health(address: str, connection: HTTPSConnection) -> list[Check]:
    asked = time.time()
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
    except (OSError, HTTPException) as error:
        return [
            Check(
                "server", "warning", f"{address} has TLS, but answers no HTTP request ({error})",
                "check that this is the SuperLink's port (8000), not that of the exchange service",
            )
        ]  # fmt: skip
    # A reverse proxy may offer only the paths of sites, which are below /v1/fleet/.
    what = "a SuperLink, with TLS" if answer.status == 200 else f"TLS, and an HTTP server (status {answer.status})"
    checks = [Check("server", "ok", f"{address}: {what}")]
    with contextlib.suppress(TypeError, ValueError):  # without a date
        checks.append(_clock(asked - parsedate_to_datetime(answer.headers["Date"]).timestamp()))
    return checks


def _clock(ahead: float) -> Check:
    """Whether a SuperLink accepts the times that the node signs; `ahead` is up to 2 s too large, as dates are late."""
    found = f"this machine's clock is about {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if -_BEHIND < ahead < SYSTEM_TIME_TOLERANCE:
        return Check("clock", "ok", found)
    rejected = ahead - 2 >= SYSTEM_TIME_TOLERANCE or ahead <= -_BEHIND
    limits = f"a SuperLink rejects a node {SYSTEM_TIME_TOLERANCE} s ahead or {_BEHIND} s behind"
    return Check("clock", "failed" if rejected else "warning", f"{found}; {limits}", "set both clocks by NTP")


def _tls_problem(error: ssl.SSLError, host: str, port: int, timeout: float, authority: Path | None) -> tuple[str, str]:
    """What is wrong with a server's TLS, and the cure."""
    address, text = f"{host}:{port}", str(error)
    code = getattr(error, "verify_code", None)
    if isinstance(error, ssl.SSLCertVerificationError):
        if code in (62, 64) or "doesn't match" in text or "mismatch" in text:
            names = "other names"
            with contextlib.suppress(OSError, ValueError):
                names = ", ".join(_names(presented(host, port, timeout))) or names
            return (
                f"the certificate of {address} is not for {host!r} but for {names}",
                f"connect by one of these names, or have the operator add it: deploy/keys.sh --add {host}",
            )
        if code == 10:
            return (
                f"the certificate of {address} has expired",
                "have the operator renew it: deploy/keys.sh --add, then restart the SuperLink",
            )
        trusted = str(authority) if authority else "the system's root certificates"
        return (
            f"the certificate of {address} is not signed by {trusted}",
            "get ca.crt from the operator again; if it was right, another server answers at this address",
        )
    if "WRONG_VERSION_NUMBER" in text or "record layer" in text:
        return f"{address} has no TLS", "check the port; the SuperLink needs its certificates (deploy/keys.sh)"
    return f"{address}: TLS failed ({text.split('] ')[-1]})", "check that this is the SuperLink's address"


def presented(host: str, port: int, timeout: float) -> x509.Certificate:
    """The certificate that a server presents, which is not verified."""
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port), timeout=timeout).encode())


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    found = [str(each) for each in names.get_values_for_type(x509.DNSName)]
    return found + [str(each) for each in names.get_values_for_type(x509.IPAddress)]


def _validity(name: str, certificate: x509.Certificate, where: str, cure: str) -> Check:
    now = datetime.datetime.now(datetime.UTC)
    end, begin = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if begin > now:
        found = f"{where}: valid only from {begin:%Y-%m-%d %H:%M} UTC"
        return Check(name, "failed", found, f"set this machine's clock, which says {now:%Y-%m-%d %H:%M} UTC")
    if end < now:
        return Check(name, "failed", f"{where}: expired on {end:%Y-%m-%d}", cure)
    days = (end - now).days
    found = f"{where}: valid until {end:%Y-%m-%d} ({days} days)"
    return Check(name, "warning", found, cure) if days < _SOON else Check(name, "ok", found)


def check_writable(folder: Path) -> Check:
    """Whether the node's state folder can be written to, and the space in it."""
    there = folder = folder.expanduser()
    while not there.exists():  # the client creates what is missing
        there = there.parent
    probe = there / f".fedbn-check-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return Check(
            "state folder", "failed", f"{folder}: {error.strerror}",
            "create it, for the user who runs the ClientApp (uid 49999 in the containers)",
        )  # fmt: skip
    return Check("state folder", "ok", f"{folder}: can be written to")
