"""The values of one exchange, converted to Flower's records and back.

A client sends a `Contribution`, and the server answers with an `Agreement`. Neither trusts the other: invalid content
raises `MessageError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, config_of, configs_in, metrics_in, pack, unpack
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import partition_of

TEXT_LIMIT = 1000  # the most characters of a text that a client sends
TIME_LIMIT = 3600  # the most seconds that a strategy may wait for an exchange
KIND, LAYER = "what", "layer"  # config keys
END = "end"  # the kind of a contribution without tensors, which ends exchanges without gradients


@dataclass(frozen=True)
class Contribution:
    """The values that one client sends to an exchange, for one pass through one layer."""

    layer: str  # the name of the batch norm in the client's model; empty at the end
    # "moments" (mean and var together), "mean", "variance" (around the agreed mean), "gradients" (of both), or END
    kind: str
    tensors: Arrays
    batch: int  # B_i, the number of examples in this client's batch
    values: int  # v_i, the number of values per channel in the batch, without padded positions
    examples: float = 0  # p_i up to scale, such as the number of examples in this client's data set
    partition: int | None = None  # the server orders clients by it


@dataclass(frozen=True)
class Agreement:
    """The server's result from all contributions."""

    tensors: Arrays
    values: int  # the number of values per channel in the batches of all clients
    per_example: float  # r, the mean number of values in an example, weighted by client


def contribution_to_records(contribution: Contribution) -> RecordDict:
    numbers: dict[str, int | float] = {
        protocol.BATCH_EXAMPLES: contribution.batch,
        protocol.BATCH_VALUES: contribution.values,
        protocol.NUM_EXAMPLES: contribution.examples,
    }
    if contribution.partition is not None:
        numbers[protocol.PARTITION] = contribution.partition
    return RecordDict(
        {
            "arrays": pack(contribution.tensors),
            "metrics": MetricRecord(numbers),  # type: ignore[arg-type]
            "config": ConfigRecord({KIND: contribution.kind, LAYER: contribution.layer}),
        }
    )


def contribution_from_records(content: RecordDict) -> Contribution:
    """The contribution in a reply that has passed the gate."""
    metrics, configs, arrays = metrics_in(content), configs_in(content), arrays_in(content)
    if {*arrays} != {"arrays"} or len(metrics) != 1 or "config" not in configs:
        raise MessageError(
            "the reply is not a contribution to an exchange; serve the client with fedbn_flwr.client_app"
        )
    (numbers,) = metrics.values()
    config = configs["config"]
    return Contribution(
        layer=str(config.get(LAYER, ""))[:TEXT_LIMIT],
        kind=str(config.get(KIND))[:TEXT_LIMIT],
        tensors=unpack(arrays["arrays"]),
        batch=int(_number(numbers, protocol.BATCH_EXAMPLES)),
        values=int(_number(numbers, protocol.BATCH_VALUES)),
        examples=_number(numbers, protocol.NUM_EXAMPLES),
        partition=partition_of(content),
    )


def agreement_to_records(agreement: Agreement) -> RecordDict:
    numbers = [float(agreement.values), agreement.per_example]
    return RecordDict({"arrays": pack(agreement.tensors), "config": ConfigRecord({protocol.EXCHANGE_VALUES: numbers})})


def agreement_from_records(content: RecordDict) -> Agreement:
    numbers: Any = config_of(content).get(protocol.EXCHANGE_VALUES)
    if "arrays" not in arrays_in(content) or not isinstance(numbers, list) or len(numbers) != 2:
        raise MessageError(f"an agreement needs the record 'arrays', and two numbers as {protocol.EXCHANGE_VALUES!r}")
    return Agreement(unpack(arrays_in(content)["arrays"]), int(numbers[0]), numbers[1])


def _number(numbers: MetricRecord, key: str) -> float:
    value = numbers.get(key)
    # A client's weight need not be whole.
    if not isinstance(value, int | float) or (key != protocol.NUM_EXAMPLES and value % 1):
        raise MessageError(f"its metrics have {key!r} = {shown(value)}; expected a whole number")
    return value
