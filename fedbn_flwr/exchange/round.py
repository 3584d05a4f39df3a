"""The server's loop over the exchanges of one round.

The loop does not depend on messages or streams: a `Carrier` sends the agreements and collects the clients'
contributions. A client without a valid contribution is excluded from the rest of the round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedbn_flwr.messages.aggregate import Arrays

from .codec import Agreement, Contribution

# The tensors of each kind of contribution.
_TENSORS = {"moments": {"mean", "var"}, "mean": {"mean"}, "variance": {"var"}, "gradients": {"mean", "var"}}
_MOST_EXCHANGES = 100_000  # in a round
_LARGEST = 1e18  # of an agreed value: its square and its sums are finite in float32

Answers = Mapping[int, Contribution | str]  # by node; a string is the reason why there is no contribution
Found = dict[int, Contribution]  # by node, in the order of partitions
Agree = Callable[[str, Sequence[Contribution]], Agreement]  # the name of the exchange in messages, and what to average
# Returns the nodes that stay in the round, in order. Arguments: the name of the exchange in messages; the partition
# that each node reports; the reasons for rejecting an answer, with the node; the number of nodes asked. Logs the
# reasons; raises RunFailed if too few nodes remain.
Admit = Callable[[str, Mapping[int, int | None], Sequence[tuple[int, str]], int], list[int]]
Outliers = Callable[
    [Sequence[Arrays], Sequence[str]], Mapping[int, str]
]  # why tensors are too far from the others, by position
Report = Callable[[str, int, int], None]  # what is counted, how many are done, of how many


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
    agree: Agree,
    admit: Admit,
    *,
    outliers: Outliers | None = None,
    report: Report | None = None,
    per_layer: int = 2,
) -> ExchangesDone:
    """All exchanges of a round, `per_layer` for each batch norm; `what` is the round's name in messages."""
    agreement: Agreement | None = None
    step, remaining, done = 0, None, Counter[str]()
    while remaining != 0:
        answers = carrier.ask(nodes, step, agreement)
        step += 1
        exchange = _Exchange(f"{what}, exchange {step}", admit, is_first=remaining is None)
        found = exchange.usable(nodes, answers, remaining)
        if outliers is not None:
            tensors = [each.tensors for each in found.values()]
            far = outliers(tensors, sorted(tensors[0]))
            reasons = {node: f"{found[node].kind}: {far[i]}" for i, node in enumerate(found) if i in far}
            found = exchange.without(found, reasons)
        found, agreement = exchange.agreed(found, agree)
        nodes, first = list(found), next(iter(found.values()))
        remaining = first.remaining
        done[first.kind] += 1
        if report is not None:
            way = "backward" if first.kind == "gradients" else "forward"
            report(f"{way} pass, layers", done[first.kind], (step + remaining) // per_layer)
    assert agreement is not None
    return ExchangesDone(list(nodes), step, agreement)


@dataclass(frozen=True)
class _Exchange:
    """The choice of the contributions to one exchange."""

    what: str
    admit: Admit
    is_first: bool

    def without(self, found: Found, refused: Mapping[int, str], asked: int | None = None) -> Found:
        """The contributions of the nodes that stay in the round; `asked` nodes could have contributed."""
        asked = len(found) if asked is None else asked
        if not refused and len(found) == asked and not self.is_first:  # all stay, and are in order
            return found
        partitions = {node: each.partition for node, each in found.items()}
        return {node: found[node] for node in self.admit(self.what, partitions, list(refused.items()), asked)}

    def usable(self, nodes: Sequence[int], answers: Answers, remaining: int | None) -> Found:
        """The valid contributions, all of the most frequent kind, shape and step."""
        found = {node: each for node in nodes if isinstance(each := answers.get(node), Contribution)}
        refused = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
        # As in the gate, which streams do not pass; clients may report equal weights as their numbers of examples.
        large = [node for node, each in found.items() if each.images > each.examples]
        if 2 * len(large) <= len(found):
            reason = "its batch has {} images, and its data set {}"
            refused |= {node: reason.format(found[node].images, found[node].examples) for node in large}
        refused |= {node: why for node, each in found.items() if (why := problem(each, remaining)) is not None}
        found = self.without(found, refused, len(nodes))
        forms = [_form(each) for each in found.values()]
        most = max(forms, key=forms.count)  # the first one if several are equally frequent
        others = {
            node: f"it sent {form}, others {most}; do all clients have the same model?"
            for node, form in zip(found, forms, strict=True)
            if form != most
        }
        return self.without(found, others)

    def agreed(self, found: Found, agree: Agree) -> tuple[Found, Agreement]:
        """The agreement without the contributions that would make the clients' arithmetic overflow, and the others."""
        while True:
            with np.errstate(over="ignore", invalid="ignore"):
                agreement = agree(self.what, list(found.values()))
            # As a Python number, since float16 cannot represent the bound; false for NaN.
            if all(float(np.abs(array).max()) <= _LARGEST for array in agreement.tensors.values()):
                return found, agreement
            node = max(found, key=lambda node: _magnitude(found[node]))
            reason = f"with its {found[node].kind}, the means of all clients exceed {_LARGEST:g} (the client diverged?)"
            found = self.without(found, {node: reason})


def _magnitude(contribution: Contribution) -> float:
    """The logarithm of the largest value in a contribution; a mean is squared in the variance of all clients."""
    powers = {"mean": 2 if contribution.kind == "moments" else 1, "var": 1}
    largest = {name: float(np.abs(array).max()) for name, array in contribution.tensors.items()}
    return max(powers[name] * math.log(value) if value else -math.inf for name, value in largest.items())


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
