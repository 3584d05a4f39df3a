"""The server's side of the exchange over streams: a gRPC service that is open for the exchanges of one round.

Each node of the round has a token, which opens one stream, once. Connections without a valid token are rejected
before a thread is allocated. Every wait is bounded: a client that is late, disconnects or sends too much loses its
connection, and the others continue.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from fedbn_flwr.errors import RunFailed

from .config import ACCEPTED, KEEPALIVE, METHOD, TOKEN, ExchangeConfig, split_address

_GRACE_SECONDS = 10  # to deliver the last answers


@dataclass(frozen=True)
class Lost:
    """A node that has lost its connection, and why."""

    reason: str


@dataclass
class _Connection:
    """The state of one node's stream."""

    token: str
    claimed: bool = False
    received: bytes | None = None  # the client's message, until `collect` takes it
    answer: bytes | None = None  # for the client
    over: bool = False  # whether the answer is the last one
    lost: str | None = None
    reading: Any = None  # the stream's context, while it waits for the client


class ExchangeService:
    """A service for `nodes`; a client's message may have up to `limit` bytes, and all streams end after `seconds`.

    It waits up to `bind_seconds` for its port, which another run's round may have open.
    """

    def __init__(
        self, settings: ExchangeConfig, nodes: Sequence[int], *, limit: int, seconds: float, bind_seconds: float = 60
    ) -> None:
        self._connections = {node: _Connection(secrets.token_hex(32)) for node in nodes}
        self._changed = threading.Condition()
        self._end = time.monotonic() + seconds
        self._limit = limit
        self._server, port = self._open(settings, bind_seconds)
        host, wanted = split_address(settings.address)
        self.address = f"{host}:{port}" if wanted == "0" else settings.address

    @property
    def tokens(self) -> dict[int, str]:
        return {node: connection.token for node, connection in self._connections.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The nodes that have lost their connection, and why."""
        with self._changed:
            return {node: each.lost for node, each in self._connections.items() if each.lost is not None}

    # --- the round's side ---

    def collect(self, nodes: Sequence[int], seconds: float) -> dict[int, bytes | Lost]:
        """The next message of each node, or why there is none; a node that sends none in time is lost."""
        end = min(time.monotonic() + seconds, self._end)
        connections = {node: self._connections[node] for node in nodes}
        with self._changed:
            while any(connection.received is None and connection.lost is None for connection in connections.values()):
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            messages: dict[int, bytes | Lost] = {}
            for node, connection in connections.items():
                if connection.lost is None and connection.received is None:
                    what = "sent nothing" if connection.claimed else "did not connect"
                    connection.lost = f"it {what} to the exchange service within {seconds:g} s"
                    self._changed.notify_all()
                if connection.lost is not None:
                    messages[node] = Lost(connection.lost)
                else:
                    assert connection.received is not None
                    messages[node], connection.received = connection.received, None
            return messages

    def answer(self, nodes: Collection[int], message: bytes, *, last: bool = False) -> None:
        """Send `message` to these nodes; all others are lost."""
        with self._changed:
            for node, connection in self._connections.items():
                if node in nodes:
                    connection.answer, connection.over = message, last
                elif connection.lost is None:
                    connection.lost = "excluded from this round's exchanges; the server's log says why"
            self._changed.notify_all()

    def lose(self, nodes: Collection[int], reason: str) -> None:
        """End these nodes' part in the round."""
        with self._changed:
            for connection in (self._connections[node] for node in nodes if node in self._connections):
                if connection.lost is None and not connection.over:
                    connection.lost = reason
            self._changed.notify_all()

    def close(self, reason: str = "the round's exchanges are over") -> None:
        """Wait until the last answers have arrived, end all streams and free the port."""
        self.lose(list(self._connections), reason)
        with self._changed:
            waiting = [each.reading for each in self._connections.values() if each.lost and each.reading is not None]
        for context in waiting:  # the other streams end on their own
            context.cancel()
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)

    def __enter__(self) -> ExchangeService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(f"the round has failed: {error}" if error else "the round's exchanges are over")

    # --- the streams' side ---

    def _open(self, settings: ExchangeConfig, bind_seconds: float) -> tuple[grpc.Server, int]:
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # two runs must not share a port unnoticed
            ("grpc.max_receive_message_length", self._limit),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 4),  # of one connection; a client needs one
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.max_connection_idle_ms", 20_000),
        ]
        end = time.monotonic() + bind_seconds
        key, certificate = settings.read("key"), settings.read("certificate")
        while True:
            server = grpc.server(_Threads(), handlers=[_TokenHandler(self)], options=options)
            try:
                if key is not None and certificate is not None:
                    credentials = grpc.ssl_server_credentials([(key, certificate)])
                    port = server.add_secure_port(settings.listens_on, credentials)
                else:
                    port = server.add_insecure_port(settings.listens_on)
            except RuntimeError as error:
                if time.monotonic() > end:
                    raise RunFailed(
                        f"the exchange service cannot listen on {settings.listens_on!r} ({error}); is another run "
                        "using it, or is the certificate wrong? Without FEDBN_EXCHANGE_ADDRESS messages are used"
                    ) from None
                time.sleep(0.5)
                continue
            server.start()
            return server, port

    def claim(self, token: str) -> int | None:
        """The node to which the token belongs, on its first use; otherwise None."""
        found = None
        with self._changed:
            for node, connection in self._connections.items():  # check all: the time must not depend on the token
                if secrets.compare_digest(connection.token.encode(), token.encode()) and not connection.claimed:
                    found = node
            if found is not None:
                self._connections[found].claimed = True
                if self._connections[found].lost is not None:
                    return None
        return found

    def serve(self, node: int, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One stream: an answer to each of the client's messages."""
        connection = self._connections[node]
        gone = functools.partial(self.lose, [node], "its connection to the exchange service broke")
        if not context.add_callback(gone):  # the call has already ended
            gone()
            return
        self._read(connection, context)
        context.send_initial_metadata(((ACCEPTED, "1"),))
        for message in requests:
            with self._changed:
                connection.received, connection.reading = message, None
                self._changed.notify_all()
                while connection.answer is None and connection.lost is None and time.monotonic() < self._end:
                    self._changed.wait(max(0.0, self._end - time.monotonic()))
                answer, connection.answer, over = connection.answer, None, connection.over
            if answer is None:
                context.abort(grpc.StatusCode.ABORTED, connection.lost or "the round took too long")  # raises
                return
            yield answer
            if over:
                return
            self._read(connection, context)

    def _read(self, connection: _Connection, context: Any) -> None:
        """Mark the stream as waiting for its client, so that `close` may cancel it."""
        with self._changed:
            if connection.lost is None:
                connection.reading = context
                return
        context.abort(grpc.StatusCode.ABORTED, connection.lost)  # raises


class _TokenHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Accepts calls with a valid token; for others the method is unknown, so that they occupy no thread."""

    def __init__(self, service: ExchangeService) -> None:
        self._service = service

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != METHOD:
            return None
        token = next((value for key, value in handler_call_details.invocation_metadata if key == TOKEN), "")
        node = self._service.claim(token if isinstance(token, str) else "")
        if node is None:
            return None
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._service.serve, node))


class _Threads(Executor):
    """One daemon thread per stream; there are at most as many streams as tokens."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="fedbn-exchange").start()
        return future
