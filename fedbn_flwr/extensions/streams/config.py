"""The operator's settings of the exchange service, from the ServerApp's environment.

On real nodes, an exchange through Flower's messages takes seconds. If the operator sets an address at which clients can
reach the ServerApp, clients exchange by gRPC calls to it instead, which take one network round trip. The address
belongs to the deployment: an experiment cannot set it.

| variable | meaning |
|---|---|
| `FEDBN_EXCHANGE_ADDRESS` | `HOST:PORT` to which clients connect; if unset, messages are used |
| `FEDBN_EXCHANGE_LISTEN` | `HOST:PORT` to listen on; by default the address if it is loopback, else all interfaces |
| `FEDBN_EXCHANGE_CERTIFICATE`, `FEDBN_EXCHANGE_KEY` | PEM files: certificate for the address's host, and its key |
| `FEDBN_EXCHANGE_CA` | PEM file of the authority that clients must trust; if unset, they use their root certificates |

On loopback a certificate is optional.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.exchange.carriers import MakeExchanges

PREFIX = "FEDBN_EXCHANGE_"


@dataclass(frozen=True)
class ExchangeConfig:
    """The address of the exchange service and its certificate; see the module's table."""

    address: str
    listen: str = ""
    certificate: str = ""
    key: str = ""
    ca: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ExchangeConfig | None:
        """The settings in the ServerApp's environment; None if it contains no address."""
        given = {field.name: environment.get(PREFIX + field.name.upper(), "").strip() for field in fields(cls)}
        return cls(**given) if given["address"] else None

    @property
    def listens_on(self) -> str:
        if self.listen:
            return self.listen
        host, _, port = self.address.rpartition(":")
        return self.address if is_loopback(host) else f"0.0.0.0:{port}"

    def prepare(self) -> None:
        """Raise SettingsError if exchanges would be unsafe or impossible."""
        for name, value in (("ADDRESS", self.address), ("LISTEN", self.listens_on)):
            host, _, port = value.rpartition(":")
            if not host or not (port.isdecimal() and len(port) < 6 and int(port) < 2**16):
                raise SettingsError(f"{PREFIX}{name} is {value!r}; expected HOST:PORT")
        if bool(self.certificate) != bool(self.key):
            raise SettingsError(f"{PREFIX}CERTIFICATE and {PREFIX}KEY must both be set; only one is")
        local = all(is_loopback(value.rpartition(":")[0]) for value in (self.address, self.listens_on))
        if not (self.certificate or local):
            raise SettingsError(
                f"{PREFIX}ADDRESS is {self.address!r}, which is not on this machine, but there is no certificate: set "
                f"{PREFIX}CERTIFICATE and {PREFIX}KEY (deploy/keys.sh creates them)"
            )
        for name in ("certificate", "key", "ca"):
            self.read(name)

    def read(self, name: str) -> bytes | None:
        """The content of a file that a variable names; None if it is not set."""
        if not (path := getattr(self, name)):
            return None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which cannot be read: {error.strerror}") from None
        if b"-----BEGIN" not in content:
            raise SettingsError(f"{PREFIX}{name.upper()} is {path!r}, which is not a PEM file")
        return content


def service() -> MakeExchanges | None:
    """The function that makes carriers for the service in the environment; None if there is no address."""
    if (config := ExchangeConfig.from_environment()) is None:
        return None
    config.prepare()
    # Imported here, because the module imports this one.
    return functools.partial(pkgutil.resolve_name(f"{__package__}.server:StreamCarrier"), config)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")
