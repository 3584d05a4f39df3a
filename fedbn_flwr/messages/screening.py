"""Checks and changes of several replies that depend on the model, but not on a strategy or a grid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedbn_flwr.norms.roles import Role, roles, split_by_role

from . import protocol
from .aggregate import Arrays, fault
from .arrays import metrics_in, record_of
from .gate import Reply, arrays_of, with_content

# What Flower's errors mean for ClientApps without a handler, by a part of their text.
_NO_HANDLER = {
    # KeyError for 'fitins.parameters' or 'evaluateins.parameters'
    "ins.parameters'": (
        "its ClientApp was made with a client_fn, which serves servers of Flower's old API only; make it by "
        'fedbn_flwr.client_app (docs/plugin.md, "From Flower\'s old API")'
    ),
    "No query function registered with name 'cohort'": (
        "its ClientApp does not support exchanges; serve the client with fedbn_flwr.client_app"
    ),
}


def reason_of(reply: Message) -> str:
    """The reason of an error reply that has passed the gate."""
    reason = str(reply.error.reason)
    return next((cure for text, cure in _NO_HANDLER.items() if text in reason), reason)


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
    problems |= {node: problem for node, arrays in read.items() if (problem := fault(arrays, like, keys)) is not None}
    return {node: f"its record {name!r}: {problem}" for node, problem in problems.items()}


def fault_problems(arrays: Mapping[int, Arrays], sent: Arrays | None = None) -> dict[int, str]:
    """The reasons why the arrays of replies are unusable, by node, where the server does not know what to expect.

    It expects the keys, shapes and dtypes that most replies have; of equally frequent ones those of `sent`, the arrays
    in its messages. If no two replies are alike, only their values are checked.
    """

    def form(values: Arrays) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple(sorted((key, value.dtype.str, value.shape) for key, value in values.items()))

    forms = {node: form(values) for node, values in arrays.items()}
    votes, of_sent = Counter(forms.values()), None if sent is None else form(sent)
    most = max(votes, key=lambda each: (votes[each], each == of_sent), default=None)
    differ = most is not None and votes[most] == 1 and most != of_sent
    like = next((values for node, values in arrays.items() if forms[node] == most), {})
    found = {node: fault(values, values if differ else like) for node, values in arrays.items()}
    return {node: problem for node, problem in found.items() if problem is not None}


def overflow(arrays: Arrays, sent: Arrays) -> str | None:
    """The reason why a strategy that squares the clients' changes cannot use a reply, or None.

    Flower's optimisers and robust strategies do: from one infinite square FedYogi's model is never finite again.
    """
    for key, value in arrays.items():
        if value.dtype.kind != "f" or not value.size:
            continue
        with np.errstate(over="ignore"):
            change = value - sent[key] if key in sent and sent[key].shape == value.shape else value
        most, limit = float(np.abs(change).max()), math.sqrt(np.finfo(value.dtype).max) / 10
        if not most <= limit:
            return f"{key!r} changed by up to {most:.2g}; expected at most {limit:.2g}, whose squares can be added"
    return None


def with_records(messages: Iterable[Message], records: Mapping[str, ArrayRecord]) -> list[Message]:
    """Copies of the messages with additional records; the originals keep their content."""
    return [with_content(message, RecordDict({**message.content, **records})) for message in messages]


def with_arrays(message: Message, change: Callable[[ArrayRecord], ArrayRecord]) -> Message:
    """A copy of the message with changed arrays of the model; the original keeps its content."""
    arrays = arrays_of(message.content)
    name = next(name for name, record in message.content.items() if record is arrays)
    return with_content(message, RecordDict({**message.content, name: change(arrays)}))


def evaluation_key(replies: Iterable[Message], key: str) -> str:
    """The metric that weights the replies of an evaluation: the number of examples if none of them has `key`.

    Such keys are the training loss and the size of the first batch.
    """
    records = [record for reply in replies if reply.has_content() for record in metrics_in(reply.content).values()]
    return key if any(key in record for record in records) else protocol.NUM_EXAMPLES


def without_norm_state(arrays: ArrayRecord) -> ArrayRecord:
    """The arrays without statistics and counters of batch norm."""
    return record_of(split_by_role(arrays, roles(arrays), {Role.STATISTICS, Role.COUNTER})[1])
