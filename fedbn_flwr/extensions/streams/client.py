"""A client's side of the exchange over streams: one stream for one round, to which the train message's keys lead."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import Agreement, Contribution

from .config import ACCEPTED, KEEPALIVE, METHOD, TOKEN
from .wire import agreement_from_bytes, to_bytes

DIRECT = "fedbn.direct"
DIRECT_TOKEN = "fedbn.direct-token"  # noqa: S105 (the name of a key)
DIRECT_CA = "fedbn.direct-ca"
DIRECT_INSECURE = "fedbn.direct-insecure"
DIRECT_TIMEOUT = "fedbn.direct-timeout"

CONNECT_SECONDS = 30
SLACK_SECONDS = 15  # that a client waits beyond the server's time limit


class Streams(ClientRule):
    """Opens a stream for the exchanges of a round."""

    keys = {
        DIRECT: Key("`HOST:PORT`", "run the exchanges of this `train` message on a stream to this address"),
        DIRECT_TOKEN: Key("text", "authenticate by this token, valid for one stream of one node in one round"),
        DIRECT_CA: Key("PEM", "trust this certificate authority; without it, the client's default ones"),
        DIRECT_INSECURE: Key("true", "connect without TLS"),
        DIRECT_TIMEOUT: Key("float", "fail if an exchange takes more than this number of seconds"),
    }

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with ExchangeStream(ExchangeAddress.from_config(self.local.config)) as stream:
            self.local.exchange = stream.exchange
            yield


@dataclass(frozen=True)
class ExchangeAddress:
    """How to connect to the exchange service, from the server's train message."""

    address: str
    token: str
    ca: str | None  # None: this machine's own root certificates
    insecure: bool
    timeout: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExchangeAddress:
        try:
            ca = config.get(DIRECT_CA)
            return cls(
                str(config[DIRECT]),
                str(config[DIRECT_TOKEN]),
                None if ca is None else str(ca),
                bool(config.get(DIRECT_INSECURE, False)),
                float(config[DIRECT_TIMEOUT]),
            )
        except KeyError as error:
            raise MessageError(f"the message has {DIRECT!r} but no {error.args[0]!r}") from None


class ExchangeStream:
    """A stream to the exchange service, opened at once; use as a context manager.

    An exception inside is sent to the server as the reason, so that the others do not wait for this client.
    """

    def __init__(self, address: ExchangeAddress) -> None:
        self._address = address
        self._late = False
        if address.insecure:
            self._channel = grpc.insecure_channel(address.address, options=KEEPALIVE)
        else:
            credentials = grpc.ssl_channel_credentials(None if address.ca is None else address.ca.encode())
            self._channel = grpc.secure_channel(address.address, credentials, options=KEEPALIVE)
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise

    def exchange(self, contribution: Contribution) -> Agreement:
        """Send a contribution and wait for the cohort's agreement."""
        self._requests.put(to_bytes(contribution))
        limit = self._address.timeout + SLACK_SECONDS
        agreement = agreement_from_bytes(self._wait(lambda: next(self._call), limit))
        sent = {name: (array.shape, array.dtype) for name, array in contribution.tensors.items()}
        got = {name: (array.shape, array.dtype) for name, array in agreement.tensors.items()}
        if got != sent:
            raise MessageError(
                f"the answer to the exchange of {contribution.kind} does not match: it has {got}, expected {sent}"
            )
        return agreement

    def close(self) -> None:
        self._requests.put(None)
        # The server ends the stream after its last answer.
        with contextlib.suppress(MessageError, StopIteration):
            self._wait(lambda: next(self._call), SLACK_SECONDS)
        self._channel.close()

    def __enter__(self) -> ExchangeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._requests.put(to_bytes(f"{type(error).__name__}: {error}"))
        self.close()

    # --- inside ---

    def _connect(self) -> None:
        """Open a stream that the service accepts; while the service is unreachable, retry for CONNECT_SECONDS."""
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            # A new queue for each attempt: a failed call may still be reading from the old one.
            self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            requests = iter(self._requests.get, None)
            self._call = self._channel.stream_stream(METHOD)(requests, metadata=((TOKEN, self._address.token),))
            try:
                metadata = self._wait(self._call.initial_metadata, max(1.0, end - time.monotonic()))
                # A rejected call has metadata too, and may count as active for a moment.
                if any(key == ACCEPTED for key, _ in metadata):
                    return
                # The call has ended; reading from it raises the reason.
                self._wait(lambda: next(self._call), 5)
            except _Unreachable:
                self._requests.put(None)
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
            except StopIteration:
                raise MessageError(
                    f"the exchange service at {self._address.address} ended the stream at once"
                ) from None

    def _wait(self, read: Callable[[], Any], seconds: float) -> Any:
        """`read()`, cancelled after `seconds`."""
        call = self._call

        def stop() -> None:
            self._late = True
            call.cancel()

        self._late = False
        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            return read()
        except grpc.RpcError as error:
            raise self._explained(error, seconds) from None
        finally:
            timer.cancel()

    def _explained(self, error: Any, seconds: float) -> MessageError:
        where, code, details = f"the exchange service at {self._address.address}", error.code(), error.details()
        if self._late:
            return MessageError(f"{where} did not answer within {seconds:g} s")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return MessageError(f"{where} does not accept this node's token, which is valid once and for one round")
        if code is grpc.StatusCode.ABORTED:
            return MessageError(f"{where} ended the exchange: {details}")
        if code is grpc.StatusCode.CANCELLED:
            return MessageError(f"{where} ended the exchange: the round continued without this client, or has failed")
        if code is grpc.StatusCode.UNAVAILABLE:
            return _Unreachable(f"{where} cannot be reached, or has ended: {details}")
        return MessageError(f"{where}: {code.name}: {details}")


class _Unreachable(MessageError):
    pass
