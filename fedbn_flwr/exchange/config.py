"""The address of the exchange service: what the operator of a deployment sets.

One exchange through Flower's messages takes seconds on real nodes. Where the operator gives the ServerApp an
address at which its clients can reach it, each keeps a gRPC stream open for the length of a round's exchanges, and an
exchange takes a network round trip. This is a property of the deployment, which no experiment can set.

| variable | what |
|---|---|
| `FEDBN_EXCHANGE_ADDRESS` | `HOST:PORT` that clients connect to; without it messages are used |
| `FEDBN_EXCHANGE_LISTEN` | `HOST:PORT` to listen on; by default the address if it is loopback, else all interfaces |
| `FEDBN_EXCHANGE_CERTIFICATE`, `FEDBN_EXCHANGE_KEY` | PEM files: certificate for the address's host, and its key |
| `FEDBN_EXCHANGE_CA` | PEM file of the authority that clients must trust; without it they use their own |
| `FEDBN_EXCHANGE_INSECURE` | `1`: no TLS beyond loopback |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fedbn_flwr.errors import SettingsError, did_you_mean

PREFIX = "FEDBN_EXCHANGE_"
METHOD = "/fedbn.Exchange/Stream"
TOKEN = "fedbn-token"  # key of the call's metadata
ACCEPTED = "fedbn-accepted"  # key of the metadata that an accepted call is answered with

# With pings a lost machine at the other end is noticed within half a minute.
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
        """The settings in the ServerApp's environment; None where it names no address."""
        environment = os.environ if environment is None else environment
        given = {key: value.strip() for key, value in environment.items() if key.startswith(PREFIX) and value.strip()}
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        for key in given:
            if key not in known:
                raise SettingsError(
                    f"{key} in the environment is no setting of the exchange; {did_you_mean(key, known)}"
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

    @property
    def encrypted(self) -> bool:
        return bool(self.certificate)

    @property
    def open_to_others(self) -> bool:
        """Exchanges travel beyond this machine without TLS."""
        return not (self.encrypted or is_loopback(split_address(self.address)[0]))

    @property
    def listens_on(self) -> str:
        if self.listen:
            return self.listen
        host, port = split_address(self.address)
        return self.address if is_loopback(host) else f"0.0.0.0:{port}"

    def check(self) -> None:
        """Raise SettingsError where exchanges would not be safe, or not possible."""
        for name, value in (("ADDRESS", self.address), ("LISTEN", self.listens_on)):
            host, port = split_address(value)
            if not host or not (port.isdecimal() and int(port) < 2**16):
                raise SettingsError(f"{PREFIX}{name} is {value!r}; expected HOST:PORT")
        if bool(self.certificate) != bool(self.key):
            raise SettingsError(f"{PREFIX}CERTIFICATE and {PREFIX}KEY belong together; found one of them")
        if self.insecure and self.encrypted:
            raise SettingsError(f"{PREFIX}INSECURE contradicts {PREFIX}CERTIFICATE; leave one of them out")
        local = all(is_loopback(split_address(value)[0]) for value in (self.address, self.listens_on))
        if not (self.encrypted or self.insecure or local):
            raise SettingsError(
                f"{PREFIX}ADDRESS is {self.address!r}, beyond this machine, and there is no certificate: give "
                f"{PREFIX}CERTIFICATE and {PREFIX}KEY (deploy/keys.sh makes them), or say {PREFIX}INSECURE=1"
            )
        for name in ("certificate", "key", "ca"):
            self.read(name)

    def read(self, name: str) -> bytes | None:
        """The content of one of the files; None where it is not given."""
        path = getattr(self, name)
        if not path:
            return None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which cannot be read: {error.strerror}") from None
        if b"-----BEGIN" not in content:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which is no PEM file")
        return content


def split_address(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host, port


def is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")
