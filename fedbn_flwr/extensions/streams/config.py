"""The operator's settings of the exchange service, from the ServerApp's environment.

An exchange through Flower's messages takes seconds on real nodes. If the operator sets an address at which clients can
reach the ServerApp, each client opens a gRPC stream for the exchanges of a round, and an exchange takes one network
round trip. The address belongs to the deployment: an experiment cannot set it.

| variable | meaning |
|---|---|
| `FEDBN_EXCHANGE_ADDRESS` | `HOST:PORT` to which clients connect; if unset, messages are used |
| `FEDBN_EXCHANGE_LISTEN` | `HOST:PORT` to listen on; by default the address if it is loopback, else all interfaces |
| `FEDBN_EXCHANGE_CERTIFICATE`, `FEDBN_EXCHANGE_KEY` | PEM files: certificate for the address's host, and its key |
| `FEDBN_EXCHANGE_CA` | PEM file of the authority that clients must trust; if unset, they use their root certificates |
| `FEDBN_EXCHANGE_INSECURE` | `1`: no TLS for connections from other machines |
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from logging import WARNING
from pathlib import Path

from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.exchange.carriers import RoundCarrier, RoundMessages

PREFIX = "FEDBN_EXCHANGE_"
METHOD = "/fedbn.Exchange/Stream"
TOKEN = "fedbn-token"  # key of the call's metadata  # noqa: S105 (the name of a header)
ACCEPTED = "fedbn-accepted"  # key in the metadata of the answer to an accepted call

# Pings detect a lost machine within half a minute.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the timeout that applies; one minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True)
class ExchangeConfig:
    """The address of the exchange service and its certificate; see the module's table."""

    address: str
    listen: str = ""
    certificate: str = ""
    key: str = ""
    ca: str = ""
    insecure: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ExchangeConfig | None:
        """The settings in the ServerApp's environment; None if it contains no address."""
        environment = os.environ if environment is None else environment
        given = {key: value.strip() for key, value in environment.items() if key.startswith(PREFIX) and value.strip()}
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        for key in given:
            if key not in known:
                raise SettingsError(
                    f"{key} in the environment is not a setting of the exchange; {did_you_mean(key, known)}"
                )
        if PREFIX + "ADDRESS" not in given:
            return None
        insecure = given.pop(PREFIX + "INSECURE", "0").lower()
        if insecure not in ("0", "1", "false", "true"):
            raise SettingsError(f"{PREFIX}INSECURE is {insecure!r}; expected 1 or 0")
        named = {known[key]: value for key, value in given.items()}
        config = cls(**named, insecure=insecure in ("1", "true"))
        config.check()
        return config

    def carrier(self, grid: Grid, about: RoundMessages, timeout: float) -> RoundCarrier:
        # By name: the module imports gRPC, and this one.
        made: RoundCarrier = pkgutil.resolve_name(f"{__package__}.carrier:StreamCarrier")(self, grid, about, timeout)
        return made

    @property
    def encrypted(self) -> bool:
        return bool(self.certificate)

    @property
    def open_to_others(self) -> bool:
        """Whether exchanges leave this machine without TLS."""
        return not (self.encrypted or is_loopback(split_address(self.address)[0]))

    @property
    def listens_on(self) -> str:
        if self.listen:
            return self.listen
        host, port = split_address(self.address)
        return self.address if is_loopback(host) else f"0.0.0.0:{port}"

    def prepare(self) -> None:
        self.check()
        if self.open_to_others:
            log(
                WARNING,
                "the exchange service at %s has no TLS: third parties can read and change exchanges",
                self.address,
            )

    def check(self) -> None:
        """Raise SettingsError if exchanges would be unsafe or impossible."""
        for name, value in (("ADDRESS", self.address), ("LISTEN", self.listens_on)):
            host, port = split_address(value)
            if not host or not (port.isdecimal() and len(port) < 6 and int(port) < 2**16):
                raise SettingsError(f"{PREFIX}{name} is {value!r}; expected HOST:PORT")
        if bool(self.certificate) != bool(self.key):
            raise SettingsError(f"{PREFIX}CERTIFICATE and {PREFIX}KEY must both be set; only one is")
        if self.insecure and self.encrypted:
            raise SettingsError(f"{PREFIX}INSECURE contradicts {PREFIX}CERTIFICATE; leave one of them out")
        local = all(is_loopback(split_address(value)[0]) for value in (self.address, self.listens_on))
        if not (self.encrypted or self.insecure or local):
            raise SettingsError(
                f"{PREFIX}ADDRESS is {self.address!r}, not on this machine, and there is no certificate: set "
                f"{PREFIX}CERTIFICATE and {PREFIX}KEY (deploy/keys.sh creates them), or {PREFIX}INSECURE=1"
            )
        for name in ("certificate", "key", "ca"):
            self.read(name)

    def read(self, name: str) -> bytes | None:
        """The content of one of the files; None if it is not set."""
        path = getattr(self, name)
        if not path:
            return None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which cannot be read: {error.strerror}") from None
        if b"-----BEGIN" not in content:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which is not a PEM file")
        return content


def split_address(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host, port


def is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")
