"""The values of one exchange, and their form as Flower's records and as bytes.

A client sends a `Contribution`, the server answers with an `Agreement`, and a client that cannot continue sends its
reason. Flower's messages contain records; a stream carries the bytes of the same records (a safetensors file), so that
values arrive bit for bit. The sender is not trusted: invalid content raises `CodecError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, filled, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import checked, shown
from fedbn_flwr.messages.serialization import dump, parse

HEADER_LIMIT = 16384  # bytes of a stream's message besides the tensors
TEXT_LIMIT = 1000  # characters of a reason
KIND, _FAILURE = "what", "failure"  # config keys


class CodecError(MessageError):
    """Records or bytes that are not a valid value of an exchange."""


@dataclass(frozen=True)
class Contribution:
    """The values that one client sends to an exchange."""

    kind: str  # "moments" (mean and var together), "mean", "variance" (around the agreed mean), "gradients" (of both)
    tensors: Arrays
    images: int  # in this client's batch
    remaining: int  # exchanges that follow this one
    examples: float = 0  # in this client's data set: p_i, up to scale
    partition: int | None = None  # the server orders clients by it


@dataclass(frozen=True)
class Agreement:
    """The server's result from all contributions."""

    tensors: Arrays
    images: int  # in the batches of all clients


def contribution_to_records(contribution: Contribution) -> RecordDict:
    numbers: dict[str, int | float] = {
        protocol.EXCHANGES_LEFT: contribution.remaining,
        protocol.BATCH_EXAMPLES: contribution.images,
        protocol.NUM_EXAMPLES: contribution.examples,
    }
    if contribution.partition is not None:
        numbers[protocol.PARTITION] = contribution.partition
    return filled(
        RecordDict(),
        {
            "arrays": pack(contribution.tensors),
            "metrics": MetricRecord(numbers),  # type: ignore[arg-type]
            "config": filled(ConfigRecord(), {KIND: contribution.kind}),
        },
    )


def contribution_from_records(content: RecordDict) -> Contribution:
    content = _checked(content)
    metrics, configs = metrics_in(content), configs_in(content)
    if set(arrays_in(content)) != {"arrays"} or len(metrics) != 1 or "config" not in configs:
        raise CodecError("the reply is no contribution to an exchange; serve the client with fedbn_flwr.client_app")
    numbers = next(iter(metrics.values()))
    partition = numbers.get(protocol.PARTITION)
    return Contribution(
        shown(kind) if not isinstance(kind := configs["config"].get(KIND), str) else kind[:TEXT_LIMIT],
        unpack(arrays_in(content)["arrays"]),
        images=_count(numbers, protocol.BATCH_EXAMPLES),
        remaining=_count(numbers, protocol.EXCHANGES_LEFT),
        examples=_number(numbers, protocol.NUM_EXAMPLES),
        partition=partition if isinstance(partition, int) else None,
    )


def agreement_to_records(agreement: Agreement) -> RecordDict:
    config = ConfigRecord({protocol.COHORT_BATCH: agreement.images})
    return RecordDict({"arrays": pack(agreement.tensors), "config": config})


def agreement_from_records(content: RecordDict) -> Agreement:
    content = _checked(content)
    images = next(iter(configs_in(content).values()), ConfigRecord()).get(protocol.COHORT_BATCH)
    if "arrays" not in arrays_in(content) or not isinstance(images, int):
        raise CodecError(f"an agreement needs the record 'arrays' and an integer {protocol.COHORT_BATCH!r}")
    return Agreement(unpack(arrays_in(content)["arrays"]), images)


def to_bytes(value: Contribution | Agreement | str) -> bytes:
    """Encode a value; a string is a client's reason for sending no contribution."""
    match value:
        case Contribution():
            records = contribution_to_records(value)
        case Agreement():
            records = agreement_to_records(value)
        case str():
            records = RecordDict({"config": ConfigRecord({_FAILURE: value[:TEXT_LIMIT]})})
    try:
        return dump(records)
    except ValueError as error:
        raise CodecError(str(error)) from None


def answer_from_bytes(data: bytes) -> Contribution | str:
    """A client's contribution, or its reason for sending none."""
    content = _from_bytes(data)
    failure = next(iter(configs_in(content).values()), ConfigRecord()).get(_FAILURE)
    return contribution_from_records(content) if failure is None else str(failure)[:TEXT_LIMIT]


def agreement_from_bytes(data: bytes) -> Agreement:
    return agreement_from_records(_from_bytes(data))


def _from_bytes(data: bytes) -> RecordDict:
    # The stream limits the size of the message; this limits the header before it is parsed.
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > HEADER_LIMIT:
        raise CodecError(f"it has {len(data)} bytes, with a header of {length}; expected at most {HEADER_LIMIT}")
    try:
        return parse(data)
    except ValueError:
        raise CodecError("its bytes are not those of records") from None


def _checked(content: RecordDict) -> RecordDict:
    try:
        return checked(content)
    except MessageError as error:
        raise CodecError(str(error)) from None


def _number(numbers: MetricRecord, key: str) -> float:
    value = numbers.get(key)
    if isinstance(value, int | float):
        return value
    raise CodecError(f"its metrics have {key!r} = {shown(value)}, expected a number")


def _count(numbers: MetricRecord, key: str) -> int:
    value = _number(numbers, key)
    if value == int(value):
        return int(value)
    raise CodecError(f"its metrics have {key!r} = {shown(value)}, expected a whole number")
