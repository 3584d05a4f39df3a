"""The gate: every reply of a client is checked here before the ledger, wrappers and strategies read it.

Clients run on other people's machines, so a reply may contain anything. The gate never raises: a reply passes, or it
becomes an error reply with the reason. It reads each array once and keeps it in memory. Behind the gate

- arrays are NumPy arrays of numbers with the declared dtype and shape,
- metrics are finite numbers or lists of them, and numbers of examples are between 0 and 2**31,
- a partition is a whole number, zero or more.

Checks that need the model or the round (`arrays_problem`, `Rule.problem`) come later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError

from . import protocol
from .arrays import in_memory
from .quote import one_line, shown
from .reply import MOST_EXAMPLES, is_partition, metric_name, partition_of, refusal, with_content

_LARGEST = 1e39  # above the largest float32; sums and squares of such metrics are finite
_LARGEST_INTEGER = 2**63  # the files of a run have 64 bits, and -2**63 has no positive counterpart
_MOST_METRICS, _LONGEST_NAME = 1000, 1000  # each metric is in every line of a run's files, and a column of its tables
_MOST_BYTES = 1 << 18  # in names and numbers: enough for 1,000 metrics, or a list with numbers of 30,000 classes
# The name of a test set may come before them.
_COUNTS = (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES, protocol.BATCH_VALUES)


class Gated(list[Message]):
    """Replies that have passed the gate."""


def gate(replies: Iterable[Message]) -> Gated:
    """The replies; an error with the reason replaces each one that must not pass."""
    return replies if isinstance(replies, Gated) else Gated(map(_checked_reply, replies))


def checked_content(content: RecordDict) -> RecordDict:
    """The content with its arrays in memory; MessageError names the first record or key that must not pass."""
    read: dict[str, ArrayRecord] = {}
    for name, record in content.items():
        match record:
            case ArrayRecord():
                if (arrays := in_memory(record)) is not record:
                    read[name] = arrays
            case MetricRecord():
                _check_metrics(record)
            case ConfigRecord():
                if protocol.PARTITION in record:
                    _check_whole(protocol.PARTITION, record[protocol.PARTITION])
            case _:
                raise MessageError(f"its record {shown(name)} is a {type(record).__name__}")
    return RecordDict({**content, **read}) if read else content


def _checked_reply(reply: Message) -> Message:
    if not (reply.has_content() or reply.has_error()):
        return refusal(reply, "it has neither content nor an error")
    if not reply.has_content():  # Flower's strategies log the reason as it is
        reason = one_line(str(reply.error.reason or "")) or f"error code {reply.error.code}"
        return reply if reason == reply.error.reason else refusal(reply, reason, reply.error.code)
    try:
        content = checked_content(reply.content)
    except MessageError as error:  # name the client, as the errors from clients do
        partition = partition_of(reply.content)
        return refusal(reply, str(error) if partition is None else f"client {partition}: {error}")
    except Exception:  # the texts of NumPy's and Flower's errors are about their own interfaces
        return refusal(reply, "its content cannot be read")
    return reply if content is reply.content else with_content(reply, content)


def _check_metrics(metrics: MetricRecord) -> None:
    if len(metrics) > _MOST_METRICS:
        raise MessageError(f"it has {len(metrics)} metrics; at most {_MOST_METRICS} are accepted")
    size = sum(len(key.encode()) + 8 * (len(value) if isinstance(value, list) else 1) for key, value in metrics.items())
    if size > _MOST_BYTES:
        raise MessageError(
            f"its metrics have {size:,} bytes of names and numbers; at most {_MOST_BYTES:,} are accepted"
        )
    for key, value in metrics.items():
        if len(key) > _LONGEST_NAME:
            raise MessageError(
                f"its metric {shown(key)} has a name of {len(key)} characters; at most {_LONGEST_NAME} are accepted"
            )
        if key in (protocol.PARTITION, protocol.STATE_ROUND):
            _check_whole(key, value)
            continue
        is_count, expected = metric_name(key).endswith(_COUNTS), "a finite number (the client diverged?)"
        numbers: Any = [value]
        if is_count:
            expected = "a number from 0 to 2**31"
        elif isinstance(value, list) and key != protocol.TRAIN_LOSS:
            numbers, expected = value, "finite numbers"
        if not all(map(_is_number, numbers)) or (is_count and not 0 <= numbers[0] <= MOST_EXAMPLES):
            raise MessageError(f"its metric {shown(key)} is {shown(value)}, expected {expected}")


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return abs(value) <= _LARGEST  # false for NaN
    return type(value) is int and abs(value) < _LARGEST_INTEGER  # not a bool


def _check_whole(key: str, value: object) -> None:
    if not is_partition(value):
        raise MessageError(f"its {key!r} is {shown(value)}, expected a whole number from 0 to 2**31")
