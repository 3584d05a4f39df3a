"""The values of one exchange, and their form as Flower's records.

A client sends a `Contribution`, and the server answers with an `Agreement`. The sender is not trusted: invalid content
raises `MessageError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.gate import checked, shown

TEXT_LIMIT = 1000  # characters of a text that a client sends
KIND = "what"  # config key


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
    return RecordDict(
        {
            "arrays": pack(contribution.tensors),
            "metrics": MetricRecord(numbers),  # type: ignore[arg-type]
            "config": ConfigRecord({KIND: contribution.kind}),
        }
    )


def contribution_from_records(content: RecordDict) -> Contribution:
    content = checked(content)
    metrics, configs = metrics_in(content), configs_in(content)
    if set(arrays_in(content)) != {"arrays"} or len(metrics) != 1 or "config" not in configs:
        raise MessageError("the reply is no contribution to an exchange; serve the client with fedbn_flwr.client_app")
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


def agreement_from_records(content: RecordDict) -> Agreement:
    content = checked(content)
    images = next(iter(configs_in(content).values()), ConfigRecord()).get(protocol.COHORT_BATCH)
    if "arrays" not in arrays_in(content) or not isinstance(images, int):
        raise MessageError(f"an agreement needs the record 'arrays' and an integer {protocol.COHORT_BATCH!r}")
    return Agreement(unpack(arrays_in(content)["arrays"]), images)


def _number(numbers: MetricRecord, key: str) -> float:
    value = numbers.get(key)
    if isinstance(value, int | float):
        return value
    raise MessageError(f"its metrics have {key!r} = {shown(value)}, expected a number")


def _count(numbers: MetricRecord, key: str) -> int:
    value = _number(numbers, key)
    if value == int(value):
        return int(value)
    raise MessageError(f"its metrics have {key!r} = {shown(value)}, expected a whole number")
