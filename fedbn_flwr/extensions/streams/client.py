"""A client's side of the exchange service: one call for each exchange, to the address in the train message.

The values of an exchange are sent as the bytes of their records (a safetensors file), so that they arrive bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from flwr.app import RecordDict

from fedbn_flwr.client.rule import ClientRule, Key, LocalRound
from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import (
    Agreement,
    Contribution,
    agreement_from_records,
    agreement_to_records,
    contribution_to_records,
)
from fedbn_flwr.messages.gate import gated_content
from fedbn_flwr.messages.serialization import dump, parse

CONTRIBUTE = "/fedbn.Exchange/Exchange"  # a contribution, answered by the agreement
FAILED = "/fedbn.Exchange/Failed"  # the reason why a client sends no contribution
CONNECTED = "/fedbn.Exchange/Connected"  # not a method of the service, so the answer is an error
TOKEN = "fedbn-token"  # key of a call's metadata  # noqa: S105 (the name of a header)

# Pings detect a lost machine within half a minute.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the pings' own timeout; one minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


DIRECT = "fedbn.direct"
DIRECT_TOKEN = "fedbn.direct-token"  # noqa: S105 (the name of a key)
DIRECT_CA = "fedbn.direct-ca"
DIRECT_INSECURE = "fedbn.direct-insecure"
DIRECT_TIMEOUT = "fedbn.direct-timeout"

CONNECT_SECONDS = 30
SLACK_SECONDS = 15  # that a client waits beyond the server's time limit


def to_bytes(value: Contribution | Agreement) -> bytes:
    return dump(contribution_to_records(value) if isinstance(value, Contribution) else agreement_to_records(value))


def from_bytes(data: bytes) -> RecordDict:
    """The records of a contribution or an agreement."""
    try:
        content = parse(data, RecordDict)
    except ValueError:
        raise MessageError("its bytes are not records") from None
    return gated_content(content)


class Streams(ClientRule):
    """Calls the exchange service for the exchanges of a round."""

    keys = {
        DIRECT: Key("`HOST:PORT`", "run the exchanges of this `train` message by calls to this address"),
        DIRECT_TOKEN: Key("text", "authenticate by this token, valid for one node in one round"),
        DIRECT_CA: Key("PEM", "trust this certificate authority; without it, the client's default ones"),
        DIRECT_INSECURE: Key("true", "connect without TLS"),
        DIRECT_TIMEOUT: Key("float", "fail if an exchange takes more than this number of seconds"),
    }

    def __init__(self, local: LocalRound) -> None:
        super().__init__(local)
        config = local.config
        try:
            called = service_at(
                config[DIRECT], config[DIRECT_TOKEN], config[DIRECT_TIMEOUT],
                ca=config.get(DIRECT_CA), insecure=bool(config.get(DIRECT_INSECURE)),
            )  # fmt: skip
        except KeyError as error:
            raise MessageError(f"the message has {DIRECT!r} but no {error.args[0]!r}") from None
        local.layerwise = functools.partial(local.layerwise, exchange=local.resources.enter_context(called))


@contextlib.contextmanager
def service_at(
    address: str, token: str, timeout: float, *, ca: str | None = None, insecure: bool = False
) -> Iterator[Callable[[Contribution], Agreement]]:
    """Yield a function that sends a contribution and waits for the agreement.

    If an exception ends the block, the server receives it as the reason, so that the others do not wait for this
    client. Without `ca`, this machine's own root certificates are trusted.
    """
    if insecure:
        channel = grpc.insecure_channel(address, KEEPALIVE)
    else:
        credentials = grpc.ssl_channel_credentials(None if ca is None else ca.encode())
        channel = grpc.secure_channel(address, credentials, KEEPALIVE)
    with channel:
        # Without a connection the first exchange fails with the reason. Not channel_ready_future: its thread fails if
        # the channel is closed soon.
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary(CONNECTED)(b"", CONNECT_SECONDS, wait_for_ready=True)

        def call(method: str, data: bytes, seconds: float) -> bytes:
            try:
                answer: bytes = channel.unary_unary(method)(data, seconds, ((TOKEN, token),))
            except grpc.RpcError as error:
                raise MessageError(f"the exchange service at {address}{_reason(error, seconds)}") from None
            return answer

        try:
            yield lambda sent: agreement_from_records(
                from_bytes(call(CONTRIBUTE, to_bytes(sent), timeout + SLACK_SECONDS))
            )
        except BaseException as error:
            with contextlib.suppress(MessageError):
                call(FAILED, f"{type(error).__name__}: {error}".encode(errors="replace"), SLACK_SECONDS)
            raise


def _reason(error: Any, seconds: float) -> str:
    reasons = {
        grpc.StatusCode.UNIMPLEMENTED: " does not accept this node's token, which is valid for one round",
        grpc.StatusCode.ABORTED: f" ended the exchange: {error.details()}",
        grpc.StatusCode.UNAVAILABLE: f" cannot be reached, or has ended: {error.details()}",
        grpc.StatusCode.DEADLINE_EXCEEDED: f" did not answer within {seconds:g} s",
    }
    return reasons.get(error.code(), f": {error.code().name}: {error.details()}")
