"""Runs a round's exchanges over gRPC, while Flower waits for the replies to the round's train messages.

The loop runs in its own thread, with a gRPC service that is open only for this round. A client calls it with a
contribution, and waits for the agreement. Each node of the round has a token, and a call without one is rejected before
it gets a thread. Every wait has a limit: a client that is late, or disconnects while it waits, is lost, and the others
continue.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from flwr.app import Message

from fedbn_flwr.engines.capabilities import capabilities
from fedbn_flwr.errors import LOG, MessageError, RunFailed, SettingsError, few
from fedbn_flwr.exchange.carriers import Answers, Carrier, Cohort, ExchangesDone
from fedbn_flwr.exchange.codec import (
    TEXT_LIMIT,
    Agreement,
    Contribution,
    contribution_from_records,
)
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.reply import with_config

from .client import (
    CONTRIBUTE,
    DIRECT,
    DIRECT_CA,
    DIRECT_INSECURE,
    DIRECT_TIMEOUT,
    DIRECT_TOKEN,
    FAILED,
    KEEPALIVE,
    TOKEN,
    from_bytes,
    to_bytes,
)
from .config import ExchangeConfig

Call = Any  # the context of a client's call, of gRPC

_JOIN_SECONDS = 60  # to close the service after the last reply has arrived


class StreamCarrier:
    """A carrier that runs exchanges on a service, and observes the replies to the train messages."""

    def __init__(
        self, settings: ExchangeConfig, cohort: Cohort, run_exchanges: Callable[[Carrier], ExchangesDone]
    ) -> None:
        grid, messages = cohort.grid, cohort.messages
        self._engine = capabilities(grid)
        served = self._engine.start()
        if served is not None and served < (count := len(list(grid.get_node_ids()))):
            raise SettingsError(
                f"the direct exchange needs all {count} clients alive at once, and this engine serves {served} "
                "at a time; set engine.workers to the number of clients, or strategy.direct to false"
            )
        self._timeout, self._end = cohort.timeout, time.monotonic() + cohort.round_timeout
        self._nodes = [message.metadata.dst_node_id for message in messages]
        self._up: list[Arrays] = []  # the contributions to the current exchange
        self._ended: Future[Sequence[int]] = Future()  # the nodes that took part in all exchanges
        self._service = ExchangeService(settings, self._nodes, cohort.name)
        ca = settings.read("ca")
        config = {
            DIRECT: self._service.address,
            DIRECT_TIMEOUT: float(cohort.timeout),
            **({} if settings.certificate else {DIRECT_INSECURE: True}),
            **({} if ca is None else {DIRECT_CA: ca.decode()}),
        }

        tokens = self._service.tokens
        self.messages = [
            with_config(message, {**config, DIRECT_TOKEN: tokens[message.metadata.dst_node_id]}) for message in messages
        ]
        self._engine.observe(self.replied, self.given_up)
        threading.Thread(target=self._run, args=[run_exchanges], daemon=True, name="fedbn-exchanges").start()

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        """Raise the error that ended the exchanges, if there was one."""
        for reply in replies:
            self.replied(reply)
        wait([self._ended], 1)
        self._service.end()
        done = self._ended.result(_JOIN_SECONDS)
        # Clients that dropped out were already reported; ignore their final reply.
        lost = {*self._nodes}.difference(done)
        return [reply for reply in replies if reply.metadata.src_node_id not in lost]

    # --- what an engine that observes replies calls ---

    def replied(self, reply: Message) -> None:
        """Remove a client that has answered the train message from the exchanges."""
        reason = "it trained without the exchanges; serve the client with fedbn_flwr.client_app"
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
        self._service.lose([reply.metadata.src_node_id], reason)

    def given_up(self) -> frozenset[int]:
        failed = self._ended.done() and self._ended.exception() is not None
        return frozenset(self._nodes if failed else self._service.lost)

    # --- what the loop asks, in the thread ---

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        if agreement is not None:
            self._send(nodes, agreement, last=False)
        asked = [node for node in nodes if node in self._nodes]
        # The others need the rest of the time to finish the round without a client that hangs.
        seconds = min(self._timeout, (self._end - time.monotonic()) / 2)
        contributions = dict[int, Contribution]()
        received = self._service.collect(asked, seconds)
        problems = {node: why for node, why in self._service.lost.items() if node in asked}
        for node, message in received.items():
            try:
                contributions[node] = contribution_from_records(from_bytes(message))
            except MessageError as error:
                problems[node] = f"its message cannot be read: {error}"
        self._up = [each.tensors for each in contributions.values()]
        return contributions, problems

    def _run(self, run_exchanges: Callable[[Carrier], ExchangesDone]) -> None:
        try:
            with self._service:
                done = run_exchanges(self)
                self._send(done.nodes, done.agreement, last=True)
            self._ended.set_result(done.nodes)
        except BaseException as error:
            self._ended.set_exception(error)

    def _send(self, nodes: Sequence[int], agreement: Agreement, *, last: bool) -> None:
        self._engine.count_exchange(self._up, [agreement.tensors] * len(nodes))
        self._service.answer(nodes, to_bytes(agreement), last=last)


_GRACE_SECONDS = 10  # to deliver the last answers
_WARNING_SECONDS = 60  # until the log says for whom the others wait


@dataclass
class _Client:
    """A node's part in the round. In the queues, None ends a wait after `lost` is set."""

    token: str = field(default_factory=functools.partial(secrets.token_hex, 32))
    received: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # from the client
    answers: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)  # for the client
    call: Call = None  # that of its call that waits for an answer
    over: bool = False  # whether the last answer was given
    lost: str | None = None  # why

    def lose(self, reason: str) -> None:
        if self.lost is None and not self.over:
            self.lost = reason
            self.received.put(None)
            self.answers.put(None)

    def ended(self, call: Call) -> None:
        if self.call is call:
            self.lose("its connection to the exchange service broke")


class ExchangeService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A service for `nodes`. It waits up to `bind_seconds` for its port, which another run's round may be using.

    A client's message may have up to 4 MB, gRPC's limit, which is mean and variance of 260,000 channels in float64.
    `name` is how the log names a node's client.
    """

    def __init__(
        self, settings: ExchangeConfig, nodes: Sequence[int], name: Callable[[int], str] = str, bind_seconds: float = 60
    ) -> None:
        self._clients, self._name = {node: _Client() for node in nodes}, name
        options = [
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),  # two runs must not share a port unnoticed
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_concurrent_streams", 16),  # per connection; a client has one call at a time
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.max_connection_idle_ms", 20_000),
        ]
        self._server = grpc.server(_Threads(), handlers=[self], options=options)
        port = self._bound(settings, time.monotonic() + bind_seconds)
        self._server.start()
        host, _, wanted = settings.address.rpartition(":")
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
                        "using it, or is the certificate wrong? Unset FEDBN_EXCHANGE_ADDRESS to exchange by messages"
                    ) from None
                time.sleep(0.5)

    @property
    def tokens(self) -> dict[int, str]:
        return {node: client.token for node, client in self._clients.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The reasons why nodes are lost, by node."""
        return {node: client.lost for node, client in self._clients.items() if client.lost is not None}

    # --- the round's side ---

    def collect(self, nodes: Sequence[int], seconds: float) -> dict[int, bytes]:
        """The next message of each node that is not lost. A node that sends none in time is lost."""
        began, found, silent = time.monotonic(), dict.fromkeys(nodes, b""), [*nodes]
        for limit in sorted({min(_WARNING_SECONDS, seconds), seconds}):
            for node in [*silent]:
                with suppress(Empty):
                    left = max(0.0, began + limit - time.monotonic())
                    found[node] = self._clients[node].received.get(timeout=left) or b""
                    silent.remove(node)
            if silent and limit < seconds:
                names = few(map(self._name, silent), 3)
                LOG.warning("all wait for %s since %g s, at most %.0f s in this exchange", names, limit, seconds)
        for node in silent:
            self._clients[node].lose(f"it sent nothing to the exchange service within {seconds:.3g} s")
        lost = self.lost  # also after its message
        return {node: message for node, message in found.items() if node not in lost}

    def answer(self, nodes: Collection[int], message: bytes, *, last: bool = False) -> None:
        """Send `message` to these nodes, and end all others' part in the round."""
        self.lose(self._clients.keys() - set(nodes), "excluded from this round's exchanges; the server's log says why")
        for client in (self._clients[node] for node in nodes):
            client.over = last
            client.answers.put(message)

    def end(self) -> None:
        """End all nodes' part in the round, whose train messages have ended."""
        silent = "its train message ended, with or without a reply, before the exchanges"
        for client in self._clients.values():
            client.lose(silent if client.call is None else "it waited for others until its train message ended")

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
        """Accept a call with a valid token. For other calls the method is unknown, so that they occupy no thread."""
        given = str(dict(handler_call_details.invocation_metadata).get(TOKEN, "")).encode()
        method = {CONTRIBUTE: self._contribute, FAILED: self._failed}.get(handler_call_details.method)
        for client in self._clients.values():
            if secrets.compare_digest(client.token.encode(), given) and method is not None:
                return grpc.unary_unary_rpc_method_handler(functools.partial(method, client))
        return None

    def _contribute(self, client: _Client, message: bytes, context: Call) -> bytes:
        """The answer to a client's message."""
        if client.call is not None or client.over:
            context.abort(grpc.StatusCode.ABORTED, "this node has another call, or its exchanges are over")
        answer: Any = None
        client.call = context
        if not context.add_callback(functools.partial(client.ended, context)):  # the call has already ended
            client.ended(context)
        if client.lost is None:
            client.received.put(message)
            answer = client.answers.get()  # the wait ends with the client's part in the round, or with the round
        client.call = None
        if answer is None:
            context.abort(grpc.StatusCode.ABORTED, client.lost)  # raises
        return bytes(answer)

    def _failed(self, client: _Client, message: bytes, context: Call) -> bytes:
        client.lose(message.decode(errors="replace")[:TEXT_LIMIT])
        return b""


class _Threads(Executor):
    """A daemon thread for each call; a client has one at a time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # gRPC's own, for instance of a call that a closed server has ended
                future.set_exception(error)

        threading.Thread(target=call, daemon=True, name="fedbn-exchange").start()
        return future
