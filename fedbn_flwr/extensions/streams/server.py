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
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from fedbn_flwr.errors import RunFailed

from .config import ExchangeConfig, split_address
from .wire import ACCEPTED, KEEPALIVE, METHOD, TOKEN

_GRACE_SECONDS = 10  # to deliver the last answers


@dataclass
class _Connection:
    """One node's stream. In the queues, None ends a wait after `lost` is set."""

    token: str = field(default_factory=functools.partial(secrets.token_hex, 32))
    received: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # from the client
    answers: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # for the client
    claimed: bool = False
    over: bool = False  # whether the last answer was given
    lost: str | None = None  # why
    waiting: Any = None  # the stream's context, while it waits for the client

    def lose(self, reason: str) -> None:
        if self.lost is None and not self.over:
            self.lost = reason
            self.received.put(None)
            self.answers.put(None)


class ExchangeService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A service for `nodes`; a client's message may have up to `limit` bytes, and all streams end after `seconds`.

    It waits up to `bind_seconds` for its port, which another run's round may have open.
    """

    def __init__(
        self, settings: ExchangeConfig, nodes: Sequence[int], *, limit: int, seconds: float, bind_seconds: float = 60
    ) -> None:
        self._connections = {node: _Connection() for node in nodes}
        self._end = time.monotonic() + seconds
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # two runs must not share a port unnoticed
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 4),  # of one connection; a client needs one
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.max_connection_idle_ms", 20_000),
        ]
        self._server = grpc.server(_Threads(), handlers=[self], options=options)
        port = self._bound(settings, time.monotonic() + bind_seconds)
        self._server.start()
        host, wanted = split_address(settings.address)
        self.address = f"{host}:{port}" if wanted == "0" else settings.address

    def _bound(self, settings: ExchangeConfig, end: float) -> int:
        key, certificate = settings.read("key"), settings.read("certificate")
        while True:
            try:
                if key is None:
                    return int(self._server.add_insecure_port(settings.listens_on))
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                return int(self._server.add_secure_port(settings.listens_on, credentials))
            except RuntimeError as error:
                if time.monotonic() > end:
                    raise RunFailed(
                        f"the exchange service cannot listen on {settings.listens_on!r} ({error}); is another run "
                        "using it, or is the certificate wrong? Without FEDBN_EXCHANGE_ADDRESS messages are used"
                    ) from None
                time.sleep(0.5)

    @property
    def tokens(self) -> dict[int, str]:
        return {node: connection.token for node, connection in self._connections.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The nodes that have lost their connection, and why."""
        return {node: each.lost for node, each in self._connections.items() if each.lost is not None}

    # --- the round's side ---

    def collect(self, nodes: Sequence[int], seconds: float) -> dict[int, bytes | str]:
        """The next message of each node, or as text why there is none; a node that sends none in time is lost."""
        end, found = min(time.monotonic() + seconds, self._end), dict[int, bytes]()
        for node in nodes:
            connection, found[node] = self._connections[node], b""
            try:
                found[node] = connection.received.get(timeout=max(0.0, end - time.monotonic())) or b""
            except Empty:
                what = "sent nothing" if connection.claimed else "did not connect"
                connection.lose(f"it {what} to the exchange service within {seconds:g} s")
        return found | {node: why for node, why in self.lost.items() if node in found}  # also after its message

    def answer(self, nodes: Collection[int], message: bytes, *, last: bool = False) -> None:
        """Send `message` to these nodes; all others are lost."""
        self.lose(
            self._connections.keys() - set(nodes), "excluded from this round's exchanges; the server's log says why"
        )
        for connection in (self._connections[node] for node in nodes):
            connection.over = last
            connection.answers.put(message)

    def lose(self, nodes: Collection[int], reason: str) -> None:
        """End these nodes' part in the round."""
        for connection in (self._connections[node] for node in nodes if node in self._connections):
            connection.lose(reason)

    def __enter__(self) -> ExchangeService:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until the last answers have arrived, end all streams and free the port."""
        self.lose(self._connections, f"the round has failed: {error}" if error else "the round's exchanges are over")
        for connection in self._connections.values():
            if connection.lost is not None and (context := connection.waiting) is not None:  # others end on their own
                context.cancel()
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)

    # --- the streams' side ---

    def service(self, handler_call_details: Any) -> Any:
        """Accepts a call with a valid token; for others the method is unknown, so that they occupy no thread."""
        given = str(dict(handler_call_details.invocation_metadata).get(TOKEN, "")).encode()
        for connection in self._connections.values():
            is_right = (
                secrets.compare_digest(connection.token.encode(), given) and handler_call_details.method == METHOD
            )
            if is_right and not connection.claimed and connection.lost is None:
                connection.claimed = True
                return grpc.stream_stream_rpc_method_handler(functools.partial(self._serve, connection))
        return None

    def _serve(self, connection: _Connection, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One stream: an answer to each of the client's messages."""
        gone = functools.partial(connection.lose, "its connection to the exchange service broke")
        if not context.add_callback(gone):  # the call has already ended
            return gone()
        context.send_initial_metadata(((ACCEPTED, "1"),))
        while not connection.over:
            answer: Any = None
            connection.waiting = context  # before `lost` is read: `__exit__` reads it after it has set `lost`
            if connection.lost is None:
                if (message := next(requests, None)) is None:
                    return
                connection.waiting = None
                connection.received.put(message)
                with suppress(Empty):
                    answer = connection.answers.get(timeout=max(0.0, self._end - time.monotonic()))
            if answer is None:
                context.abort(grpc.StatusCode.ABORTED, connection.lost or "the round took too long")  # raises
            yield answer


class _Threads(Executor):
    """One daemon thread per stream; there are at most as many streams as tokens."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = functools.partial(fn, *args, **kwargs)
        threading.Thread(target=lambda: future.set_result(call()), daemon=True, name="fedbn-exchange").start()
        return future
