"""A client's side of the exchange over streams: one stream for one round, to which the train message's keys lead."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import Agreement, Contribution

from .wire import ACCEPTED, KEEPALIVE, METHOD, TOKEN, agreement_from_bytes, to_bytes

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
        config = self.local.config
        try:
            stream = ExchangeStream(
                config[DIRECT], config[DIRECT_TOKEN], config[DIRECT_TIMEOUT],
                ca=config.get(DIRECT_CA), insecure=bool(config.get(DIRECT_INSECURE)),
            )  # fmt: skip
        except KeyError as error:
            raise MessageError(f"the message has {DIRECT!r} but no {error.args[0]!r}") from None
        with stream:
            self.local.exchange = stream.exchange
            yield


class ExchangeStream:
    """A stream to the exchange service, opened at once; use as a context manager.

    An exception inside is sent to the server as the reason, so that the others do not wait for this client. Without
    `ca`, this machine's own root certificates are trusted.
    """

    def __init__(
        self, address: str, token: str, timeout: float, *, ca: str | None = None, insecure: bool = False
    ) -> None:
        self._address, self._metadata, self._seconds = address, ((TOKEN, token),), timeout + SLACK_SECONDS
        if insecure:
            self._channel = grpc.insecure_channel(address, options=KEEPALIVE)
        else:
            credentials = grpc.ssl_channel_credentials(None if ca is None else ca.encode())
            self._channel = grpc.secure_channel(address, credentials, options=KEEPALIVE)
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise

    def exchange(self, contribution: Contribution) -> Agreement:
        """Send a contribution and wait for the cohort's agreement."""
        self._requests.put(to_bytes(contribution))
        return agreement_from_bytes(self._next(self._seconds))

    def close(self) -> None:
        self._requests.put(None)
        with contextlib.suppress(MessageError):  # the server ends the stream after its last answer
            self._next(SLACK_SECONDS)
        self._channel.close()

    def __enter__(self) -> ExchangeStream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._requests.put(to_bytes(f"{type(error).__name__}: {error}"))
        self.close()

    # --- inside ---

    def _connect(self) -> None:
        """Open a stream that the service accepts; while the service is unreachable, retry for CONNECT_SECONDS."""
        end, accepted = time.monotonic() + CONNECT_SECONDS, False
        while not accepted:
            # A new queue for each attempt: a failed call may still be reading from the old one.
            self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            requests = iter(self._requests.get, None)
            self._call = self._channel.stream_stream(METHOD)(requests, metadata=self._metadata)
            try:
                metadata = self._wait(self._call.initial_metadata, max(1.0, end - time.monotonic()))
                accepted = any(key == ACCEPTED for key, _ in metadata)
                if not accepted:  # the call has ended; reading from it raises the reason
                    self._next(5)
            except MessageError:
                self._requests.put(None)
                if self._call.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def _next(self, seconds: float) -> bytes:
        """The server's next answer."""
        answer: bytes | None = self._wait(lambda: next(self._call, None), seconds)
        if answer is None:
            raise MessageError(f"the exchange service at {self._address} ended the stream")
        return answer

    def _wait(self, read: Callable[[], Any], seconds: float) -> Any:
        """`read()`, cancelled after `seconds`."""
        end, timer = time.monotonic() + seconds, threading.Timer(seconds, self._call.cancel)
        timer.daemon = True
        timer.start()
        try:
            return read()
        except grpc.RpcError as error:
            call: Any = error
            reason = _REASONS.get(call.code(), f": {call.code().name}: {{}}").format(call.details())
            if time.monotonic() >= end:
                reason = f" did not answer within {seconds:g} s"
            raise MessageError(f"the exchange service at {self._address}{reason}") from None
        finally:
            timer.cancel()


_REASONS = {
    grpc.StatusCode.UNIMPLEMENTED: " does not accept this node's token, which is valid once and for one round",
    grpc.StatusCode.ABORTED: " ended the exchange: {}",
    grpc.StatusCode.CANCELLED: " ended the exchange: the round continued without this client, or has failed",
    grpc.StatusCode.UNAVAILABLE: " cannot be reached, or has ended: {}",
}
