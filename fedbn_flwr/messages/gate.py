"""The gate: every reply of a client is checked here before the ledger, wrappers and rules read it.

Clients are machines of other people, so a reply may contain anything. The gate reads each array once and keeps it in
memory, checks each metric by its type, and never raises: a reply passes, or it becomes an error reply with the reason.
Behind the gate

- arrays are NumPy arrays of numbers with the declared dtype and shape,
- metrics are finite numbers or lists of them, and numbers of examples are between 0 and 2**31,
- a partition is a whole number, zero or more.

What depends on the model or the round (`fault`, `Rule.problem`) is checked where these are known.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr.errors import MessageError
from fedbn_flwr.norms.roles import Role, roles, split_by_role
from fedbn_flwr.tasks import SHARES

from . import protocol
from .aggregate import Arrays, absurd, fault
from .arrays import arrays_in, configs_in, held, metrics_in, record_of, unpack

MOST_EXAMPLES = 2**31
_LARGEST = 1e39  # above the largest float32; sums and squares of such metrics are finite
_LARGEST_INTEGER = 2**63  # the files of a run have 64 bits; -2**63 has no opposite
_MOST_METRICS, _LONGEST_NAME = 1000, 1000  # each is in every line of a run's files, and a column of its tables
_MOST_BYTES = 1 << 18  # of names and numbers; of 1,000 metrics, or lists with a number for each of 30,000 classes
_TEXT_LIMIT = 2000  # bytes of a reason
# Also after the name of a test set.
_COUNTS = (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES, protocol.BATCH_VALUES, protocol.EXCHANGES_LEFT)
# The last words of metrics between 0 and 1, also after the name of a test set.
_SHARES = frozenset(name.rpartition("_")[2] for name in SHARES)


class Gated(list[Message]):
    """Replies that have passed the gate."""


def gate(replies: Iterable[Message]) -> Gated:
    """The replies; each one that may not pass is replaced by an error with the reason."""
    return replies if isinstance(replies, Gated) else Gated(map(_passed, replies))


def checked(content: RecordDict) -> RecordDict:
    """The content with its arrays in memory; MessageError names the first record or key that may not pass."""
    read: dict[str, ArrayRecord] = {}
    for name, record in content.items():
        match record:
            case ArrayRecord():
                if (arrays := held(record)) is not record:
                    read[name] = arrays
            case MetricRecord():
                _check_metrics(record)
            case ConfigRecord():
                if protocol.PARTITION in record:
                    _check_whole(protocol.PARTITION, record[protocol.PARTITION])
            case _:
                raise MessageError(f"its record {shown(name)} is a {type(record).__name__}")
    return RecordDict({**content, **read}) if read else content


def _passed(reply: Message) -> Message:
    if not (reply.has_content() or reply.has_error()):
        return refused(reply, "it has neither content nor an error")
    if not reply.has_content():  # Flower's strategies log the reason as it is
        reason = one_line(str(reply.error.reason or "")) or f"error code {reply.error.code}"
        return reply if reason == reply.error.reason else refused(reply, reason, reply.error.code)
    try:
        content = checked(reply.content)
    except MessageError as error:  # names the client, as the errors that clients send do
        partition = partition_of(reply.content)
        return refused(reply, str(error) if partition is None else f"client {partition}: {error}")
    except Exception:  # the texts of NumPy's and Flower's errors are about their own interfaces
        return refused(reply, "its content cannot be read")
    return reply if content is reply.content else with_content(reply, content)


def _check_metrics(metrics: MetricRecord) -> None:
    if len(metrics) > _MOST_METRICS:
        raise MessageError(f"it has {len(metrics)} metrics; expected at most {_MOST_METRICS}")
    size = sum(len(key.encode()) + 8 * (len(value) if isinstance(value, list) else 1) for key, value in metrics.items())
    if size > _MOST_BYTES:
        raise MessageError(f"its metrics have {size:,} bytes of names and numbers; expected at most {_MOST_BYTES:,}")
    for key, value in metrics.items():
        if len(key) > _LONGEST_NAME:
            raise MessageError(f"its metric {shown(key)} has a name of {len(key)} characters; expected {_LONGEST_NAME}")
        if key in (protocol.PARTITION, protocol.STATE_ROUND):
            _check_whole(key, value)
            continue
        is_count, expected = _named(key).endswith(_COUNTS), "a finite number (the client diverged?)"
        numbers: Any = [value]
        if is_count:
            expected = "a number from 0 to 2**31"
        elif isinstance(value, list) and key != protocol.TRAIN_LOSS:
            numbers, expected = value, "finite numbers"
        if not all(map(_is_number, numbers)) or (is_count and not 0 <= numbers[0] <= MOST_EXAMPLES):
            raise MessageError(f"its metric {shown(key)} is {shown(value)}, expected {expected}")


def _named(key: str) -> str:
    """The name of a metric: the files of a run have one for `own-accuracy` and `own_accuracy`."""
    return key.replace("_", "-")


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return abs(value) <= _LARGEST  # false for NaN
    return type(value) is int and abs(value) < _LARGEST_INTEGER  # not a bool


def _check_whole(key: str, value: object) -> None:
    if not _is_partition(value):
        raise MessageError(f"its {key!r} is {shown(value)}, expected a whole number from 0 to 2**31")


def _is_partition(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_EXAMPLES


# --- the typed content of a reply --------------------------------------------


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply that has passed the gate."""

    arrays: Arrays  # of the model
    metrics: Mapping[str, Any]  # numbers, and lists of them
    records: Mapping[str, Arrays]  # the additional records that the rules requested, by name
    message: Message


def read_reply(message: Message, name: str = "arrays", records: Collection[str] | None = ()) -> Reply:
    """The content of a reply that has passed the gate; `name` is the record of the model's arrays.

    `records` are the names of additional records of arrays; with None the reply needs no arrays. MessageError if it is
    another reply.
    """
    content = message.content
    if records is None:
        return Reply({}, metrics_of(content), {}, message)
    extras = {key: unpack(record) for key, record in arrays_in(content).items() if key in records}
    arrays = arrays_of(RecordDict({key: content[key] for key in content if key not in extras}), name)
    return Reply(unpack(arrays), metrics_of(content), extras, message)


def partition_of(content: RecordDict) -> int | None:
    """The partition that a client reports, in a ConfigRecord or among its metrics; None if it is no valid one."""
    for record in content.values():
        value = record.get(protocol.PARTITION) if isinstance(record, MetricRecord | ConfigRecord) else None
        if _is_partition(value):
            return int(value)  # type: ignore[arg-type]
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
        raise MessageError(f"expected an ArrayRecord {name!r}, found {len(records)} ArrayRecords: {shown([*records])}")
    return next(iter(records.values()))


def sent_model(content: RecordDict) -> ArrayRecord:
    """The model's arrays in a message of a strategy: `arrays`, or another name that the strategy gives them.

    A strategy of this project puts them first. Which of the records of another strategy they are must be clear.
    """
    records = arrays_in(content)
    is_ours = any(key.startswith(protocol.PREFIX) for config in configs_in(content).values() for key in config)
    return arrays_of(content, next(iter(records)) if is_ours and records and "arrays" not in records else "arrays")


def metrics_of(content: RecordDict) -> MetricRecord:
    """The metrics of a reply, which has one MetricRecord."""
    records = list(metrics_in(content).values())
    if len(records) != 1:
        raise MessageError(f"the reply has {len(records)} MetricRecords, expected one")
    return records[0]


def odd_metrics(found: Mapping[int, Reply]) -> dict[int, str]:
    """The reasons to refuse replies with a metric of another form than that of most clients, by node.

    A form is one number, a list of them, or one number out of range: some ClientApps report percentages, or equal
    weights as numbers of examples, but then most clients do.
    """
    problems: dict[int, str] = {}
    metrics = {node: {_named(key): value for key, value in reply.metrics.items()} for node, reply in found.items()}
    for key in dict.fromkeys(key for each in metrics.values() for key in each):
        forms = {node: _form(key, each) for node, each in metrics.items() if key in each}
        counts = Counter(forms.values())
        most = min(counts, key=lambda form: (-counts[form], form))  # of equally frequent forms one number
        problems |= {
            node: f"its metric {shown(key)} is {shown(metrics[node][key])}, that of other clients is {most[1]}"
            for node, form in forms.items()
            if form != most and (form[0], most[0]) != (0, 1)  # a percentage may be below 1
        }
    return problems


def _form(key: str, metrics: Mapping[str, Any]) -> tuple[int, str]:
    value, examples = metrics[key], metrics.get(protocol.NUM_EXAMPLES)
    if isinstance(value, list):
        return 2, "a list of numbers"
    if key.rpartition("-")[2] in _SHARES and not 0 <= value <= 1 + 1e-6:  # a mean of float32 may be above 1
        return 1, "above 1"
    if key == protocol.BATCH_EXAMPLES and examples is not None and value > examples:
        return 1, f"above its {protocol.NUM_EXAMPLES!r}"
    return 0, "one number from 0 to 1" if key.rpartition("-")[2] in _SHARES else "one number"


def common_metrics(records: Sequence[Mapping[str, Any]]) -> list[MetricRecord]:
    """Of each record the metrics that are one number in all of them, since only these have a mean.

    A client leaves out a metric that its examples do not define, such as the AUC if all have one class.
    """
    numbers = [{key for key, value in record.items() if not isinstance(value, list)} for record in records]
    common = set.intersection(*numbers) if numbers else set()
    return [MetricRecord({key: value for key, value in record.items() if key in common}) for record in records]


def number_problem(metrics: Mapping[str, Any], key: str) -> str | None:
    """The reason why a metric cannot be a weight, or None."""
    value = metrics.get(key)
    if value is None:
        return f"the reply's metrics lack {key!r}; they have {', '.join(map(shown, [*metrics][:8])) or 'none'}"
    if isinstance(value, list) or not 0 <= value <= MOST_EXAMPLES:
        return f"the reply's metrics have {key!r} = {shown(value)}, expected a number, zero or more"
    return None


def record_problems(found: Mapping[int, Reply], name: str, model: Arrays) -> dict[int, str]:
    """The reasons why the record `name` of replies is unusable, by node.

    The record must have an array for each parameter that clients train. The server does not know these parameters,
    since it cannot distinguish buffers and frozen parameters, so it expects the set of keys that most replies have.
    """
    like = split_by_role(model, roles(model), {Role.WEIGHTS, Role.AFFINE})[0]
    missing = "is missing (is the client served by fedbn_flwr.client_app, with a BNClient?)"
    problems = {node: missing for node, reply in found.items() if name not in reply.records}
    read = {node: reply.records[name] for node, reply in found.items() if name in reply.records}
    votes = Counter(frozenset(arrays) for arrays in read.values() if arrays.keys() <= like.keys())
    keys = max(votes, key=lambda keys: (votes[keys], len(keys)), default=frozenset(like))
    faults = {node: fault(arrays, like, keys) or overflow(arrays, {}) for node, arrays in read.items()}
    problems |= {node: problem for node, problem in faults.items() if problem is not None}
    left = [node for node in read if node not in problems]
    far = absurd([read[node] for node in left], {})
    problems |= {left[i]: problem for i, problem in far.items()}
    return {node: f"its record {name!r}: {problem}" for node, problem in problems.items()}


def fault_problems(found: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
    """The reasons why the arrays of replies are unusable, by node, where the server does not know what to expect.

    It expects the keys, shapes and dtypes that most replies have; of equally frequent ones those of `sent`, the arrays
    in its messages, or else the most arrays.
    """

    def form(values: Arrays) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple(sorted((key, value.dtype.str, value.shape) for key, value in values.items()))

    forms = {node: form(reply.arrays) for node, reply in found.items()}
    votes, of_sent = Counter(forms.values()), form(sent)
    most = max(votes, key=lambda each: (votes[each], each == of_sent, len(each), each), default=())
    like = next((reply.arrays for node, reply in found.items() if forms[node] == most), {})
    faults = {node: fault(reply.arrays, like) for node, reply in found.items()}
    return {node: problem for node, problem in faults.items() if problem is not None}


def overflow(arrays: Arrays, sent: Arrays) -> str | None:
    """The reason why a strategy that squares or sums the clients' changes cannot use a reply, or None.

    Flower's optimisers and robust strategies square them, Scaffold adds them up over the rounds: from one infinite
    value on, the model is never finite again.
    """
    for key, value in arrays.items():
        if value.dtype.kind != "f" or not value.size:
            continue
        with np.errstate(over="ignore"):
            change = value - sent[key] if key in sent and sent[key].shape == value.shape else value
        most, limit = float(np.abs(change).max()), math.sqrt(np.finfo(value.dtype).max) / 10
        if not most <= limit:
            return f"{key!r} changed by up to {most:.2g}; expected at most {limit:.2g}, so that squares can be added"
    return None


# --- errors, and changed messages --------------------------------------------


# What Flower's errors mean for ClientApps without a handler, by a part of their text.
_NO_HANDLER = {
    # KeyError for 'fitins.parameters' or 'evaluateins.parameters'
    "ins.parameters'": (
        "its ClientApp was made with a client_fn, which serves servers of Flower's old API only; make it by "
        "fedbn_flwr.client_app (docs/old-api.md)"
    ),
    "No query function registered with name 'cohort'": (
        "its ClientApp does not support exchanges; serve the client with fedbn_flwr.client_app"
    ),
}


def reason_of(reply: Message) -> str:
    """The reason of an error reply that has passed the gate."""
    reason = str(reply.error.reason)
    return next((cure for text, cure in _NO_HANDLER.items() if text in reason), reason)


def refused(reply: Message, reason: str, code: int = ErrorCode.MOD_FAILED_PRECONDITION) -> Message:
    """The reply as an error with this reason; the original keeps its content."""
    # Not Message(error, reply_to=...), which would change the reply's metadata.
    return Message(error=Error(code, one_line(reason)), metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def with_content(message: Message, content: RecordDict) -> Message:
    """A copy of the message with other content."""
    changed = copy.copy(message)
    changed.content = content
    return changed


def with_config(message: Message, more: Mapping[str, Any]) -> Message:
    """A copy of the message with these entries in its config too."""
    name, config = next(iter(configs_in(message.content).items()))
    return with_content(message, RecordDict({**message.content, name: ConfigRecord({**config, **more})}))


def with_arrays(message: Message, change: Callable[[ArrayRecord], ArrayRecord]) -> Message:
    """A copy of the message with changed arrays of the model; the original keeps its content."""
    arrays = arrays_of(message.content)
    name = next(name for name, record in message.content.items() if record is arrays)
    return with_content(message, RecordDict({**message.content, name: change(arrays)}))


def without_norm_state(arrays: ArrayRecord) -> ArrayRecord:
    """The arrays without statistics and counters of batch norm."""
    return record_of(split_by_role(arrays, roles(arrays), {Role.STATISTICS, Role.COUNTER})[1])


def shown(value: object) -> str:
    """A value of a client in a message, at most 80 characters."""
    match value:
        case int() if value.bit_length() > 64:  # Python refuses to print integers of thousands of digits
            return f"an integer of {value.bit_length()} bits"
        case list() if len(value) > 5:
            return f"a list of {len(value)} values"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# The text of Flower for an exception of a ClientApp, here for one that names the client.
_RAISED = re.compile(r"<class 'fedbn_flwr\.[\w.]{1,100}'>:<'(.*)'>", re.DOTALL)


def one_line(text: str) -> str:
    """The text in one line without control characters, since it may be a client's."""
    line = " ".join(_RAISED.sub(r"\1", text).split())
    printable = line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
    data = printable.encode()
    return printable if len(data) <= _TEXT_LIMIT else data[:_TEXT_LIMIT].decode(errors="ignore") + "..."
