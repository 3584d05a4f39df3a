"""The server's side of the direct exchange: a gRPC service that is open for the exchanges of one round.

Each node of the round has a place and a token for it, which opens one stream, once. Whoever comes without one is
turned away before a thread is spent on him. Nothing here waits without a bound: a client that is late, gone or
sends too much loses its place, and the others go on.
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

from .config import KEEPALIVE, METHOD, TOKEN, Direct, split

_BIND_SECONDS = 60  # another run's round may hold the port
_GRACE_SECONDS = 10  # for last answers on their way


@dataclass(frozen=True)
class Lost:
    """Why a node has lost its place."""

    reason: str


@dataclass
class _Place:
    """One node's stream, as far as it has come."""

    token: str
    claimed: bool = False
    frame: bytes | None = None  # what the client sent and nobody has taken yet
    answer: bytes | None = None  # what is to be sent to it
    over: bool = False  # nothing follows the answer
    lost: str | None = None
    reading: Any = None  # the stream's context, while it waits for the client


class ExchangeService:
    """A service for `nodes`; frames of clients may have up to `limit` bytes, and all ends after `seconds`."""

    def __init__(self, direct: Direct, nodes: Sequence[int], *, limit: int, seconds: float) -> None:
        self._places = {node: _Place(secrets.token_hex(32)) for node in nodes}
        self._changed = threading.Condition()
        self._end = time.monotonic() + seconds
        self._limit = limit
        self._server, port = self._open(direct)
        host, given = split(direct.address)
        self.address = f"{host}:{port}" if given == "0" else direct.address

    @property
    def tokens(self) -> dict[int, str]:
        return {node: place.token for node, place in self._places.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The nodes without a place, and why."""
        with self._changed:
            return {node: place.lost for node, place in self._places.items() if place.lost is not None}

    # --- the round's side ---

    def collect(self, nodes: Sequence[int], seconds: float) -> dict[int, bytes | Lost]:
        """The next frame of each node, or why there is none; a node that sends none in time loses its place."""
        end = min(time.monotonic() + seconds, self._end)
        places = {node: self._places[node] for node in nodes}
        with self._changed:
            while any(place.frame is None and place.lost is None for place in places.values()):
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            found: dict[int, bytes | Lost] = {}
            for node, place in places.items():
                if place.lost is None and place.frame is None:
                    what = "sent nothing" if place.claimed else "did not connect"
                    place.lost = f"it {what} to the exchange service within {seconds:g} s"
                    self._changed.notify_all()
                if place.lost is not None:
                    found[node] = Lost(place.lost)
                else:
                    assert place.frame is not None
                    found[node], place.frame = place.frame, None
            return found

    def answer(self, nodes: Collection[int], frame: bytes, *, last: bool = False) -> None:
        """Send `frame` to these nodes; all others lose their place."""
        with self._changed:
            for node, place in self._places.items():
                if node in nodes:
                    place.answer, place.over = frame, last
                elif place.lost is None:
                    place.lost = "left out of this round's exchanges; the server's log says why"
            self._changed.notify_all()

    def lose(self, nodes: Collection[int], reason: str) -> None:
        """Take these nodes' places."""
        with self._changed:
            for place in (self._places[node] for node in nodes if node in self._places):
                if place.lost is None and not place.over:
                    place.lost = reason
            self._changed.notify_all()

    def close(self, reason: str = "the round's exchanges are over") -> None:
        """Wait for last answers to arrive, end all streams and free the port."""
        self.lose(list(self._places), reason)
        with self._changed:
            silent = [place.reading for place in self._places.values() if place.lost and place.reading is not None]
        for context in silent:  # the others end by themselves
            context.cancel()
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)

    def __enter__(self) -> ExchangeService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(f"the round has failed: {error}" if error else "the round's exchanges are over")

    # --- the streams' side ---

    def _open(self, direct: Direct) -> tuple[grpc.Server, int]:
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # two runs must not share a port without knowing
            ("grpc.max_receive_message_length", self._limit),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 4),  # of one connection; a client needs one
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.max_connection_idle_ms", 20_000),
        ]
        end = time.monotonic() + _BIND_SECONDS
        key, certificate = direct.read("key"), direct.read("certificate")
        while True:
            server = grpc.server(_Threads(), handlers=[_Door(self)], options=options)
            try:
                if key is not None and certificate is not None:
                    credentials = grpc.ssl_server_credentials([(key, certificate)])
                    port = server.add_secure_port(direct.listens_on, credentials)
                else:
                    port = server.add_insecure_port(direct.listens_on)
            except RuntimeError as error:
                if time.monotonic() > end:
                    raise RunFailed(
                        f"the exchange service cannot listen on {direct.listens_on!r} ({error}); is another run using "
                        "it, or is its certificate wrong? Without FEDBN_EXCHANGE_ADDRESS Flower's messages are used"
                    ) from None
                time.sleep(0.5)
                continue
            server.start()
            return server, port

    def claim(self, token: str) -> int | None:
        """The node whose token this is, the first time it comes."""
        found = None
        with self._changed:
            for node, place in self._places.items():  # all of them, so that time tells nothing
                if secrets.compare_digest(place.token.encode(), token.encode()) and not place.claimed:
                    found = node
            if found is not None:
                self._places[found].claimed = True
                if self._places[found].lost is not None:
                    return None
        return found

    def serve(self, node: int, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One stream: frames in, an answer to each out."""
        place = self._places[node]
        gone = functools.partial(self.lose, [node], "its connection to the exchange service broke")
        if not context.add_callback(gone):  # it has ended already
            gone()
            return
        self._read(place, context)
        context.send_initial_metadata(())
        for frame in requests:
            with self._changed:
                place.frame, place.reading = frame, None
                self._changed.notify_all()
                while place.answer is None and place.lost is None and time.monotonic() < self._end:
                    self._changed.wait(max(0.0, self._end - time.monotonic()))
                answer, place.answer, over = place.answer, None, place.over
            if answer is None:
                context.abort(grpc.StatusCode.ABORTED, place.lost or "the round took too long")  # raises
                return
            yield answer
            if over:
                return
            self._read(place, context)

    def _read(self, place: _Place, context: Any) -> None:
        """From here on the stream waits for its client, and `close` ends it."""
        with self._changed:
            if place.lost is None:
                place.reading = context
                return
        context.abort(grpc.StatusCode.ABORTED, place.lost)  # raises


class _Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Lets in whoever has a token, and turns others away (as an unknown method) without a thread of their own."""

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
    """A thread per stream, and there are no more streams than tokens; none keeps the process from ending."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="fedbn-exchange").start()
        return future
