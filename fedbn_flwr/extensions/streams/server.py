"""The server's side of the exchange: a gRPC service that is open for the exchanges of one round.

Each node of the round has a token, without which a call is rejected before a thread is allocated. A call has a client's
contribution, and waits for the agreement. Every wait is bounded: a client that is late, or disconnects while it waits,
is lost, and the others continue.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.exchange.codec import TEXT_LIMIT

from .config import ExchangeConfig, split_address
from .wire import EXCHANGE, FAILED, KEEPALIVE, TOKEN

_GRACE_SECONDS = 10  # to deliver the last answers


@dataclass
class _Client:
    """A node's part in the round. In the queues, None ends a wait after `lost` is set."""

    token: str = field(default_factory=functools.partial(secrets.token_hex, 32))
    received: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # from the client
    answers: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # for the client
    call: Any = None  # the context of its call that waits for an answer
    over: bool = False  # whether the last answer was given
    lost: str | None = None  # why

    def lose(self, reason: str) -> None:
        if self.lost is None and not self.over:
            self.lost = reason
            self.received.put(None)
            self.answers.put(None)

    def ended(self, call: Any) -> None:
        if self.call is call:
            self.lose("its connection to the exchange service broke")


class ExchangeService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A service for `nodes`; a client's message may have up to `limit` bytes, and all calls end after `seconds`.

    It waits up to `bind_seconds` for its port, which another run's round may have open.
    """

    def __init__(
        self, settings: ExchangeConfig, nodes: Sequence[int], *, limit: int, seconds: float, bind_seconds: float = 60
    ) -> None:
        self._clients = {node: _Client() for node in nodes}
        self._end = time.monotonic() + seconds
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # two runs must not share a port unnoticed
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 16),  # of one connection; a client has one call at a time
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
        return {node: client.token for node, client in self._clients.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The nodes that are lost, and why."""
        return {node: each.lost for node, each in self._clients.items() if each.lost is not None}

    # --- the round's side ---

    def collect(self, nodes: Sequence[int], seconds: float) -> dict[int, bytes | str]:
        """The next message of each node, or as text why there is none; a node that sends none in time is lost."""
        end, found = min(time.monotonic() + seconds, self._end), dict[int, bytes]()
        for node in nodes:
            client, found[node] = self._clients[node], b""
            try:
                found[node] = client.received.get(timeout=max(0.0, end - time.monotonic())) or b""
            except Empty:
                client.lose(f"it sent nothing to the exchange service within {seconds:g} s")
        return found | {node: why for node, why in self.lost.items() if node in found}  # also after its message

    def answer(self, nodes: Collection[int], message: bytes, *, last: bool = False) -> None:
        """Send `message` to these nodes; all others are lost."""
        self.lose(self._clients.keys() - set(nodes), "excluded from this round's exchanges; the server's log says why")
        for client in (self._clients[node] for node in nodes):
            client.over = last
            client.answers.put(message)

    def lose(self, nodes: Collection[int], reason: str) -> None:
        """End these nodes' part in the round."""
        for client in (self._clients[node] for node in nodes if node in self._clients):
            client.lose(reason)

    def __enter__(self) -> ExchangeService:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until the last answers have arrived, end all calls and free the port."""
        self.lose(self._clients, f"the round has failed: {error}" if error else "the round's exchanges are over")
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)

    # --- the clients' side ---

    def service(self, handler_call_details: Any) -> Any:
        """Accepts a call with a valid token; for others the method is unknown, so that they occupy no thread."""
        given = str(dict(handler_call_details.invocation_metadata).get(TOKEN, "")).encode()
        method = {EXCHANGE: self._exchange, FAILED: self._failed}.get(handler_call_details.method)
        for client in self._clients.values():
            if secrets.compare_digest(client.token.encode(), given) and method is not None:
                return grpc.unary_unary_rpc_method_handler(functools.partial(method, client))
        return None

    def _exchange(self, client: _Client, message: bytes, context: Any) -> bytes:
        """The answer to a client's message."""
        if client.call is not None or client.over:
            context.abort(grpc.StatusCode.ABORTED, "this node's exchange is under way in another call, or over")
        answer: Any = None
        client.call = context
        if not context.add_callback(functools.partial(client.ended, context)):  # the call has already ended
            client.ended(context)
        if client.lost is None:
            client.received.put(message)
            with suppress(Empty):
                answer = client.answers.get(timeout=max(0.0, self._end - time.monotonic()))
        client.call = None
        if answer is None:
            context.abort(grpc.StatusCode.ABORTED, client.lost or "the round took too long")  # raises
        return bytes(answer)

    def _failed(self, client: _Client, message: bytes, context: Any) -> bytes:
        client.lose(message.decode(errors="replace")[:TEXT_LIMIT])
        return b""


class _Threads(Executor):
    """A daemon thread for each call; a client has one at a time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = functools.partial(fn, *args, **kwargs)
        threading.Thread(target=lambda: future.set_result(call()), daemon=True, name="fedbn-exchange").start()
        return future
