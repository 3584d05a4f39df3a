"""How a round's exchanges travel, and which contributions can be used.

A `Carrier` sends an agreement and collects the clients' contributions, as Flower's messages or through an extension's
service. The loop over the exchanges, in `strategies.fedtan`, works with any carrier.

As messages, one exchange is a `query.exchange` to each client. The first one contains the model, and the train message
takes the place of the last one. If an engine's processes have the clients' parked rounds, it can carry the exchanges in
between without messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError
from fedbn_flwr.extensions import parts
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, absurd
from fedbn_flwr.messages.arrays import configs_in, pack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import reason_of, sent_model, with_config

from .codec import Agreement, Contribution, contribution_from_records, numbers_of

# The tensors of each kind of contribution.
_TENSORS = {"moments": {"mean", "var"}, "mean": {"mean"}, "variance": {"var"}, "gradients": {"mean", "var"}}
_MOST_EXCHANGES = 100_000  # that a round may have
_LARGEST = 1e18  # the largest value in a contribution; sums of squares are then finite in float32

Answers = Mapping[int, Contribution | str]  # by node; a string says why there is no contribution
# A function (tensors, keys) that says, by position, why tensors are too far from the others.
Outliers = Callable[[Sequence[Arrays], Sequence[str]], Mapping[int, str]]
# An engine's exchange with parked rounds (nodes, agreement, seconds); returns None if the engine has none.
ContinueParked = Callable[[Sequence[int], Agreement, float], Answers | None]


@dataclass(frozen=True)
class ExchangesDone:
    """The end of a round's exchanges."""

    nodes: Sequence[int]  # the nodes that took part in all exchanges
    steps: int
    agreement: Agreement  # the last agreement, which the nodes have not received yet


class Carrier(Protocol):
    """How the exchanges of one round travel."""

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        """Send nodes the agreement of exchange `step`, and return their next contributions.

        The first exchange has no agreement (None). A node that does not answer in time has no entry.
        """

    def begin(self, run_exchanges: Callable[[], ExchangesDone]) -> list[Message]:
        """Make the round's train messages, and call `run_exchanges`, which calls `ask`.

        A carrier may call it before it returns, or in a thread while clients handle the messages.
        """

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        """The replies of the clients that took part in all exchanges."""


MakeCarrier = Callable[[Grid, Sequence[Message], float], Carrier]  # for these train messages, with a time limit


def service() -> MakeCarrier | None:
    """The exchange service from the ServerApp's environment, if there is one; SettingsError if it cannot be used."""
    return next(filter(None, (find() for find in parts("carriers"))), None)


class ByMessages:
    """A carrier over `grid`; without `continue_parked`, all exchanges are messages."""

    def __init__(
        self, grid: Grid, messages: Sequence[Message], timeout: float, continue_parked: ContinueParked | None
    ) -> None:
        self._grid, self._timeout, self._continue_parked = grid, timeout, continue_parked
        self._asked = {message.metadata.dst_node_id: message for message in messages}

    def begin(self, run_exchanges: Callable[[], ExchangesDone]) -> list[Message]:
        done = run_exchanges()
        return self._messages(MessageType.TRAIN, done.nodes, done.steps, done.agreement)

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        return replies  # the others received no train message

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        if agreement is not None and self._continue_parked is not None:
            answers = self._continue_parked(nodes, agreement, self._timeout)
            if answers is not None:
                return answers
        questions = self._messages(protocol.EXCHANGE_QUERY, nodes, step, agreement)
        replies = gate(self._grid.send_and_receive(questions, timeout=self._timeout))
        return {reply.metadata.src_node_id: _answer(reply) for reply in replies}

    def _messages(self, kind: str, nodes: Sequence[int], step: int, agreement: Agreement | None) -> list[Message]:
        more = {protocol.EXCHANGE_STEP: step, **({} if agreement is None else numbers_of(agreement))}
        agreed = None if agreement is None else pack(agreement.tensors)

        def content(asked: Message) -> RecordDict:
            model, records = sent_model(asked.content), with_config(asked, more).content
            rest = records if kind == MessageType.TRAIN else configs_in(records)
            others = {name: record for name, record in rest.items() if record is not model}
            return RecordDict({"arrays": model if agreed is None else agreed, **others})

        return [Message(content(self._asked[node]), node, kind) for node in nodes if node in self._asked]


def _answer(reply: Message) -> Contribution | str:
    if reply.has_error():
        return reason_of(reply)
    try:
        return contribution_from_records(reply.content)
    except MessageError as error:
        return str(error)


# --- which contributions can be used ---


def judge(
    nodes: Sequence[int], answers: Answers, remaining: int | None, outliers: Outliers | None
) -> tuple[dict[int, Contribution], list[tuple[int, str]]]:
    """The contributions by node, and the problems of unusable ones; see `contribution_problems` for `remaining`."""
    contributions = {node: answer for node in nodes if isinstance(answer := answers.get(node), Contribution)}
    refused = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    refused |= contribution_problems(contributions, remaining)
    usable = [node for node in contributions if node not in refused]
    tensors = [contributions[node].tensors for node in usable]
    far = absurd(tensors, {}, () if usable and contributions[usable[0]].kind == "gradients" else ("var",))
    if usable and outliers is not None:
        far |= outliers(tensors, sorted(tensors[0]))
    refused |= {usable[i]: f"{contributions[usable[i]].kind}: {reason}" for i, reason in far.items()}
    return contributions, list(refused.items())


def contribution_problems(contributions: Mapping[int, Contribution], remaining: int | None) -> dict[int, str]:
    """Why contributions cannot be used, by node: they have a problem, or another form than most of the others.

    `remaining` is the number of exchanges that were to follow the previous one; None before the first.
    """
    # The gate checks this in messages, and streams bypass it. It is fine if most clients report equal weights instead.
    large = {
        node: f"its batch has {contribution.batch} examples, but its data set has {contribution.examples}"
        for node, contribution in contributions.items()
        if contribution.batch > contribution.examples
    }
    refused = large if 2 * len(large) <= len(contributions) else {}
    refused |= {
        node: why
        for node, contribution in contributions.items()
        if (why := contribution_problem(contribution, remaining)) is not None
    }
    forms = {node: _form(contribution) for node, contribution in contributions.items() if node not in refused}
    times = Counter(forms.values())
    # In a tie, the form of the first partition.
    most = min(forms, key=lambda node: (-times[forms[node]], contributions[node].partition or 0), default=0)
    others = {
        node: f"it sent {form}, but others sent {forms[most]}; do all clients have the same model?"
        for node, form in forms.items()
        if form != forms[most]
    }
    return refused | others


def contribution_problem(contribution: Contribution, remaining: int | None) -> str | None:
    """Why a contribution cannot be used, or None."""
    kind, follow = contribution.kind, contribution.remaining
    if follow > _MOST_EXCHANGES or (remaining is not None and follow != remaining - 1):
        expected = f"at most {_MOST_EXCHANGES}" if remaining is None else remaining - 1
        return f"it reports that {follow} exchanges follow; expected {expected}"
    if not (contribution.batch and contribution.values):
        return (
            f"its batch has {contribution.batch} examples and {contribution.values} values per channel; expected one "
            "or more of each"
        )
    if kind not in _TENSORS:
        return f"it sent {kind!r}; expected one of {', '.join(_TENSORS)}"
    if set(contribution.tensors) != _TENSORS[kind]:
        return f"{kind} has {sorted(contribution.tensors)}; expected {sorted(_TENSORS[kind])}"
    for name, array in contribution.tensors.items():
        if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
            return f"{name!r} is {array.dtype} of shape {array.shape}; expected floats, one per channel"
        most = min(_LARGEST, float(np.finfo(array.dtype).max) / 8)
        least = -most
        if kind != "gradients":  # differences of means are squared in the variance of all clients
            least, most = (0.0, most) if name == "var" else (-math.sqrt(most), math.sqrt(most))
        low, high = float(array.min()), float(array.max())
        if not least <= low <= high <= most:  # true for NaN
            return (
                f"{name!r} has values from {low:g} to {high:g}; expected {least:g} to {most:g} (the client diverged?)"
            )
    return None


def _form(contribution: Contribution) -> tuple[object, ...]:
    """The properties that all contributions to one exchange must share."""
    shapes = [(name, array.dtype.str, *array.shape) for name, array in contribution.tensors.items()]
    return (contribution.kind, contribution.remaining, *shapes)
