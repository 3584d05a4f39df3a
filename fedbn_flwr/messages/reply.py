"""The content of a reply, and changed copies of messages.

Clients use this module to read the server's messages, and strategies to read replies that have passed the gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError, log_once
from fedbn_flwr.internals import ErrorCode

from . import protocol
from .arrays import Arrays, arrays_in, config_of, configs_in, metrics_in, unpack
from .limits import MOST_EXAMPLES
from .quote import one_line, shown


def number_problem(metrics: protocol.Config, key: str) -> str | None:
    """Why a metric cannot be a weight, or None."""
    value = metrics.get(key)
    if value is None:
        return f"the reply's metrics lack {key!r}; they have {', '.join(map(shown, [*metrics][:8])) or 'none'}"
    if isinstance(value, list) or not 0 <= value <= MOST_EXAMPLES:
        return f"the reply's metrics have {key!r} = {shown(value)}; expected a number, zero or more"
    return None


def metric_name(key: str) -> str:
    """The name of a metric in a run's files, which is the same for `own-accuracy` and `own_accuracy`."""
    return key.replace("_", "-")


def is_partition(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_EXAMPLES


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply that has passed the gate."""

    arrays: Arrays  # the model's
    metrics: protocol.Config
    records: Mapping[str, Arrays]  # the further records that the rules asked for, by name
    message: Message


def read_reply(message: Message, name: str = "arrays", records: Collection[str] | None = ()) -> Reply:
    """The content of a reply that has passed the gate; raises MessageError if something is missing.

    `name` is the record with the model's arrays, and `records` names further records of arrays. With None the reply
    needs no arrays.
    """
    content = message.content
    if records is None:
        return Reply({}, metrics_of(content), {}, message)
    arrays = arrays_in(content)
    extras = {key: unpack(arrays.pop(key)) for key in records if key in arrays}
    if name in arrays and (others := [key for key in arrays if key != name]):
        log_once(f"the clients' record {shown(others[0])} is dropped: the strategy's traits.records don't declare it")
    return Reply(unpack(arrays_of(arrays, name)), metrics_of(content), extras, message)


def partition_of(content: RecordDict) -> int | None:
    """The partition that a client reports, in a ConfigRecord or among its metrics; None without a valid one."""
    for record in content.values():
        value = record.get(protocol.PARTITION) if isinstance(record, MetricRecord | ConfigRecord) else None
        if is_partition(value):
            return int(value)  # type: ignore[arg-type]
    return None


def arrays_of(content: Mapping[str, object], name: str = "arrays") -> ArrayRecord:
    """The model's arrays: the record `name`, or a record of any name if it is the only ArrayRecord."""
    records = arrays_in(content)
    if name in records:
        return records[name]
    if len(records) != 1:
        raise MessageError(f"expected an ArrayRecord {name!r}; found {len(records)} ArrayRecords: {shown([*records])}")
    return next(iter(records.values()))


def sent_model(content: RecordDict) -> ArrayRecord:
    """The model's arrays in a strategy's message, in the record `arrays` or under another name.

    This project's strategies put them first. Another strategy must call them `arrays` or send no other arrays.
    """
    records = arrays_in(content)
    is_ours = any(key.startswith(protocol.PREFIX) for config in configs_in(content).values() for key in config)
    return arrays_of(content, next(iter(records)) if is_ours and records and "arrays" not in records else "arrays")


def other_arrays(content: RecordDict) -> dict[str, Arrays]:
    """The records of arrays in a strategy's message besides the model, by name."""
    model = sent_model(content)
    return {name: unpack(record) for name, record in arrays_in(content).items() if record is not model}


def metrics_of(content: RecordDict) -> MetricRecord:
    """The metrics of a reply; raises MessageError unless it has exactly one MetricRecord."""
    records = list(metrics_in(content).values())
    if len(records) != 1:
        raise MessageError(f"the reply has {len(records)} MetricRecords; expected one")
    return records[0]


def mean_of_metrics(contents: Sequence[RecordDict], key: str) -> MetricRecord:
    """The mean of each metric over the clients that report it as one number, weighted by the metric `key`.

    A client leaves out a metric that is undefined on its examples, such as the AUC if all have one class. A metric
    needs two clients, or half of them: one client cannot fill a run's files.
    """
    records = [metrics_of(content) for content in contents]
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        if name == key or not has_mean(name):
            continue
        own: list[tuple[Any, Any]] = [
            (record[name], record[key]) for record in records if not isinstance(record.get(name, []), list)
        ]
        total = sum(weight for _, weight in own)
        if total and len(own) >= min(2, len(records) / 2):
            means[name] = sum(value * (weight / total) for value, weight in own)
    return MetricRecord(means)


def has_mean(name: str) -> bool:
    """Whether a metric has a mean: it is no identifier, and counts no examples, as `own-num-examples` does."""
    return name not in (protocol.PARTITION, protocol.BATCH_EXAMPLES) and not name.endswith(protocol.NUM_EXAMPLES)


def common_metrics(replies: Sequence[protocol.Config]) -> list[MetricRecord]:
    """The metrics of each reply that are one number in all replies: strategies of Flower expect these only."""
    numbers = [{key for key, value in metrics.items() if not isinstance(value, list)} for metrics in replies]
    common = set.intersection(*numbers) if numbers else set()
    return [MetricRecord({key: value for key, value in metrics.items() if key in common}) for metrics in replies]


# What the errors of other projects' ClientApps mean, by a part of their text.
_CURES = {
    # KeyError for 'fitins.parameters' or 'evaluateins.parameters'
    "ins.parameters'": (
        "its ClientApp was made with a client_fn, which works only with Flower's old API; make it with "
        "fedbn_flwr.client_app (docs/flower.md)"
    ),
    "No query function registered with name 'exchange'": (
        "its ClientApp does not support exchanges; serve the client with fedbn_flwr.client_app"
    ),
    "No query function registered with name 'survey'": (
        "its version of fedbn-flwr has no surveys; install the server's version there"
    ),
    "Missing key(s) in state_dict": (
        "its ClientApp loads a whole state dict, but the server sends neither what stays on the client nor what its "
        "first model lacks; serve it by fedbn_flwr.client_app with a BNClient"
    ),
}


def reason_of(reply: Message) -> str:
    """The reason of an error reply that has passed the gate."""
    reason = str(reply.error.reason)
    is_ours = reason.startswith("client ")
    return next((cure for text, cure in _CURES.items() if text in reason and not is_ours), reason)


def refusal(reply: Message, reason: str, code: int = ErrorCode.MOD_FAILED_PRECONDITION) -> Message:
    """The reply as an error with this reason; the original keeps its content."""
    # Not Message(error, reply_to=...), which would change the reply's metadata.
    return Message(error=Error(code, one_line(reason)), metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


class OwnContent(RecordDict):
    """The content of a message that its receiver alone has, and may change."""


def with_content(message: Message, content: RecordDict) -> Message:
    """A copy of the message with other content."""
    changed = copy.copy(message)
    changed.content = content
    return changed


def with_config(message: Message, more: protocol.Config, without: Collection[str] = ()) -> Message:
    """A copy of the message with these additional entries in its config, and without these keys."""
    rest = {key: value for key, value in config_of(message.content).items() if key not in without}
    name = next(iter(configs_in(message.content)))
    return with_content(message, RecordDict({**message.content, name: ConfigRecord({**rest, **more})}))


def with_arrays(message: Message, change: Callable[[ArrayRecord], ArrayRecord]) -> Message:
    """A copy of the message with changed arrays of the model; the original keeps its content."""
    arrays = arrays_of(message.content)
    name = next(name for name, record in message.content.items() if record is arrays)
    return with_content(message, RecordDict({**message.content, name: change(arrays)}))
