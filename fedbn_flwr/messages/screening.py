"""Checks of replies that depend only on their content, not on a round, a strategy or a grid."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from . import protocol
from .aggregate import Arrays, fault
from .arrays import arrays_in, configs_in, metrics_in, record_of, unpack


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply to a train message."""

    node: int
    partition: int | None  # None if the client does not report it
    arrays: Arrays
    metrics: MetricRecord
    records: Mapping[str, Arrays]  # the additional records that the rule requested, by name
    message: Message  # without these records

    def number(self, key: str) -> float:
        """The metric `key`; NaN if it is missing or a list."""
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) else math.nan


def read_reply(message: Message, name: str = "arrays", records: Collection[str] = ()) -> Reply:
    """The content of a reply; MessageError if it cannot be read. `name` is the record of the model's arrays."""
    extras = {key: unpack(record) for key, record in arrays_in(message.content).items() if key in records}
    if extras:
        (message,) = without_records([message], records)
    content = message.content
    metrics = next(iter(metrics_in(content).values()), MetricRecord())
    try:
        arrays = unpack(arrays_of(content, name))
    except MessageError:
        raise
    except Exception as error:  # a client may send anything
        raise MessageError(f"the reply's arrays cannot be read: {error}") from error
    return Reply(message.metadata.src_node_id, partition_of(content), arrays, metrics, extras, message)


def partition_of(content: RecordDict) -> int | None:
    """The partition that a client reports, in a ConfigRecord or among its metrics, or None."""
    records: list[ConfigRecord | MetricRecord] = [*configs_in(content).values(), *metrics_in(content).values()]
    for record in records:
        if isinstance(partition := record.get(protocol.PARTITION), int):
            return partition
    return None


def number_of(reply: Message) -> int:
    """The number of the client that sent a reply: its partition or, if it reports none, its node id."""
    partition = partition_of(reply.content)
    return reply.metadata.src_node_id if partition is None else partition


def arrays_of(content: RecordDict, name: str = "arrays") -> ArrayRecord:
    """The model's arrays: the record `name`, or a record of any name if it is the only ArrayRecord."""
    records = arrays_in(content)
    if name in records:
        return records[name]
    if len(records) != 1:
        raise MessageError(f"expected an ArrayRecord {name!r}, found {len(records)} ArrayRecords: {list(records)}")
    return next(iter(records.values()))


def only_metrics(content: RecordDict) -> MetricRecord:
    records = list(metrics_in(content).values())
    if len(records) != 1:
        raise MessageError(f"the reply has {len(records)} MetricRecords, expected one")
    return records[0]


def number_problem(metrics: MetricRecord, key: str) -> str | None:
    """The reason why a metric cannot be a weight, or None."""
    value = metrics.get(key)
    if isinstance(value, list) or value is None or not math.isfinite(value) or value < 0:
        return f"the reply's metrics have {key!r} = {value!r}, expected a number, zero or more"
    return None


def record_problems(replies: Iterable[Message], name: str, model: Arrays) -> dict[int, str]:
    """The reasons why the record `name` of replies is unusable, by node.

    The record must have an array for each parameter that clients train. The server does not know these parameters,
    since it cannot distinguish buffers and frozen parameters, so it expects the set of keys that most replies have.
    """
    like = split_by_role(model, roles(model), {Role.WEIGHTS, Role.AFFINE})[0]
    read: dict[int, Arrays] = {}
    problems: dict[int, str] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if name not in arrays_in(reply.content):
            problems[node] = "is missing (is the client served by fedbn_flwr.client_app, with a BNClient?)"
            continue
        try:
            read[node] = unpack(arrays_in(reply.content)[name])
        except Exception as error:  # a client may send anything
            problems[node] = f"cannot be read: {error}"
    votes = Counter(frozenset(arrays) for arrays in read.values() if arrays.keys() <= like.keys())
    keys = max(votes, key=lambda keys: (votes[keys], len(keys)), default=frozenset(like))
    problems |= {node: problem for node, arrays in read.items() if (problem := fault(arrays, like, keys)) is not None}
    return {node: f"its record {name!r}: {problem}" for node, problem in problems.items()}


def refuse_records(replies: Sequence[Message], names: Iterable[str], model: Arrays) -> list[Message]:
    """The replies, where each reply with an unusable record among `names` is replaced by an error with the reason."""
    problems: dict[int, str] = {}
    for name in names:
        problems = record_problems([reply for reply in replies if reply.has_content()], name, model) | problems
    return [
        refused(reply, problems[reply.metadata.src_node_id])
        if reply.has_content() and reply.metadata.src_node_id in problems
        else reply
        for reply in replies
    ]


def with_records(messages: Iterable[Message], records: Mapping[str, ArrayRecord]) -> list[Message]:
    """Copies of the messages with additional records; the originals keep their content."""
    return [with_content(message, RecordDict({**message.content, **records})) for message in messages]


def with_arrays(message: Message, change: Callable[[ArrayRecord], ArrayRecord]) -> Message:
    """A copy of the message with changed arrays of the model; the original keeps its content."""
    arrays = arrays_of(message.content)
    name = next(name for name, record in message.content.items() if record is arrays)
    return with_content(message, RecordDict({**message.content, name: change(arrays)}))


def without_norm_state(arrays: ArrayRecord) -> ArrayRecord:
    """The arrays without statistics and counters of batch norm."""
    return record_of(split_by_role(arrays, roles(arrays), {Role.STATISTICS, Role.COUNTER})[1])


def without_records(messages: Iterable[Message], names: Collection[str]) -> list[Message]:
    """Copies of the messages without the records `names`; the originals keep their content."""
    return [
        with_content(message, RecordDict({key: value for key, value in message.content.items() if key not in names}))
        for message in messages
    ]


def with_common_metrics(replies: Iterable[Message]) -> list[Message]:
    """The replies with the metrics that all of them have: Flower's strategies end the run if clients differ.

    A client leaves out a metric that its images do not define, such as the AUC of images of one class.
    """
    messages = list(replies)
    keys = [set(record) for reply in messages if reply.has_content() for record in metrics_in(reply.content).values()]
    if all(each == keys[0] for each in keys):
        return messages
    common = set.intersection(*keys)

    def reduced(reply: Message) -> Message:
        records = {
            name: MetricRecord({key: value for key, value in record.items() if key in common})
            for name, record in metrics_in(reply.content).items()
        }
        return with_content(reply, RecordDict({**reply.content, **records}))

    return [reduced(reply) if reply.has_content() else reply for reply in messages]


def with_content(message: Message, content: RecordDict) -> Message:
    changed = copy.copy(message)
    changed.content = content
    return changed


def refused(reply: Message, reason: str) -> Message:
    """The reply as an error with this reason; the original keeps its content."""
    # Not Message(error, reply_to=...), which would change the reply's metadata.
    changed = copy.copy(reply)
    changed.__dict__["_content"] = None
    changed.__dict__["_error"] = Error(ErrorCode.MOD_FAILED_PRECONDITION, reason)
    return changed


def check_some_left(server_round: int, replies: Sequence[Message]) -> None:
    """Raise RunFailed if every reply is an error, since Flower's strategies would continue with the old model."""
    if replies and not any(reply.has_content() for reply in replies):
        reasons = sorted(f"node {r.metadata.src_node_id}: {one_line(str(r.error.reason))}" for r in replies)
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise RunFailed(f"round {server_round}: 0 of {len(replies)} clients sent a usable reply:{listed}")


def one_line(text: str) -> str:
    return " ".join(text.split())
