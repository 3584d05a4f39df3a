"""Checks of replies where the server cannot know what to expect, so that the majority of the clients decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedbn_flwr.norms.roles import Role, of_roles
from fedbn_flwr.tasks import SHARES

from . import protocol
from .aggregate import Arrays, absurd, arrays_problem
from .quote import shown
from .reply import Reply, metric_name

# The last words of the names of metrics between 0 and 1; the name of a test set may come before them.
_SHARES = frozenset(name.rpartition("_")[2] for name in SHARES)


def metric_problems(replies: Mapping[int, Reply]) -> dict[int, str]:
    """The problems of replies that report a metric in another form than most clients, by node.

    A form is one number, a list of numbers, or one number out of range. The last is fine if most clients report it,
    since some ClientApps report percentages, or equal weights as numbers of examples.
    """
    problems: dict[int, str] = {}
    metrics = {
        node: {metric_name(key): value for key, value in reply.metrics.items()} for node, reply in replies.items()
    }
    for key in dict.fromkeys(key for own in metrics.values() for key in own):
        forms = {node: _form(key, own) for node, own in metrics.items() if key in own}
        counts = Counter(forms.values())
        most = min(counts, key=lambda form: (-counts[form], form))  # if two forms are equally frequent, one number
        problems |= {
            node: f"its metric {shown(key)} is {shown(metrics[node][key])}; other clients report {most[1]}"
            for node, form in forms.items()
            if form != most and (form[0], most[0]) != (0, 1)  # a percentage may be below 1
        }
    return problems


def _form(key: str, metrics: protocol.Config) -> tuple[int, str]:
    value, examples = metrics[key], metrics.get(protocol.NUM_EXAMPLES)
    if isinstance(value, list):
        return 2, "a list of numbers"
    if key.rpartition("-")[2] in _SHARES and not 0 <= value <= 1 + 1e-6:  # a mean of float32 may be above 1
        return 1, "a number outside 0 to 1"
    if key == protocol.BATCH_EXAMPLES and examples is not None and value > examples:
        return 1, f"above its {protocol.NUM_EXAMPLES!r}"
    return 0, "one number from 0 to 1" if key.rpartition("-")[2] in _SHARES else "one number"


def record_problems(replies: Mapping[int, Reply], name: str, model: Arrays) -> dict[int, str]:
    """The problems of the record `name` in replies, by node.

    The record must have an array for each parameter that clients train. The server cannot tell these from buffers and
    frozen parameters, so it expects the keys that most replies have.
    """
    like = of_roles(model, {Role.WEIGHTS, Role.AFFINE})
    missing = "is missing (is the client served by fedbn_flwr.client_app, with a BNClient?)"
    problems = {node: missing for node, reply in replies.items() if name not in reply.records}
    read = {node: reply.records[name] for node, reply in replies.items() if name in reply.records}
    votes = Counter(frozenset(arrays) for arrays in read.values() if arrays.keys() <= like.keys())
    keys = max(votes, key=lambda keys: (votes[keys], len(keys)), default=frozenset(like))
    problems |= {
        node: problem
        for node, arrays in read.items()
        if (problem := arrays_problem(arrays, like, keys) or overflow(arrays, {})) is not None
    }
    left = [node for node in read if node not in problems]
    far = absurd([read[node] for node in left], {})
    problems |= {left[i]: problem for i, problem in far.items()}
    return {node: f"its record {name!r}: {problem}" for node, problem in problems.items()}


def arrays_problems(replies: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
    """The problems of the arrays in replies, by node, where the server does not know what to expect.

    It expects the keys, shapes and dtypes that most replies have. In a tie it prefers the ones of `sent`, the arrays in
    its messages, and after them the reply with the most arrays.
    """

    def form(values: Arrays) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple(sorted((key, value.dtype.str, value.shape) for key, value in values.items()))

    forms = {node: form(reply.arrays) for node, reply in replies.items()}
    votes, sent_form = Counter(forms.values()), form(sent)
    most = max(
        votes, key=lambda candidate: (votes[candidate], candidate == sent_form, len(candidate), candidate), default=()
    )
    like = next((reply.arrays for node, reply in replies.items() if forms[node] == most), {})
    return {
        node: problem for node, reply in replies.items() if (problem := arrays_problem(reply.arrays, like)) is not None
    }


def overflow(arrays: Arrays, sent: Arrays) -> str | None:
    """Why a strategy that squares the clients' changes, or adds them up, cannot use a reply; or None.

    Flower's optimisers and robust strategies square the changes, and Scaffold adds them up over the rounds. One
    infinite value would spoil the model for the rest of the run.
    """
    for key, value in arrays.items():
        if value.dtype.kind != "f" or not value.size:
            continue
        with np.errstate(over="ignore"):
            change = value - sent[key] if key in sent and sent[key].shape == value.shape else value
        most, limit = float(np.abs(change).max()), math.sqrt(np.finfo(value.dtype).max) / 10
        if not most <= limit:
            return (
                f"{key!r} changed by up to {most:.2g}; expected at most {limit:.2g}, since larger changes overflow "
                "when squared"
            )
    return None
