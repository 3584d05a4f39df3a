"""The gate: every reply of a client is checked here before the ledger, wrappers and strategies read it.

Clients run on other people's machines, so a reply may contain anything. The gate never raises: a reply passes, or it
becomes an error reply with the reason. It reads each array once and keeps it in memory. Behind the gate

- arrays are NumPy arrays of numbers with the declared dtype and shape,
- metrics are finite numbers or lists of them. A metric of this library is one number in its range, such as a number of
  examples between 0 and 2**31; an accuracy may be a percentage,
- a partition is a whole number, zero or more.

Checks that need the model or the round (`limits.form_problem`, `Rule.problem`) come later, and last the comparisons:
where the server cannot know what to expect, the majority of the clients decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.errors import MessageError
from fedbn_flwr.norms.roles import Role, of_roles
from fedbn_flwr.tasks import ROUNDING, range_of

from . import protocol
from .arrays import Array, Arrays, record_of
from .limits import MOST_EXAMPLES, MOST_TIMES, form_problem, largest, values_problems
from .quote import one_line, shown
from .reply import Reply, is_partition, metric_name, partition_of, refusal, with_content

_LARGEST = largest(np.dtype(float))
_LARGEST_INTEGER = 2**63  # the files of a run have 64 bits, and -2**63 has no positive counterpart
_MOST_METRICS, _LONGEST_NAME = 1000, 1000  # each metric is in every line of a run's files, and a column of its tables
_MANY = 10_000_000  # examples
_MOST_BYTES = 1 << 18  # in names and numbers: enough for 1,000 metrics, or a list with numbers of 30,000 classes
# The last words of the names of counts; the name of a test set may come before them.
_COUNTS = (protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES, protocol.BATCH_VALUES)


class Gated(list[Message]):
    """Replies that have passed the gate."""


def gate(replies: Iterable[Message]) -> Gated:
    """The replies; an error with the reason replaces each one that must not pass."""
    return replies if isinstance(replies, Gated) else Gated(map(_checked_reply, replies))


def gated_content(content: RecordDict) -> RecordDict:
    """The content with its arrays in memory; MessageError names the first record or key that must not pass."""
    read: dict[str, ArrayRecord] = {}
    for name, record in content.items():
        match record:
            case ArrayRecord():
                if not {*map(type, record.values())} <= {Array}:
                    read[name] = record_of(record)
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
        content = gated_content(reply.content)
    except MessageError as error:  # name the client, as the errors from clients do
        partition = partition_of(reply.content)
        return refusal(reply, str(error) if partition is None else f"client {partition}: {error}")
    except Exception:  # the texts of NumPy's and Flower's errors are about their own interfaces
        return refusal(reply, "its content cannot be read")
    return reply if content is reply.content else with_content(reply, content)


def _check_metrics(metrics: MetricRecord) -> None:
    longest = max(metrics, key=len, default="")
    size = sum(len(key.encode()) + 8 * (len(value) if isinstance(value, list) else 1) for key, value in metrics.items())
    if len(metrics) > _MOST_METRICS or len(longest) > _LONGEST_NAME or size > _MOST_BYTES:
        raise MessageError(
            f"it has {len(metrics):,} metrics, names of up to {len(longest):,} characters ({shown(longest)}), and "
            f"{size:,} bytes of names and numbers; at most {_MOST_METRICS:,}, {_LONGEST_NAME:,} and {_MOST_BYTES:,} "
            "are accepted"
        )
    for key, value in metrics.items():
        if key in (protocol.PARTITION, protocol.STATE_ROUND):
            _check_whole(key, value)
            continue
        limits = (0, MOST_EXAMPLES) if metric_name(key).endswith(_COUNTS) else range_of(key)
        numbers: Any = value if isinstance(value, list) and limits is None else [value]
        low, high = limits or (-math.inf, math.inf)
        are_numbers = all(map(_is_number, numbers))
        if not (are_numbers and all(low <= number <= high + ROUNDING for number in numbers)):
            expected = f"a number from {low:g} to {high}" if are_numbers else "a finite number (the client diverged?)"
            raise MessageError(f"its metric {shown(key)} is {shown(value)}, expected {expected}")


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return abs(value) <= _LARGEST  # false for NaN
    return type(value) is int and abs(value) < _LARGEST_INTEGER  # not a bool


def _check_whole(key: str, value: object) -> None:
    if not is_partition(value):
        raise MessageError(f"its {key!r} is {shown(value)}, expected a whole number from 0 to 2**31")


# --- what only a comparison with the other replies shows ---


def count_problems(replies: Mapping[int, Reply]) -> dict[int, str]:
    """The problems of replies with an absurd number of examples, by node.

    Such a number is above ten million, and more than 1,000 times the median of at least two others.
    """
    problems: dict[int, str] = {}
    given = [(node, metric_name(key), value) for node, reply in replies.items() for key, value in reply.metrics.items()]
    for node, key, count in given:
        if key.endswith(_COUNTS) and count > _MANY:
            others = [number for other, name, number in given if name == key and other != node]
            if len(others) > 1 and count > MOST_TIMES * (middle := median(others)):
                problems[node] = f"its metric {shown(key)} is {shown(count)}; the median of the others is {middle:g}"
    return problems


def record_problems(replies: Mapping[int, Reply], name: str, model: Arrays) -> dict[int, str]:
    """The problems of the record `name` in replies, by node.

    The record must have an array for each parameter that clients train. The server cannot tell these from buffers and
    frozen parameters, so it expects the keys that most replies have.
    """
    read = {node: reply.records[name] for node, reply in replies.items() if name in reply.records}
    missing = "is missing (is the client served by fedbn_flwr.client_app, with a BNClient?)"
    problems = dict.fromkeys(replies.keys() - read.keys(), missing)
    problems |= form_problems(read, of_roles(model, {Role.WEIGHTS, Role.AFFINE}), only_sent=True)
    problems |= values_problems({node: arrays for node, arrays in read.items() if node not in problems}, {})
    return {node: f"its record {name!r}: {problem}" for node, problem in problems.items()}


def form_problems(cohort: Mapping[int, Arrays], sent: Arrays, *, only_sent: bool = False) -> dict[int, str]:
    """The problems of the form of clients' arrays, by node, where the server does not know what to expect.

    It expects the keys, shapes and dtypes that most clients have; with `only_sent`, those who have other arrays than
    `sent`, the ones in its messages, don't count. In a tie it prefers the form of `sent`, then the most arrays.
    """

    def form(values: Arrays) -> frozenset[tuple[str, str, tuple[int, ...]]]:
        return frozenset((key, value.dtype.str, value.shape) for key, value in values.items())

    forms, sent_form = {node: form(arrays) for node, arrays in cohort.items()}, form(sent)
    votes = Counter(found for found in forms.values() if found <= sent_form or not only_sent)
    most = max(votes, key=lambda found: (votes[found], found == sent_form, len(found), sorted(found)), default=None)
    like = next((arrays for node, arrays in cohort.items() if forms[node] == most), sent)
    return {node: problem for node, arrays in cohort.items() if (problem := form_problem(arrays, like)) is not None}
