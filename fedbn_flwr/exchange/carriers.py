"""A round's exchanges on the server: the loop over them, which contributions it can use, and how they travel.

A `Carrier` sends an agreement and collects the clients' contributions, as Flower's messages or through an extension's
service. The loop works with any carrier.

As messages, one exchange is a `query.exchange` to each client. The first one contains the model, and the train message
takes the place of the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.extensions import parts
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import config_of, configs_in
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.limits import values_problems
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import reason_of, sent_model, with_config

from .codec import END, Agreement, Contribution, agreement_to_records, contribution_from_records

# Contributions by node, and why other nodes sent none. A node that does not answer in time is in neither.
Answers = tuple[Mapping[int, Contribution], Mapping[int, str]]


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

        The first exchange has no agreement (None).
        """


class Exchanges(Protocol):
    """A round's exchanges, which come before the train messages or run while clients handle these."""

    messages: Sequence[Message]  # the train messages

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        """The replies of the clients that took part in all exchanges."""


@dataclass(frozen=True)
class Cohort:
    """The clients of a round with exchanges."""

    grid: Grid
    messages: Sequence[Message]  # the train messages, without exchanges
    timeout: float  # seconds for one exchange
    round_timeout: float  # seconds for the train messages
    name: Callable[[int], str] = str  # how the log names a node's client


MakeExchanges = Callable[[Cohort, Callable[[Carrier], ExchangesDone]], Exchanges]


def service() -> MakeExchanges:
    """The exchange service from the ServerApp's environment, else messages; SettingsError if it cannot be used."""
    return next(filter(None, (find() for find in parts("carriers"))), ByMessages)


# --- the loop ---

# The tensors of each kind of contribution.
_TENSORS: dict[str, set[str]] = {
    "moments": {"mean", "var"},
    "mean": {"mean"},
    "variance": {"var"},
    "gradients": {"mean", "var"},
    END: set(),
}
_MOST_EXCHANGES = 100_000  # that a round may have

# Gets the partitions by node, and nodes with their problems; returns the nodes that stay, in the order they count.
Admit = Callable[[str, Mapping[int, int | None], Sequence[tuple[int, str]]], Sequence[int]]
# A function (tensors, keys) that says, by node, why tensors are too far from the others.
Outliers = Callable[[Mapping[int, Arrays], Sequence[str]], Mapping[int, str]]


def run_exchanges(
    carrier: Carrier,
    what: str,
    nodes: Sequence[int],
    admit: Admit,
    agree: Callable[[str, Sequence[Contribution]], Agreement],
    outliers: Outliers,
) -> ExchangesDone:
    """Run all exchanges of a round. A client without a usable contribution is left out of the rest of the round.

    `admit` and `agree` get the name of the exchange, which begins with `what`, the round's.
    """
    agreement = None
    unfinished: list[str] = []  # a layer for each pass whose gradients are yet to come
    for step in range(1, _MOST_EXCHANGES):
        name = f"{what}, exchange {step}"
        contributions, problems = judge(nodes, *carrier.ask(nodes, step - 1, agreement), unfinished, outliers)
        if step == 1 or problems or len(contributions) < len(nodes):  # otherwise all stay, and are in order
            nodes = admit(name, {node: each.partition for node, each in contributions.items()}, problems)
        usable = [contributions[node] for node in nodes]
        agreement, kind, layer = agree(name, usable), usable[0].kind, usable[0].layer
        if kind == "gradients":
            unfinished.remove(layer)
        elif kind not in (END, "mean"):  # the variance follows
            unfinished.append(layer)
        if kind == END or (kind == "gradients" and not unfinished):
            return ExchangesDone(nodes, step, agreement)
    raise RunFailed(f"the clients have begun more than {_MOST_EXCHANGES:,} exchanges in a round")


def judge(
    nodes: Sequence[int],
    found: Mapping[int, Contribution],
    failed: Mapping[int, str],
    unfinished: Collection[str],
    outliers: Outliers,
) -> tuple[dict[int, Contribution], list[tuple[int, str]]]:
    """The contributions by node, and the problems of unusable ones; see `contribution_problems` for `unfinished`."""
    contributions = {node: found[node] for node in nodes if node in found}
    refused = {**failed, **contribution_problems(contributions, unfinished)}
    usable = {node: each.tensors for node, each in contributions.items() if node not in refused}  # of one form
    is_backward = any(contributions[node].kind == "gradients" for node in usable)
    variances = () if is_backward else {"var"}.intersection(*usable.values())
    problems = values_problems(usable, {}, variances)
    left = {node: tensors for node, tensors in usable.items() if node not in problems}
    problems |= outliers(left, sorted(next(iter(left.values()), ())))
    refused |= {node: f"{contributions[node].kind}: {reason}" for node, reason in problems.items()}
    return contributions, list(refused.items())


def contribution_problems(
    contributions: Mapping[int, Contribution], unfinished: Collection[str] = ()
) -> dict[int, str]:
    """Why contributions cannot be used, by node: they have a problem, or another form than most of the others.

    `unfinished` are the layers whose gradients are yet to come.
    """
    # It is fine if most clients do: they give weights, whose scale is free, as numbers of examples.
    large = {
        node: f"its batch has {contribution.batch} examples, but its data set has {contribution.examples}"
        for node, contribution in contributions.items()
        if contribution.batch > contribution.examples
    }
    refused = large if 2 * len(large) <= len(contributions) else {}
    refused |= {
        node: why
        for node, contribution in contributions.items()
        if (why := contribution_problem(contribution, unfinished)) is not None
    }
    forms = {node: _form(contribution) for node, contribution in contributions.items() if node not in refused}
    times = Counter(forms.values())
    # In a tie, the form of the first partition.
    most = min(forms, key=lambda node: (-times[forms[node]], contributions[node].partition or 0), default=0)
    others = {
        node: f"it sent {form}, but client {_number(most, contributions[most])} sent {forms[most]}; do all clients "
        "have the same model, whose forward calls the same layers?"
        for node, form in forms.items()
        if form != forms[most]
    }
    return refused | others


def contribution_problem(contribution: Contribution, unfinished: Collection[str] = ()) -> str | None:
    """Why a contribution cannot be used, or None."""
    kind = contribution.kind
    if not (contribution.batch and contribution.values):
        return (
            f"its batch has {contribution.batch} examples and {contribution.values} values per channel; expected one "
            "or more of each"
        )
    if {*contribution.tensors} != _TENSORS.get(kind):
        forms = ", ".join(f"{kind} with {sorted(names)}" for kind, names in _TENSORS.items())
        return f"it sent {shown(kind)} with {shown(sorted(contribution.tensors))}; expected one of {forms}"
    if kind == "gradients" and contribution.layer not in unfinished:
        return f"it sent gradients of the layer {shown(contribution.layer)}; expected one of {[*unfinished]}"
    for name, array in contribution.tensors.items():
        if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
            return f"{name!r} is {array.dtype} of shape {array.shape}; expected floats, one per channel"
    return None


def _number(node: int, contribution: Contribution) -> int:
    return node if contribution.partition is None else contribution.partition


def _form(contribution: Contribution) -> str:
    """The properties that all contributions to one exchange must share."""
    arrays = (f"{name}: {array.dtype.str} {array.shape}" for name, array in contribution.tensors.items())
    return f"{contribution.kind} of the layer {shown(contribution.layer)} ({', '.join(arrays)})"


# --- messages ---


class ByMessages:
    """A carrier of Flower's messages, which suits any grid."""

    def __init__(self, cohort: Cohort, run_exchanges: Callable[[Carrier], ExchangesDone]) -> None:
        self._cohort = cohort
        self._asked = {message.metadata.dst_node_id: message for message in cohort.messages}
        done = run_exchanges(self)
        self.messages: Sequence[Message] = self._messages(MessageType.TRAIN, done.nodes, done.steps, done.agreement)

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        return replies

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        questions = self._messages(protocol.EXCHANGE_QUERY, nodes, step, agreement)
        contributions, problems = dict[int, Contribution](), dict[int, str]()
        for reply in gate(self._cohort.grid.send_and_receive(questions, timeout=self._cohort.timeout)):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise MessageError(reason_of(reply))
                contributions[node] = contribution_from_records(reply.content)
            except MessageError as error:
                problems[node] = str(error)
        return contributions, problems

    def _messages(self, kind: str, nodes: Sequence[int], step: int, agreement: Agreement | None) -> list[Message]:
        agreed = RecordDict() if agreement is None else agreement_to_records(agreement)
        more = {protocol.EXCHANGE_STEP: step, **config_of(agreed)}

        def content(asked: Message) -> RecordDict:
            model, records = sent_model(asked.content), with_config(asked, more).content
            rest = records if kind == MessageType.TRAIN else configs_in(records)
            others = {name: record for name, record in rest.items() if record is not model}
            return RecordDict({"arrays": agreed.get("arrays", model), **others})

        return [Message(content(self._asked[node]), node, kind) for node in nodes if node in self._asked]
