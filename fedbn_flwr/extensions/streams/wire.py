"""The values of an exchange as bytes: those of their records (a safetensors file), so that they arrive bit for bit."""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.exchange.codec import (
    Agreement,
    Contribution,
    agreement_from_records,
    contribution_from_records,
    contribution_to_records,
    numbers_of,
)
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.gate import checked
from fedbn_flwr.messages.serialization import dump, parse

EXCHANGE = "/fedbn.Exchange/Exchange"  # a contribution, answered by the agreement
FAILED = "/fedbn.Exchange/Failed"  # the text why a client sends no contribution
TOKEN = "fedbn-token"  # key of a call's metadata  # noqa: S105 (the name of a header)

# Pings detect a lost machine within half a minute.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the timeout that applies; one minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

HEADER_LIMIT = 16384  # bytes of a message besides the tensors


def to_bytes(value: Contribution | Agreement) -> bytes:
    if isinstance(value, Contribution):
        return dump(contribution_to_records(value))
    return dump(RecordDict({"arrays": pack(value.tensors), "config": ConfigRecord(numbers_of(value))}))


def contribution_from_bytes(data: bytes) -> Contribution:
    return contribution_from_records(_from_bytes(data))


def agreement_from_bytes(data: bytes) -> Agreement:
    return agreement_from_records(_from_bytes(data))


def _from_bytes(data: bytes) -> RecordDict:
    try:
        content = parse(data)
    except ValueError:
        raise MessageError("its bytes are not those of records") from None
    return checked(content)
