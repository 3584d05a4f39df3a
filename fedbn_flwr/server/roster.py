"""The clients as the server knows them, and what becomes of their replies in a round, an evaluation or a query."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, Message

from fedbn_flwr.errors import LOG, Diverged, MessageError, RunFailed
from fedbn_flwr.messages.aggregate import large_value
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.quote import one_line
from fedbn_flwr.messages.reply import Reply, partition_of, read_reply, reason_of, refusal


@dataclass(frozen=True)
class Asked:
    """The nodes that are asked in a round, an evaluation or a query, without those that are left out so far."""

    nodes: Sequence[int] = ()
    needed: int = 1  # usable replies, if any node is asked
    arrays: ArrayRecord | None = None  # the model that the nodes receive
    left_out: Sequence[str] = ()  # client and problem


@dataclass(frozen=True)
class Attendance:
    """What became of the nodes that were asked."""

    used: Sequence[int] = ()  # the nodes whose replies are used, in the order of partitions
    left_out: Sequence[str] = ()  # client and problem
    refused: Sequence[Message] = ()  # the replies that are not used, as errors


@dataclass(frozen=True)
class Roster:
    """The partitions that nodes have reported, by which clients are known: node ids are random in every run."""

    partitions: dict[int, int] = field(default_factory=dict)  # by node id
    unnumbered: set[int] = field(default_factory=set)  # the nodes that have reported that they have no partition

    def learn(self, reported: Mapping[int, int | None]) -> dict[int, str]:
        """Add what nodes report, and return the problems of those that reported another partition before.

        Two nodes may report the same one: a node may return under another id, and it is not known which one is right.
        """
        numbers = {node: number for node, number in reported.items() if number is not None}
        self.unnumbered.update(reported.keys() - numbers.keys())
        known = {node: self.partitions.setdefault(node, number) for node, number in numbers.items()}
        return {
            node: f"its partition-id is {number}, and it reported {known[node]} before"
            for node, number in numbers.items()
            if number != known[node]
        }

    def client(self, node: int) -> int:
        """The number of a node's client, as `client_number` on the client: its partition or, without one, the node."""
        return self.partitions.get(node, node)

    def position(self, node: int) -> tuple[int, int, int]:
        """The sort key of a node: its partition; nodes that have not reported one follow, sorted by node id."""
        partition = self.partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def name(self, node: int) -> str:
        partition = self.partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"

    def absent(self, nodes: Iterable[int]) -> list[str]:
        """The names of the clients that none of these nodes serves; one that is back may have another node id."""
        here = {*map(self.client, nodes)}
        away = [node for node, client in self.partitions.items() if client not in here]
        return [self.name(node) for node in sorted(away, key=self.position)]

    def attendance(self, what: str, asked: Asked, screening: Screening) -> tuple[Attendance, list[Reply]]:
        """Whose replies are used, and these replies; RunFailed if they are too few, see `admit`."""
        present, problems = self.admit(what, asked, screening.partitions, screening.problems)
        errors = [
            refusal(message, problems[node]) if message.has_content() else message
            for message in screening.messages
            if (node := message.metadata.src_node_id) not in present.nodes
        ]
        return Attendance(present.nodes, present.left_out, errors), [screening.usable[node] for node in present.nodes]

    def admit(
        self, what: str, asked: Asked, answered: Mapping[int, int | None], problems: Sequence[tuple[int, str]]
    ) -> tuple[Asked, Mapping[int, str]]:
        """The nodes that answered without a problem, in the order of partitions, and the problems of others by node.

        `what` names the exchange or the round in messages. `answered` has the partition that each node reported, and
        `problems` are pairs of node and text. The log names the clients that are left out; RunFailed lists them if
        fewer than `needed` of the nodes that were asked remain.
        """
        moved = self.learn(answered)  # such a client counts once, whatever other problem it has
        problems = [*(problem for problem in problems if problem[0] not in moved), *moved.items()]
        # The gate and the client name the client too, for Flower's strategies, which log the reason as it is.
        reasons = sorted(
            f"{self.name(node)}: {_without_number(reason, self.partitions.get(node))}" for node, reason in problems
        )
        bad, nodes = dict(problems), asked.nodes
        usable = sorted(answered.keys() - bad.keys(), key=self.position)
        silent = sorted({*nodes} - answered.keys() - bad.keys(), key=self.position)
        if (count := len(nodes) - len(usable) - len(problems)) == len(silent):
            reasons += [f"{self.name(node)}: it did not answer in time" for node in silent]
        elif count > 0:  # the others have errors that name the SuperLink
            reasons.append(f"{count} of {len(nodes)} clients did not answer in time")
        present = replace(asked, nodes=usable, left_out=[*asked.left_out, *reasons])
        if nodes and len(usable) < (needed := max(1, min(asked.needed, len(nodes)))):
            raise _too_few(f"{what}: {len(usable)} of {len(nodes)} clients sent a usable reply, {needed}", present)
        for reason in reasons:
            LOG.warning("%s: left out %s", what, one_line(reason))
        return present, bad


class Screening:
    """Replies that have passed the gate, as checks leave them out one after another."""

    def __init__(self, messages: Sequence[Message], name: str = "arrays", records: Collection[str] | None = ()) -> None:
        """Read the replies, see `read_reply`."""
        self.messages = messages
        self.usable: dict[int, Reply] = {}  # by node
        self.partitions: dict[int, int | None] = {}  # that nodes report, by node
        self.problems: list[tuple[int, str]] = []  # not a dict: all errors for lost nodes have the SuperLink's node id
        for message in messages:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise MessageError(reason_of(message))
                self.partitions[node] = partition_of(message.content)
                self.usable[node] = read_reply(message, name, records)
            except MessageError as error:
                self.problems.append((node, str(error)))

    def check(self, problem: Callable[[Reply], str | None]) -> None:
        """Leave out each reply that has a problem by itself."""
        problems: dict[int, str] = {}
        for node, reply in self.usable.items():
            try:
                reason = problem(reply)
            except MessageError as error:
                reason = str(error)
            if reason:
                problems[node] = reason
        self.leave_out(problems)

    def leave_out(self, problems: Mapping[int, str]) -> None:
        """Leave out the replies of these nodes, with the reasons."""
        self.problems += problems.items()
        self.usable = {node: reply for node, reply in self.usable.items() if node not in problems}


def _too_few(what: str, asked: Asked) -> RunFailed:
    listed = "".join(f"\n  - {one_line(reason)}" for reason in asked.left_out) or " no reply"
    what += " are needed"
    if asked.arrays is not None and (large := large_value(unpack(asked.arrays))) is not None:
        what += f"; they received a model with {large}: it diverged, or a reply was false"
    if asked.left_out and all("diverged?" in reason for reason in asked.left_out):
        advice = "The same run would diverge again; lower the learning rate, or clip gradients"
        return Diverged(f"{what}:{listed}\n{advice}")
    return RunFailed(f"{what}:{listed}")


def _without_number(reason: str, client: int | None) -> str:
    return re.sub(rf"^client {client}\b[: ]*", "", reason)
