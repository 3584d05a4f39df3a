"""The server's loop over the exchanges of one round.

The loop does not depend on messages or streams: a `Carrier` sends the agreements and collects the clients'
contributions. A client without a valid contribution is excluded from the rest of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.aggregate import pooled_moments, weighted_mean
from fedbn_flwr.messages.bounds import Bounds

from .codec import Agreement, Contribution

# The tensors of each kind of contribution.
_TENSORS = {"moments": {"mean", "var"}, "mean": {"mean"}, "variance": {"var"}, "gradients": {"mean", "var"}}
_MOST_EXCHANGES = 100_000  # in a round
_LARGEST = 1e18  # of an agreed value: its square and its sums are finite in float32

Answers = Mapping[int, Contribution | str]  # by node; a string is the reason why there is no contribution
Weigh = Callable[[Contribution], float]  # p_i, up to scale
# Returns the nodes that stay in the round, in order. Arguments: the name of the exchange in messages; the partition
# that each node reports; the reasons for rejecting an answer, with the node; the number of nodes asked. Logs the
# reasons; raises RunFailed if too few nodes remain.
Admit = Callable[[str, Mapping[int, int | None], Sequence[tuple[int, str]], int], list[int]]

Report = Callable[[int, int], None]  # how many exchanges are done, of how many


class Carrier(Protocol):
    """Sends an agreement to nodes and collects their next contributions."""

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        """The contributions to exchange `step` + 1; `agreement` is that of the previous exchange, None at first.

        A node that does not answer in time has no entry.
        """


@dataclass(frozen=True)
class ExchangesDone:
    """The end of a round's exchanges."""

    nodes: list[int]  # the nodes that took part in all exchanges
    steps: int
    agreement: Agreement  # the last agreement, which the nodes have not received yet


def run_exchanges(
    carrier: Carrier,
    nodes: Sequence[int],
    what: str,
    weigh: Weigh,
    admit: Admit,
    report: Report | None = None,
    bounds: Bounds | None = None,
) -> ExchangesDone:
    """All exchanges of the round; `what` is the round's name in messages."""
    agreement: Agreement | None = None
    step, remaining = 0, None
    while remaining != 0:
        answers = carrier.ask(nodes, step, agreement)
        name = f"{what}, exchange {step + 1}"
        found = _usable(name, answers, len(nodes), remaining, admit)
        if bounds is not None:
            found = _plausible(name, found, admit, bounds)
        found, agreement = _agreed(name, found, weigh, admit, bounds)
        nodes, remaining = list(found), next(iter(found.values())).remaining
        step += 1
        if report is not None:
            report(step, step + remaining)
    assert agreement is not None
    return ExchangesDone(list(nodes), step, agreement)


def agree(contributions: Sequence[Contribution], weigh: Weigh, bounds: Bounds | None = None) -> Agreement:
    """Algorithm 3's means over the clients, with weights p_i."""
    weights = [weigh(contribution) for contribution in contributions]
    tensors = [contribution.tensors for contribution in contributions]
    images = sum(contribution.images for contribution in contributions)
    if bounds is not None:
        weights = bounds.weights(weights)
    if contributions[0].kind == "moments":
        mean, var = pooled_moments([each["mean"] for each in tensors], [each["var"] for each in tensors], weights)
        return Agreement({"mean": mean, "var": var}, images)
    return Agreement(weighted_mean(tensors, weights), images)


def _agreed(
    what: str, found: dict[int, Contribution], weigh: Weigh, admit: Admit, bounds: Bounds | None
) -> tuple[dict[int, Contribution], Agreement]:
    """The agreement without the contributions that would make the clients' arithmetic overflow, and the others."""
    while True:
        if not any(map(weigh, found.values())):
            raise RunFailed(f"{what}: the weights of all {len(found)} clients are zero")
        with np.errstate(over="ignore", invalid="ignore"):
            agreement = agree(list(found.values()), weigh, bounds)
        # As a Python number, since float16 cannot represent the bound; false for NaN.
        if all(float(np.abs(array).max()) <= _LARGEST for array in agreement.tensors.values()):
            return found, agreement
        largest = max(found, key=lambda node: _magnitude(found[node]))
        reason = f"with its {found[largest].kind}, the means of all clients exceed {_LARGEST:g} (the client diverged?)"
        kept = admit(what, {node: each.partition for node, each in found.items()}, [(largest, reason)], len(found))
        found = {node: found[node] for node in kept}


def _magnitude(contribution: Contribution) -> float:
    """The logarithm of the largest value in a contribution; a mean is squared in the variance of all clients."""
    powers = {"mean": 2 if contribution.kind == "moments" else 1, "var": 1}
    largest = {name: float(np.abs(array).max()) for name, array in contribution.tensors.items()}
    return max(powers[name] * math.log(value) if value else -math.inf for name, value in largest.items())


def _plausible(what: str, found: Mapping[int, Contribution], admit: Admit, bounds: Bounds) -> dict[int, Contribution]:
    """The contributions that are near those of the others."""
    nodes, contributions = list(found), list(found.values())
    tensors = [contribution.tensors for contribution in contributions]
    reasons = bounds.outliers(tensors, sorted(tensors[0]))
    refused = [(nodes[i], f"{contributions[i].kind}: {reason}") for i, reason in reasons.items()]
    kept = admit(what, {node: each.partition for node, each in found.items()}, refused, len(nodes))
    return {node: found[node] for node in kept}


def _usable(what: str, answers: Answers, asked: int, remaining: int | None, admit: Admit) -> dict[int, Contribution]:
    """The valid contributions to one exchange by node, in order, all of the most frequent kind, shape and step."""
    found = {node: answer for node, answer in answers.items() if isinstance(answer, Contribution)}
    partitions = {node: contribution.partition for node, contribution in found.items()}
    refused = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    # As in the gate, which streams do not pass; clients may report equal weights as their numbers of examples.
    large = [node for node, each in found.items() if each.images > each.examples]
    if 2 * len(large) <= len(found):
        reason = "its batch has {} images, and its data set {}"
        refused |= {node: reason.format(found[node].images, found[node].examples) for node in large}
    refused |= {node: why for node, each in found.items() if (why := problem(each, remaining)) is not None}
    nodes = admit(what, partitions, list(refused.items()), asked)
    forms = {node: _form(found[node]) for node in nodes}
    most = max(forms.values(), key=list(forms.values()).count)  # the first one if several are equally frequent
    others = [
        (node, f"it sent {form}, others {most}; do all clients have the same model?")
        for node, form in forms.items()
        if form != most
    ]
    if others:
        nodes = admit(what, {node: partitions[node] for node in nodes}, others, len(nodes))
    return {node: found[node] for node in nodes}


def problem(contribution: Contribution, remaining: int | None) -> str | None:
    """Why a contribution cannot be used, or None.

    `remaining` is the number of exchanges that were to follow the previous one; None before the first.
    """
    kind, follow = contribution.kind, contribution.remaining
    if follow > _MOST_EXCHANGES or (remaining is not None and follow != remaining - 1):
        expected = f"at most {_MOST_EXCHANGES}" if remaining is None else remaining - 1
        return f"it reports that {follow} exchanges follow, expected {expected}"
    if kind not in _TENSORS:
        return f"it sent {kind!r}, expected one of {', '.join(_TENSORS)}"
    if set(contribution.tensors) != _TENSORS[kind]:
        return f"{kind} has {sorted(contribution.tensors)}, expected {sorted(_TENSORS[kind])}"
    for name, array in contribution.tensors.items():
        if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
            return f"{name!r} is {array.dtype} of shape {array.shape}, expected floats, one per channel"
        if not np.isfinite(array).all():
            return f"{name!r} has values that are not finite (the client diverged?)"
        if name == "var" and kind != "gradients" and array.min() < 0:
            return "a variance is negative"
    return None


def _form(contribution: Contribution) -> tuple[Any, ...]:
    """The properties that all contributions to one exchange must share."""
    shapes = tuple((name, str(array.dtype), *array.shape) for name, array in contribution.tensors.items())
    return (contribution.kind, contribution.remaining, *shapes)
